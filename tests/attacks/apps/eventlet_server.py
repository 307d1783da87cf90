"""The application behind eventlet's own server, patched before or after it is made."""

from __future__ import annotations

import os
import sys

# Its own look-ups would import trio by way of httpx, which eventlet's sockets are no match for.
os.environ["EVENTLET_NO_GREENDNS"] = "yes"
import eventlet
import eventlet.wsgi

port, when = sys.argv[1:]
if when == "before":
    eventlet.monkey_patch()
from tests.attacks.apps.wsgi_app import application  # noqa: E402 — the order is the point.

if when == "after":
    eventlet.monkey_patch()
eventlet.wsgi.server(eventlet.listen(("127.0.0.1", int(port))), application)
