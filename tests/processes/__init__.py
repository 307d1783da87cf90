"""Real processes on one SQLite file: raced, killed, stopped, forked."""
