"""The fixtures that need a server are available to every test; a server starts when asked for."""

pytest_plugins = ["tests.servers.fixtures"]
