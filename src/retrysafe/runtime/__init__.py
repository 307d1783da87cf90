"""What the engine runs on: ports for threads and for event loops, and calls over them."""
