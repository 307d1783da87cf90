"""Applications that a worker is given by name: what kind they are, and whose routes they have.

Owns what is wrong with a name, and the life of an ASGI application in a worker's event loop.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from retrysafe.async_idempotency import AsyncIdempotency
from retrysafe.cli.modules import imported
from retrysafe.cli.problems import Problem, usage
from retrysafe.idempotency import Idempotency
from retrysafe.runtime.calls import calls_of
from retrysafe.workers.duties import WorkerPolicy
from retrysafe.workers.worker import AsyncDuty, AsyncWorker

I = TypeVar("I", Idempotency, AsyncIdempotency)  # noqa: E741 — one of the two objects.


@dataclass(frozen=True, slots=True)
class Application:
    """An application, by the name that it was given by."""

    name: str
    app: Any
    is_async: bool

    @property
    def kind(self) -> str:
        """What people call it."""
        return "an ASGI" if self.is_async else "a WSGI"


def named_application(name: str) -> Application:
    """The application; raises a usage problem for a name that means none."""
    module_name, mark, path = name.partition(":")
    if not (module_name and mark and path):
        raise usage(f"an application is named module:app, got {name}")
    found: Any = imported(module_name)
    for part in path.split("."):
        if not hasattr(found, part):
            raise usage(f"{module_name} has no {path}: name the application that your server runs")
        found = getattr(found, part)
    if not callable(found):
        raise usage(f"{name} is no application, but a {type(found).__name__}")
    called = found if inspect.isroutine(found) else type(found).__call__
    needed = _needed(found)
    if isinstance(found, type) or needed not in (2, 3):
        raise usage(
            f"{name} is called with {needed} values, and neither an ASGI application (scope, "
            "receive, send) nor a WSGI application (environ, start_response) is: name what your "
            "server runs, not the function or the class that makes it"
        )
    return Application(name, found, needed == 3 or inspect.iscoroutinefunction(called))


def _needed(called: Any) -> int:
    """How many values it must be called with."""
    try:
        parameters = inspect.signature(called).parameters.values()
    except (TypeError, ValueError):
        return 0
    places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(item.kind in places and item.default is item.empty for item in parameters)


def routed(kind: type[I], name: str) -> list[I]:
    """The objects of this kind that have resumable routes in this process.

    Raises a usage problem when none has.
    """
    found: dict[int, Any] = {}
    others = False
    # Imported here: most commands need nothing of HTTP, and it takes longer than all they import.
    from retrysafe.http import resumers  # noqa: PLC0415

    for source in list(resumers.protections):
        source.refresh()
        idempotency = source.idempotency
        if not resumers.has_resumable_routes(calls_of(idempotency).operations):
            continue
        if isinstance(idempotency, kind):
            found[id(idempotency)] = idempotency
        else:
            others = True
    if not found:
        raise _without_routes(kind, name, has_others=others)
    return list(found.values())


def _without_routes(kind: type[Any], name: str, *, has_others: bool) -> Problem:
    if has_others:
        own, other = ("an ASGI", "a WSGI") if kind is AsyncIdempotency else ("a WSGI", "an ASGI")
        return usage(
            f"{name} is {own} application, and its resumable routes belong to {other} application: "
            "name that one"
        )
    return usage(
        f"{name} has no resumable route: write Rule(…, resumable=True) where the route is "
        "protected; in Django, add RetrysafeMiddleware"
    )


@asynccontextmanager
async def started_worker(
    application: Application, also: Iterable[AsyncIdempotency], policy: WorkerPolicy
) -> AsyncIterator[AsyncWorker]:
    """The worker of an ASGI application, which is started before and stopped after it.

    `also` are objects whose functions it resumes beside. Raises a usage problem.
    """
    objects: dict[int, AsyncIdempotency] = {id(item): item for item in also}
    try:
        from retrysafe.http.asgi_resume import Lifespan  # noqa: PLC0415 — as above.

        async with Lifespan(application.app) as app:
            routes = routed(AsyncIdempotency, application.name)
            objects |= {id(item): item for item in routes}
            duties: dict[str, AsyncDuty] = {}
            for number, idempotency in enumerate(objects.values(), 1):
                prefix = "" if len(objects) == 1 else f"{number} "
                made = idempotency.worker(policy, app=app).duties
                duties |= {f"{prefix}{name}": duty for name, duty in made.items()}
            yield AsyncWorker(duties)
    finally:
        for idempotency in objects.values():
            await idempotency.close()
