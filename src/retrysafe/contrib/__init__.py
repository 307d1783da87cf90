"""For applications that keep their migrations in another tool."""
