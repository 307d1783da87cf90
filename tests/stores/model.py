"""The pure model of a store: the core's transitions over dictionaries, and nothing else.

Owns what every store must agree with. It has no lock, no I/O and no clock of its own.
"""

from dataclasses import dataclass, field

from retrysafe.core import transitions
from retrysafe.core.machine import Trigger, condition_of, decide
from retrysafe.core.model import (
    Condition,
    Decision,
    Payload,
    Record,
    State,
    Step,
    StoredOutcome,
)
from retrysafe.errors import DigestCollision


@dataclass
class Shelf:
    """Everything known of one digest; the audit outlives the record."""

    record: Record | None = None
    steps: dict[str, Step] = field(default_factory=dict)
    outcomes: list[StoredOutcome] = field(default_factory=list)
    arguments: Payload | None = None


class Model:
    """What a store amounts to, one row at a time."""

    def __init__(self, now_ms):
        self._now_ms = now_ms
        self.shelves: dict[bytes, Shelf] = {}

    def shelf(self, key):
        return self.shelves.setdefault(key.digest, Shelf())

    def claim(self, request):
        """The answer, or the error that takes its place."""
        shelf = self.shelf(request.key)
        before = shelf.record
        try:
            changed, answer = transitions.claim(before, request, self._now_ms())
        except DigestCollision as error:
            return error
        if changed is not None:
            shelf.record = changed
            is_corrected = before is not None and changed.fingerprint != before.fingerprint
            if answer.decision is Decision.ADMIT or is_corrected:
                shelf.steps = {}
                shelf.arguments = None
        if changed is not None and shelf.arguments is None:
            shelf.arguments = request.arguments
        if answer.decision is Decision.REPLAY:
            standing = self.standing(request.key)
            answer.payload = standing[0].payload if standing else None
        return answer

    def standing(self, key):
        """The outcome that a replay gives, if there is one."""
        shelf = self.shelf(key)
        if shelf.record.state not in (State.SUCCEEDED, State.FAILED):
            return []
        return [item for item in shelf.outcomes if item.token == shelf.record.token][-1:]

    def present(self, key):
        """What the present life of the key has left behind, as far as it is stored."""
        shelf = self.shelf(key)
        born = shelf.record.first_claimed_at_ms
        return [item for item in shelf.outcomes if item.settled_at_ms >= born]

    def take_over(self, request, held):
        shelf = self.shelf(request.key)
        changed, answer = transitions.take_over(shelf.record, request, held, self._now_ms())
        if changed is not None:
            shelf.record = changed
        return answer

    def settle(self, settlement):
        shelf = self.shelf(settlement.key)
        now_ms = self._now_ms()
        changed, answer = transitions.settle(shelf.record, settlement, now_ms)
        if changed is not None:
            shelf.record = changed
            # A step that is stored has happened, whatever the ending says.
            changed.nothing_happened = changed.nothing_happened and not shelf.steps
            if settlement.payload is not None:
                ending = StoredOutcome(
                    settlement.token,
                    changed.attempt,
                    changed.state,
                    settlement.payload,
                    now_ms,
                    now_ms + settlement.audit_ms,
                )
                shelf.outcomes.append(ending)
        return answer

    def extend(self, extension):
        shelf = self.shelf(extension.key)
        changed, answer = transitions.extend(shelf.record, extension, self._now_ms())
        if changed is not None:
            shelf.record = changed
        return answer

    def record_step(self, write):
        shelf = self.shelf(write.key)
        stored = shelf.steps.get(write.step.name)
        payload = None if stored is None else stored.payload
        decision = transitions.record_step(shelf.record, write, payload, self._now_ms())
        if decision is Decision.APPLY:
            shelf.steps.setdefault(write.step.name, write.step)
        return decision

    def operate(self, key, command):
        record = self.record_of(key)
        changed, decision = transitions.operate(record, command, self._now_ms())
        if changed is not None:
            self.shelf(key).record = changed
        return decision

    def record_of(self, key):
        """The record of exactly this key, not of one with the same digest."""
        record = self.shelf(key).record
        is_its = record is not None and (record.text, record.caller) == (key.text, key.caller)
        return record if is_its else None

    def condition(self, key):
        record = self.record_of(key)
        return Condition.ABSENT if record is None else condition_of(record, self._now_ms())

    def outlived(self):
        """The digests that a sweep may remove."""
        return {
            digest
            for digest, shelf in self.shelves.items()
            if decide(Trigger.SWEEP, condition_of(shelf.record, self._now_ms())) is Decision.DELETE
        }

    def abandoned(self):
        """The shelves of records that nobody holds any more."""
        return [
            shelf
            for shelf in self.shelves.values()
            if condition_of(shelf.record, self._now_ms()) is Condition.ABANDONED
        ]

    def needless(self):
        """The shelves whose arguments a sweep may remove."""
        return [
            shelf
            for shelf in self.shelves.values()
            if shelf.arguments is not None and shelf.record.state in (State.SUCCEEDED, State.FAILED)
        ]

    def past_audit(self):
        """The outcomes that a sweep may remove."""
        return [
            (digest, outcome)
            for digest, shelf in self.shelves.items()
            for outcome in shelf.outcomes
            if self._now_ms() >= outcome.audit_ends_at_ms
        ]
