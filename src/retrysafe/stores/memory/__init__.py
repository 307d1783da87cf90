"""Records in the memory of one process: for tests, and for trying things out."""
