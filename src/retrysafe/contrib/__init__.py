"""For applications of one framework, and for those that keep their migrations in another tool."""
