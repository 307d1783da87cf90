"""Records as templates show them: plain values in words, and bodies as far as they may be seen."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlencode

from retrysafe import inspection
from retrysafe.core.machine import decide, operator_trigger
from retrysafe.core.model import (
    Condition,
    Decision,
    OperatorAction,
    OperatorCommand,
    Payload,
    Record,
    StoredKey,
    StoredOutcome,
)
from retrysafe.core.outbox.entries import EntryCommand, EntryCondition, StoredEntry

# As much of a body as a person reads; `retrysafe keys show` has the rest.
BODY_LIMIT_CHARACTERS: Final = 20_000
REDACTED: Final = "[redacted]"
_DEPTH_LIMIT: Final = 60


@dataclass(frozen=True, slots=True)
class Shown:
    """What may be seen of stored bodies."""

    has_bodies: bool = False
    # Names of JSON fields in lower case whose values are never shown.
    redacted: frozenset[str] = frozenset()

    def body(self, payload: Payload) -> dict[str, Any]:
        """A payload for people: what it is, and its body where that is allowed."""
        response = inspection.response_json(payload)
        shown: dict[str, Any] = {
            "form": payload.form,
            "size": payload.size_bytes,
            "status": "" if response is None else inspection.status_text(response["status"]),
            "text": None,
            "note": "",
        }
        if not self.has_bodies:
            shown["note"] = "Bodies are hidden here. Show them with show_bodies=True."
            return shown
        name, body = inspection.readable_body(payload)
        if name == "body_base64":
            shown["note"] = "Binary."
        elif name == "body_text":
            if self.redacted:
                # There is no telling what stands where in it.
                shown["note"] = "Text that is no JSON is hidden, because fields are redacted."
            else:
                shown["text"] = _cut(body)
        else:
            text = json.dumps(self._without_secrets(body, 0), indent=2, ensure_ascii=False)
            shown["text"] = _cut(text)
        return shown

    def _without_secrets(self, value: Any, depth: int) -> Any:
        if depth > _DEPTH_LIMIT:
            return "…"
        if isinstance(value, dict):
            return {
                name: REDACTED
                if name.lower() in self.redacted
                else self._without_secrets(item, depth + 1)
                for name, item in value.items()
            }
        if isinstance(value, list):
            return [self._without_secrets(item, depth + 1) for item in value]
        return value


def _cut(text: str) -> str:
    if len(text) <= BODY_LIMIT_CHARACTERS:
        return text
    return f"{text[:BODY_LIMIT_CHARACTERS]}\n… {len(text) - BODY_LIMIT_CHARACTERS} characters more"


def key_row(stored: StoredKey) -> dict[str, Any]:
    """One line of a list."""
    record = stored.record
    is_pending = stored.condition in (Condition.RUNNING, Condition.ABANDONED)
    until_ms = record.lease_ends_at_ms if is_pending else record.expires_at_ms
    return {
        "key": record.text,
        "caller": inspection.caller_text(record),
        "caller_short": inspection.short_caller_text(record),
        "operation": inspection.operation_text(record),
        "condition": stored.condition.value,
        "attempt": record.attempt,
        "age_ms": max(0, stored.now_ms - record.first_claimed_at_ms),
        "claimed_at_ms": record.claimed_at_ms,
        "until_ms": until_ms,
        "time_left": inspection.time_left_text(stored),
        "link": key_link(record),
    }


def key_link(record: Record) -> str:
    """Where the key's page is, below the mount."""
    return "/key?" + urlencode({"key": record.text, "caller": record.caller})


def commands_for(stored: StoredKey) -> list[str]:
    """What an operator may do to the key as it is now."""
    return [
        command.value
        for command in OperatorCommand
        if decide(operator_trigger(command), stored.condition) is Decision.APPLY
    ]


def timeline(
    stored: StoredKey | None, outcomes: list[StoredOutcome], actions: list[OperatorAction]
) -> list[dict[str, Any]]:
    """What is known to have happened to a key, oldest first."""
    found: list[tuple[int, str, str]] = []
    if stored is not None:
        record = stored.record
        found.append((record.first_claimed_at_ms, "First claim", ""))
        if record.attempt > 1:
            crashed = record.attempt - 1 - record.releases
            found.append(
                (
                    record.claimed_at_ms,
                    f"Attempt {record.attempt}",
                    f"{record.releases} before it ended with a word, {crashed} crashed",
                )
            )
        if record.corrected_at_ms is not None:
            found.append((record.corrected_at_ms, "Corrected request", ""))
        if stored.condition is Condition.ABANDONED:
            found.append((record.lease_ends_at_ms, "Lease ended", "its owner is gone"))
    found += [
        (item.settled_at_ms, f"Attempt {item.attempt} {item.state.name.lower()}", "")
        for item in outcomes
    ]
    found += [
        (item.acted_at_ms, f"{item.command} by {item.operator or 'somebody'}", item.reason)
        for item in actions
    ]
    found.sort()
    return [
        {"at": inspection.instant_text(at_ms), "what": what, "detail": detail}
        for at_ms, what, detail in found
    ]


def entry_row(stored: StoredEntry) -> dict[str, Any]:
    """One line of the outbox."""
    entry = stored.entry
    may = {
        EntryCondition.WAITING: [EntryCommand.RETRY.value, EntryCommand.DISCARD.value],
        EntryCondition.DEAD: [EntryCommand.RETRY.value, EntryCommand.DISCARD.value],
    }.get(stored.condition, [])
    return {
        "id": entry.id,
        "key": entry.key,
        "topic": entry.topic,
        "aggregate": entry.aggregate or "",
        "condition": stored.condition.value,
        "attempts": entry.attempts,
        "age_ms": max(0, stored.now_ms - entry.staged_at_ms),
        "error": entry.last_error or "",
        "size": len(entry.body),
        "commands": may,
        "origin_link": ""
        if entry.origin is None
        else "/key?" + urlencode({"key": entry.origin, "caller": entry.caller or ""}),
    }
