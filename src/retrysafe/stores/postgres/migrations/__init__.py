"""The migrations of the PostgreSQL schema, in order."""
