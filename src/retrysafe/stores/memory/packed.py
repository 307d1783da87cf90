"""How the memory store holds what has ended: as plain tuples, which cost nothing while they wait.

There are many finished operations, and the garbage collector walks over objects of our own again
and again; a tuple of plain values it leaves alone.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from operator import attrgetter
from typing import Any, Final

from retrysafe.core.model import Payload, Record, Settlement, State, StoredOutcome

# Token, attempt, state, the three parts of the payload, and the two instants of a `StoredOutcome`.
PackedOutcome = tuple[Any, ...]


def ending_of(
    settlement: Settlement, payload: Payload, record: Record, now_ms: int
) -> PackedOutcome:
    """What is kept of a settlement for the audit of its key."""
    return (
        settlement.token,
        record.attempt,
        int(record.state),
        payload.form,
        payload.head,
        payload.body,
        now_ms,
        now_ms + settlement.audit_ms,
    )


def payload_of(ending: PackedOutcome) -> Payload:
    """What is replayed of it."""
    return Payload(*ending[3:6])


def stored_outcome(ending: PackedOutcome) -> StoredOutcome:
    """It as operators are shown it."""
    token, attempt, state, form, head, body, settled_at_ms, audit_ends_at_ms = ending
    payload = Payload(form, head, body)
    return StoredOutcome(token, attempt, State(state), payload, settled_at_ms, audit_ends_at_ms)


class Records(MutableMapping[bytes, Record]):
    """Records by digest; those that have ended as plain tuples."""

    __slots__ = ("_ended", "_pending")

    def __init__(self) -> None:
        self._pending: dict[bytes, Record] = {}
        self._ended: dict[bytes, tuple[Any, ...]] = {}

    def __getitem__(self, digest: bytes) -> Record:
        found = self._pending.get(digest)
        return _unpacked(self._ended[digest]) if found is None else found

    def find(self, digest: bytes) -> Record | None:
        """The record, if there is one; quicker than `get`."""
        found = self._pending.get(digest)
        if found is None and digest in self._ended:
            return _unpacked(self._ended[digest])
        return found

    def __setitem__(self, digest: bytes, record: Record) -> None:
        if record.state is State.PENDING:
            self._pending[digest] = record
            self._ended.pop(digest, None)
        else:
            self._ended[digest] = _packed(record)
            self._pending.pop(digest, None)

    def __delitem__(self, digest: bytes) -> None:
        if self._pending.pop(digest, None) is None:
            del self._ended[digest]

    def __iter__(self) -> Iterator[bytes]:
        yield from self._pending
        yield from self._ended

    def __len__(self) -> int:
        return len(self._pending) + len(self._ended)


_parts_of = attrgetter(*Record.__slots__)
_STATE_PLACE: Final = Record.__slots__.index("state")


def _packed(record: Record) -> tuple[Any, ...]:
    parts: list[Any] = list(_parts_of(record))
    parts[_STATE_PLACE] = int(record.state)
    return tuple(parts)


def _unpacked(parts: tuple[Any, ...]) -> Record:
    record = Record(*parts)
    record.state = State(record.state)
    return record
