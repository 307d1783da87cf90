"""The fixtures that need a server are available to every test; a server starts when asked for."""

import signal

pytest_plugins = ["tests.servers.fixtures"]

# A shell that starts this run in the background makes it ignore Ctrl-C, and so would every command
# that the tests interrupt on purpose.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
