"""The migrations of the SQLite schema, in order."""
