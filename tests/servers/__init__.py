"""Real servers for the tests, on free loopback ports, stopped by their own process id."""
