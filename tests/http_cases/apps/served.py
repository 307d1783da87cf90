"""What a server is pointed at: the application that its environment names."""

from __future__ import annotations

import os
from importlib import import_module

from tests.http_cases.apps.mounting import mounted_asgi, mounted_wsgi
from tests.http_cases.configuration import APPLICATION_VARIABLE, MOUNTS, MOUNTS_VARIABLE

_protocol, _name = os.environ[APPLICATION_VARIABLE].split(":")
_mounted = {"asgi": mounted_asgi, "wsgi": mounted_wsgi}[_protocol]
_prefixes = {prefix.rstrip("/") for prefix in os.environ[MOUNTS_VARIABLE].split(" ")}
application = _mounted(
    import_module(f"tests.http_cases.apps.{_name}").make,
    [mount for mount in MOUNTS if mount.prefix in _prefixes],
)
