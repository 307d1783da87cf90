"""The drivers of the PostgreSQL store, behind one port."""
