"""Keys, callers, secrets and fingerprints: whose request it is, and whether it is the same one."""
