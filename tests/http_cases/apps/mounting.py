"""Puts mounts of an application behind one server, as either protocol says it is done."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from retrysafe import AsyncIdempotency, Idempotency
from retrysafe.http import IdempotencyMiddleware, WSGIIdempotencyMiddleware
from tests.http_cases.configuration import Mount, mount_of

Make = Callable[[Mount], Any]


def mounted_asgi(make: Make, mounts: Iterable[Mount]) -> Any:
    """One ASGI application of these mounts; it has a lifespan of its own."""
    apps = {mount.prefix: _around_asgi(mount, make(mount)) for mount in mounts}

    async def application(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await _live(receive, send)
            return
        prefix = mount_of(scope["path"]).prefix
        if prefix:
            scope = {**scope, "root_path": scope.get("root_path", "") + prefix}
        await apps[prefix](scope, receive, send)

    return application


def _around_asgi(mount: Mount, app: Any) -> Any:
    if not mount.is_nested:
        return app
    idempotency = AsyncIdempotency(mount.store(), **mount.face_options())
    return IdempotencyMiddleware(app, idempotency, **mount.middleware_options())


def _around_wsgi(mount: Mount, app: Any) -> Any:
    if not mount.is_nested:
        return app
    idempotency = Idempotency(mount.store(), **mount.face_options())
    return WSGIIdempotencyMiddleware(app, idempotency, **mount.middleware_options())


async def _live(receive: Any, send: Any) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


def mounted_wsgi(make: Make, mounts: Iterable[Mount]) -> Any:
    """One WSGI application of these mounts."""
    apps = {mount.prefix: _around_wsgi(mount, make(mount)) for mount in mounts}

    def application(environ: dict[str, Any], start_response: Any) -> Any:
        prefix = mount_of(environ["PATH_INFO"]).prefix
        if prefix:
            environ["SCRIPT_NAME"] = environ.get("SCRIPT_NAME", "") + prefix
            environ["PATH_INFO"] = environ["PATH_INFO"][len(prefix) :]
        return apps[prefix](environ, start_response)

    return application
