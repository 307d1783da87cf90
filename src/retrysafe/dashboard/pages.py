"""The pages: each is a method that reads the store and names its template."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import urlencode

from retrysafe import figures
from retrysafe.core.keys.canonical import DIGEST_BYTES
from retrysafe.core.keys.key import GLOBAL, Key
from retrysafe.core.listing import Position, RecordQuery
from retrysafe.core.model import Condition, OperatorCommand, StoredKey, StoredOutcome
from retrysafe.core.outbox.entries import EntryCondition, EntryQuery
from retrysafe.core.outbox.port import outbox_of
from retrysafe.core.ports import Store
from retrysafe.dashboard import views
from retrysafe.dashboard.samples import Samples
from retrysafe.dashboard.web import BadRequest, Request
from retrysafe.errors import InvalidInput
from retrysafe.runtime.drive import run_sync
from retrysafe.stores.audit import Audited

PAGE_SIZE: Final = 50
# How many the overview shows of each kind, and how many it looks at to group failures.
GLANCE: Final = 10
GROUPED: Final = 500
# How long a page searches where no index leads; what it did not reach is not shown.
SEARCH_SECONDS: Final = 0.4
FIGURES_SECONDS: Final = 15.0

Page = Callable[[Request], tuple[str, dict[str, Any]]]

FILTERS: Final = ("key", "caller", "operation", "condition", "minutes")
# What can be done to all that match. Running operations are left to those who look at each.
BULK: Final = (OperatorCommand.RELEASE, OperatorCommand.EXPIRE)
LISTED: Final = tuple(item.value for item in Condition if item is not Condition.ABSENT)


class Pages:
    """What can be looked at."""

    def __init__(self, store: Store, shown: views.Shown, samples: Samples) -> None:
        self._store = store
        self._samples = samples
        self._asking = threading.Lock()
        self._last_figures: list[tuple[str, str]] = []
        self._figures_until = 0.0
        self._shown = shown
        self._pages: dict[str, Page] = {
            "/": self.overview,
            "/keys": self.keys,
            "/key": self.key,
            "/outbox": self.outbox,
        }

    def find(self, path: str) -> Page | None:
        """The page at a path below the mount."""
        return self._pages.get(path)

    def overview(self, request: Request) -> tuple[str, dict[str, Any]]:
        """What needs somebody first: stuck, then failed, then running."""
        abandoned = self._some(Condition.ABANDONED, GLANCE + 1)
        running = self._some(Condition.RUNNING, GLANCE + 1)
        failed = self._some(Condition.FAILED, GROUPED)
        groups = Counter(item.record.operation for item in failed)
        return "overview.html", {
            "abandoned": _glance(abandoned),
            "running": _glance(running),
            "failed": _glance(failed),
            "failures": [
                {"operation": name or "(unnamed)", "count": count}
                for name, count in groups.most_common(GLANCE)
            ],
            "is_failed_part": len(failed) == GROUPED,
            "outbox": self._outbox_glance(),
            "plot": self._samples.plot(),
            "figures": self._figures(),
        }

    def _figures(self) -> list[tuple[str, str]]:
        """How the whole store is doing; asked at most every 15 seconds, whoever looks."""
        with self._asking:
            if time.monotonic() >= self._figures_until:
                document = figures.stats_of(self._store)
                self._last_figures = [] if document is None else figures.stats_lines(document)
                self._figures_until = time.monotonic() + FIGURES_SECONDS
            return self._last_figures

    def _some(self, condition: Condition, limit: int) -> list[StoredKey]:
        query = RecordQuery(conditions=frozenset({condition}), limit=limit, seconds=SEARCH_SECONDS)
        return run_sync(self._store.list_records(query)).keys

    def _outbox_glance(self) -> dict[str, Any] | None:
        if not self._store.capabilities.has_outbox:
            return None
        outbox = outbox_of(self._store)
        counts = {}
        for condition in (EntryCondition.WAITING, EntryCondition.DEAD):
            query = EntryQuery(conditions=frozenset({condition}), limit=GROUPED)
            found = run_sync(outbox.list_entries(query))
            counts[condition.value] = len(found)
        return counts | {"limit": GROUPED}

    def keys(self, request: Request) -> tuple[str, dict[str, Any]]:
        """Search: by key, caller, operation, condition and age together."""
        values = request.values()
        query = query_of(values)
        query.after = _position(values.get("after", ""))
        found = run_sync(self._store.list_records(query))
        asked = {name: values.get(name, "") for name in FILTERS}
        where = urlencode({name: text for name, text in asked.items() if text})
        return "keys.html", {
            "rows": [views.key_row(item) for item in found.keys],
            "next": "" if found.after is None else f"/keys?{where}&after={found.after}",
            "unsearched": found.unsearched,
            "asked": asked,
            "conditions": LISTED,
            "bulk": [item.value for item in BULK] if any(asked.values()) else [],
        }

    def key(self, request: Request) -> tuple[str, dict[str, Any]]:
        """One key: what happened, what is stored, what can be done."""
        key = key_of(request.values())
        stored = run_sync(self._store.read(key, with_audit=True))
        outcomes: list[StoredOutcome] = [] if stored is None else stored.outcomes
        if stored is None and isinstance(self._store, Audited):
            outcomes, _ = run_sync(self._store.read_audit(key, SEARCH_SECONDS))
        if stored is None and not outcomes:
            return "missing.html", {"key": str(key)}
        actions = (
            run_sync(self._store.read_actions(key)) if isinstance(self._store, Audited) else []
        )
        return "key.html", {
            "key": key.text,
            "caller": key.caller,
            "row": None if stored is None else views.key_row(stored),
            "commands": [] if stored is None else views.commands_for(stored),
            "owner": "" if stored is None else stored.record.owner,
            "digest": key.digest.hex(),
            "replays": self._samples.replays_of(key),
            "timeline": views.timeline(stored, outcomes, actions),
            "steps": []
            if stored is None
            else [
                {"name": step.name, "position": step.position} | self._shown.body(step.payload)
                for step in stored.steps
            ],
            "outcomes": [
                {"attempt": item.attempt, "ending": item.state.name.lower()}
                | self._shown.body(item.payload)
                for item in reversed(outcomes)
            ],
        }

    def outbox(self, request: Request) -> tuple[str, dict[str, Any]]:
        """What waits to be delivered, and what has died."""
        if not self._store.capabilities.has_outbox:
            return "outbox.html", {"has_outbox": False}
        name = request.values().get("condition", EntryCondition.DEAD.value)
        try:
            condition = EntryCondition(name)
        except ValueError:
            raise BadRequest(f"there is no condition {name!r} of an entry") from None
        query = EntryQuery(conditions=frozenset({condition}), limit=GROUPED)
        found = run_sync(outbox_of(self._store).list_entries(query))
        errors = Counter((item.entry.last_error or "").partition("\n")[0][:120] for item in found)
        return "outbox.html", {
            "has_outbox": True,
            "condition": condition.value,
            "conditions": [item.value for item in EntryCondition],
            "rows": [views.entry_row(item) for item in found[:PAGE_SIZE]],
            "count": len(found),
            "is_part": len(found) == GROUPED,
            "page_size": PAGE_SIZE,
            "errors": [{"error": text, "count": n} for text, n in errors.most_common(GLANCE)],
        }


def key_of(values: dict[str, str]) -> Key:
    """The key that a page or a form names; raises `BadRequest`."""
    try:
        return Key(values.get("key", ""), caller=values.get("caller") or GLOBAL)
    except InvalidInput as error:
        raise BadRequest(str(error)) from None


def query_of(values: dict[str, str]) -> RecordQuery:
    """What the filters of a page or a form ask for; raises `BadRequest`."""
    names = [name for name in values.get("condition", "").split(",") if name]
    for name in names:
        if name not in LISTED:
            raise BadRequest(f"there is no condition {name!r}: there are {', '.join(LISTED)}")
    minutes = values.get("minutes", "")
    if minutes and not (minutes.isascii() and minutes.isdigit() and len(minutes) < 9):
        raise BadRequest("the age is a number of minutes")
    return RecordQuery(
        caller=values.get("caller") or None,
        text_prefix=values.get("key", ""),
        conditions=frozenset(Condition(name) for name in names),
        limit=PAGE_SIZE,
        operation=values.get("operation") or None,
        older_than_ms=int(minutes) * 60_000 if minutes else None,
        seconds=SEARCH_SECONDS,
    )


def _position(text: str) -> Position | None:
    found = Position.of(text)
    if text and (found is None or len(found.digest) != DIGEST_BYTES):
        raise BadRequest("this place in the list is none that a page of ours has named")
    return found


def _glance(found: list[StoredKey]) -> dict[str, Any]:
    return {
        "rows": [views.key_row(item) for item in found[:GLANCE]],
        "count": len(found),
        "has_more": len(found) > GLANCE,
    }
