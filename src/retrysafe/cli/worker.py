"""`retrysafe worker`: finishes abandoned operations, and looks after the store."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from typing import Annotated, Any, Final

import typer

from retrysafe.async_idempotency import AsyncIdempotency
from retrysafe.cli import options, output
from retrysafe.cli.applications import Application, named_application, routed, started_worker
from retrysafe.cli.modules import imported
from retrysafe.cli.problems import ExitCode, usage
from retrysafe.cli.targets import check_target, chosen_target
from retrysafe.core.keys.key import GLOBAL
from retrysafe.core.ports import Store
from retrysafe.idempotency import Idempotency
from retrysafe.relay import AsyncRelay
from retrysafe.runtime.async_calls import AsyncCalls
from retrysafe.runtime.calls import Calls, calls_of
from retrysafe.runtime.drive import run_sync
from retrysafe.runtime.thread_ports import ThreadSignal
from retrysafe.workers.duties import WorkerPolicy
from retrysafe.workers.worker import AsyncDuty, AsyncWorker, Duty, Worker

# How often a worker that runs says what it has done since.
_PROGRESS_SECONDS: Final = 1.0
_SECONDS: Final = {"metavar": "SECONDS"}
# By where they were found.
Objects = dict[str, Idempotency | AsyncIdempotency]


@options.examples(
    "retrysafe worker --import shop.operations",
    "retrysafe worker --app shop.main:app",
    "retrysafe worker --store sqlite:///app.db --import shop.operations:idem --once --json",
    "retrysafe worker --store postgresql://app@db/app --target https://example.com/hooks",
)
def worker(
    context: typer.Context,
    store: options.StoreUrl = None,
    modules: Annotated[
        list[str] | None,
        typer.Option(
            "--import",
            metavar="MODULE[:NAME]",
            help="Where your Idempotency objects and their resumable operations are; repeatable.",
            show_default=False,
        ),
    ] = None,
    app: Annotated[
        str | None,
        typer.Option(
            "--app",
            metavar="MODULE:APP",
            help="Your ASGI or WSGI application: requests of its resumable routes are sent through "
            "it again. An ASGI application is started and stopped by its lifespan.",
            show_default=False,
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            metavar="URL",
            help="Deliver the outbox entries of --store too; see retrysafe relay.",
            show_default=False,
        ),
    ] = None,
    interval: Annotated[
        float,
        typer.Option(
            "--interval", min=0.1, max=86_400, help="Between two looks to resume.", **_SECONDS
        ),
    ] = 5,
    report_interval: Annotated[
        float,
        typer.Option(
            "--report-interval",
            min=1,
            max=86_400,
            help="Between two looks for keys that nobody can resume.",
            **_SECONDS,
        ),
    ] = 300,
    concurrency: Annotated[
        int, typer.Option("--concurrency", min=1, max=1_000, help="Operations at a time.")
    ] = 4,
    back_off: Annotated[
        float,
        typer.Option(
            "--back-off",
            min=0,
            max=86_400,
            help="Before the third attempt, doubled with each one.",
            **_SECONDS,
        ),
    ] = 30,
    once: Annotated[
        bool, typer.Option("--once", help="Do what there is to do now, and stop.")
    ] = False,
    busy_timeout: options.BusyTimeout = options.BUSY_SECONDS,
    as_json: options.AsJson = False,
) -> None:
    """Finish abandoned operations, report those that nobody can finish, and sweep.

    Any number of workers may run at once. Resumable operations and requests are run again under
    their keys, from their last step. Without --import and --app nothing is run. SIGTERM and Ctrl-C
    let what is under way end; a second one ends at once.
    """
    is_json = options.is_json(context, as_json)
    policy = WorkerPolicy(
        interval=timedelta(seconds=interval),
        report_interval=timedelta(seconds=report_interval),
        concurrency=concurrency,
        back_off=timedelta(seconds=back_off),
    )
    if target is not None:
        check_target(target)
    objects = _objects(modules or [])
    application = None if app is None else named_application(app)
    if not (objects or application) or target is not None:
        store = options.required_url(store)
    with _workplace(store, objects, application, policy, busy_timeout) as place:
        if target is not None:
            place.add_relay(target)
        made = Worker(place.duties)
        if once:
            made.run_once()
        else:
            if not is_json:
                output.note("working; stop with Ctrl-C or SIGTERM")
                made.duties["progress"] = _Progress(place)
            with _stopped_by_signals(made):
                made.run()
    _show(place.reports(), is_json=is_json)


def _show(reports: dict[str, Any], *, is_json: bool) -> None:
    if is_json:
        output.write_json(reports)
        return
    for name, counts in reports.items():
        sys.stdout.write(f"{name}: {_counted(counts)}\n")


def _counted(counts: Mapping[str, Any]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in counts.items())


# Whose operations they are.


def _objects(names: list[str]) -> Objects:
    """The objects that the modules hold, by where they were found first."""
    found: Objects = {}
    for name in names:
        module_name, mark, attribute = name.partition(":")
        module = imported(module_name)
        held = {attribute: getattr(module, attribute, None)} if mark else vars(module)
        objects = {
            key: item
            for key, item in held.items()
            if isinstance(item, Idempotency | AsyncIdempotency)
        }
        if not objects:
            raise usage(
                f"{name} is no Idempotency or AsyncIdempotency object"
                if mark
                else f"{module_name} holds no Idempotency or AsyncIdempotency object: name the "
                "module that makes it, or imports it for its operations"
            )
        for key, idempotency in objects.items():
            if not any(idempotency is item for item in found.values()):
                found[f"{module_name}:{key}"] = idempotency
    return found


def _calls(idempotency: Idempotency | AsyncIdempotency) -> Calls | AsyncCalls:
    if isinstance(idempotency, Idempotency):
        return calls_of(idempotency)
    return calls_of(idempotency)


def _location(store: Store) -> tuple[object, object]:
    return getattr(store, "location", None), getattr(store, "schema_name", None)


@dataclass(slots=True)
class _StoreWorkers:
    """Everything that this process works on."""

    # The store that was named; it waits for no event loop of another object.
    named: Store | None = None
    duties: dict[str, Duty] = field(default_factory=dict)

    def add_relay(self, url: str) -> None:
        """Delivers the entries of the store that was named."""
        store = self.named
        assert store is not None  # Without one, the command was refused.

        @asynccontextmanager
        async def opened() -> AsyncIterator[AsyncRelay]:
            target = chosen_target(url)
            try:
                yield AsyncRelay(store, target)
            finally:
                close = getattr(target, "close", None)
                if close is not None:
                    await close()

        self.duties["relay"] = _InLoop(opened)

    def add_application(
        self, application: Application | None, objects: Objects, policy: WorkerPolicy
    ) -> Objects:
        """Adds an application; gives the objects that are left to be worked for.

        An ASGI application is worked for in a loop of its own, where its objects are found once it
        has started, and objects for event loops that were imported beside.
        """
        if application is None:
            return objects
        if not application.is_async:
            known = list(objects.values())
            found = enumerate(routed(Idempotency, application.name), 1)
            return objects | {
                f"{application.name} {number}": item
                for number, item in found
                if not any(item is other for other in known)
            }
        beside = [item for item in objects.values() if isinstance(item, AsyncIdempotency)]
        rest: Objects = {
            name: item for name, item in objects.items() if isinstance(item, Idempotency)
        }
        started = partial(started_worker, application, beside, policy)
        self.duties["app" if rest else ""] = _InLoop(started)
        return rest

    def add_objects(self, objects: Objects, policy: WorkerPolicy, app: Any) -> None:
        """Works for the operations of objects, and for the routes that they have in `app`."""
        for name, idempotency in objects.items():
            prefix = "" if len(objects) == 1 and not self.duties else f"{name} "
            if isinstance(idempotency, AsyncIdempotency):
                made = _InLoop(partial(_opened, idempotency, policy))
                self.duties[prefix.strip()] = made
            else:
                duties = idempotency.worker(policy, app=app).duties
                self.duties |= {f"{prefix}{key}": duty for key, duty in duties.items()}

    def reports(self) -> dict[str, Any]:
        """What was done so far, by duty."""
        counts: dict[str, Any] = {}
        for name, duty in self.duties.items():
            report = duty.report
            if isinstance(report, dict):
                counts |= {f"{name} {part}".strip(): asdict(item) for part, item in report.items()}
            elif report is not None:
                counts[name] = asdict(report)
        for item in counts.values():
            item.pop("has_more", None)
        return counts


@contextmanager
def _workplace(
    url: str | None,
    objects: Objects,
    application: Application | None,
    policy: WorkerPolicy,
    busy_seconds: float,
) -> Iterator[_StoreWorkers]:
    """The duties of all objects, and of the store that was named; closes them in the end."""
    place = _StoreWorkers()
    objects = place.add_application(application, objects, policy)
    for name, idempotency in objects.items():
        if not _calls(idempotency).operations.resumables.by_name:
            output.note(f"{name} declares no resumable operation: its keys are only reported")
    if url:
        named = place.named = options.chosen_store(url, busy_seconds, create=False)
        known = [_location(_calls(each).store) for each in objects.values()]
        # The stores of an application are known when it has started; --store is for --target then.
        if _location(named) not in known and application is None:
            if objects:
                output.note(f"{url} is another store than that of the modules: both are tended")
            # Nothing is run there: only their own module knows the operations of its keys.
            objects = {**objects, url: Idempotency(named, caller=GLOBAL)}
    is_blocking = application is not None and not application.is_async
    place.add_objects(objects, policy, application.app if application and is_blocking else None)
    try:
        yield place
    finally:
        for idempotency in objects.values():
            if isinstance(idempotency, Idempotency):
                idempotency.close()
        if place.named is not None:
            run_sync(place.named.close())


@asynccontextmanager
async def _opened(
    idempotency: AsyncIdempotency, policy: WorkerPolicy
) -> AsyncIterator[AsyncWorker]:
    try:
        yield idempotency.worker(policy)
    finally:
        await idempotency.close()


class _InLoop:
    """A worker or a relay for event loops, in a loop of its own."""

    def __init__(
        self, make: Callable[[], AbstractAsyncContextManager[AsyncWorker | AsyncDuty]]
    ) -> None:
        self._make = make
        self._made: AsyncWorker | AsyncDuty | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_stopped = False

    @property
    def report(self) -> Any:
        """What it has done so far."""
        made = self._made
        return made.reports if isinstance(made, AsyncWorker) else made and made.report

    def run(self) -> None:
        """Works until `stop`."""
        asyncio.run(self._worked(is_draining=False))

    def drain(self) -> None:
        """Does what there is to do now."""
        asyncio.run(self._worked(is_draining=True))

    async def _worked(self, *, is_draining: bool) -> None:
        # Made inside the loop that it belongs to.
        self._loop = asyncio.get_running_loop()
        async with self._make() as made:
            self._made = made
            if is_draining:
                await (made.run_once() if isinstance(made, AsyncWorker) else made.drain())
            elif not self._is_stopped:
                await made.run()

    def stop(self) -> None:
        """Ends `run`; comes from a signal's function or another thread."""
        self._is_stopped = True
        if self._loop is not None and self._made is not None:
            with suppress(RuntimeError):  # The loop has ended, and its work with it.
                self._loop.call_soon_threadsafe(self._made.stop)


class _Progress:
    """Says what was done since it said so last."""

    report = None

    def __init__(self, place: _StoreWorkers) -> None:
        self._place = place
        self._told = place.reports()
        self._stopping = ThreadSignal()

    def run(self) -> None:
        """Looks every second until `stop`."""
        told = self._told
        while not run_sync(self._stopping.wait(_PROGRESS_SECONDS)):
            counts = self._place.reports()
            for name, now in counts.items():
                if now != told.get(name):
                    output.note(f"{name}: {_counted(now)}")
            told = counts

    def drain(self) -> None:
        """The result says it all."""

    def stop(self) -> None:
        """Ends `run`."""
        self._stopping.set()


@contextmanager
def _stopped_by_signals(made: Worker) -> Iterator[None]:
    """Lets what is under way end; a service that is stopped has not failed."""
    is_told = False

    def stop(*_: object) -> None:
        nonlocal is_told
        if is_told:
            # An operation that hangs keeps its thread; the leases free its keys.
            os._exit(ExitCode.INTERRUPTED)
        is_told = True
        made.stop()

    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, stop) for number in numbers]
    try:
        yield
    finally:
        for number, action in zip(numbers, before, strict=True):
            signal.signal(number, action)
