"""Keys on a screen: lists of records, and one record with its steps and its outcomes.

Owns what is shown and in which colour. It reads nothing from a store.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Final

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from retrysafe import inspection
from retrysafe.cli import output
from retrysafe.core.keys.key import Key
from retrysafe.core.model import Condition, Payload, Record, StoredKey, StoredOutcome

# What fits a screen of scrolling; the whole body is in --json.
BODY_LIMIT_CHARACTERS: Final = 10_000

_STYLES: Final = {
    Condition.RUNNING: "cyan",
    Condition.ABANDONED: "yellow",
    Condition.SUCCEEDED: "green",
    Condition.FAILED: "red",
    Condition.RELEASED: "magenta",
    Condition.OUTLIVED: "dim",
}


def table(found: list[StoredKey], caller_text: Callable[[Record], str]) -> Table:
    """A list of keys, one on each line."""
    rows = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("caller", "key", "operation", "condition"):
        rows.add_column(title, no_wrap=True)
    rows.add_column("attempt", justify="right", no_wrap=True)
    rows.add_column("age", justify="right", no_wrap=True)
    rows.add_column("time left", no_wrap=True)
    for stored in found:
        record = stored.record
        rows.add_row(
            output.cell(caller_text(record), "" if record.caller else "italic"),
            output.cell(record.text),
            output.cell(inspection.operation_text(record)),
            output.cell(
                stored.condition.value,
                _STYLES[stored.condition],
            ),
            str(record.attempt),
            inspection.duration_text(stored.now_ms - record.first_claimed_at_ms),
            inspection.time_left_text(stored),
        )
    return rows


def block(stored: StoredKey, caller_text: Callable[[Record], str]) -> Group:
    """The same for a narrow screen; the key stands alone, so that it can be copied."""
    record = stored.record
    return output.block(
        output.cell(record.text, "bold"),
        (
            output.cell(stored.condition.value, _STYLES[stored.condition]),
            output.cell(inspection.operation_text(record)),
            output.cell(caller_text(record), "" if record.caller else "italic"),
            f"attempt {record.attempt}",
            f"{inspection.duration_text(stored.now_ms - record.first_claimed_at_ms)} old",
            inspection.time_left_text(stored),
        ),
    )


def _grid() -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    return grid


def past(key: Key, document: dict[str, Any]) -> list[Any]:
    """A key whose record is gone."""
    grid = _grid()
    grid.add_row("key", output.cell(key.text))
    grid.add_row("caller", output.cell(key.caller or "GLOBAL"))
    grid.add_row("condition", "removed by a sweep: the next use is the first of a new life")
    grid.add_row("digest", document["digest"])
    return [grid]


def detail(stored: StoredKey, document: dict[str, Any]) -> list[Any]:
    """A key with its arguments and its finished steps."""
    record = document["record"]
    grid = _grid()
    grid.add_row("key", output.cell(record["key"]))
    grid.add_row("caller", output.cell(inspection.caller_text(stored.record)))
    grid.add_row("operation", output.cell(inspection.operation_text(stored.record)))
    grid.add_row("condition", output.cell(record["condition"], _STYLES[stored.condition]))
    grid.add_row("time left", inspection.time_left_text(stored))
    tries_at_ms = inspection.worker_tries_at_ms(stored)
    if tries_at_ms is not None:
        grid.add_row("next try", inspection.next_try_text(stored, tries_at_ms))
    grid.add_row("attempt", str(record["attempt"]))
    if record["releases"]:
        grid.add_row("releases", f"{record['releases']} of the attempts before this one")
    if record["nothing_happened"]:
        grid.add_row("nothing happened", "a natural key takes a corrected request")
    grid.add_row("owner", output.cell(record["owner"] or "-"))
    for name in (
        "first_claimed_at",
        "corrected_at",
        "claimed_at",
        "settled_at",
        "lease_ends_at",
        "expires_at",
    ):
        if record[name] is not None:
            grid.add_row(name.replace("_", " "), record[name])
    keyed = "keyed" if record["fingerprint_is_keyed"] else "not keyed"
    grid.add_row(
        "fingerprint", f"{record['fingerprint']} (rule {record['fingerprint_rule']}, {keyed})"
    )
    grid.add_row("digest", document["digest"])
    parts: list[Any] = [grid]
    if stored.arguments is not None:
        parts += [Text("\narguments", style="bold"), _body(stored.arguments)]
    for step in stored.steps:
        title = f"\nstep {step.position}: {output.safe(step.name)}"
        parts += [Text(title, style="bold"), _body(step.payload)]
    return parts


def actions(document: dict[str, Any]) -> list[Any]:
    """What operators did, oldest first."""
    parts: list[Any] = []
    for action in document["actions"]:
        title = f"{action['command']} at {action['acted_at']} by {action['operator'] or '-'}"
        told = f"it was {action['condition_before']}; {action['reason'] or 'no reason was given'}"
        parts += [
            Text("\n" + output.safe(title), style="bold"),
            Padding(output.cell(told), (0, 0, 0, 2), expand=False),
        ]
    return parts


def endings(document: dict[str, Any], outcomes: Sequence[StoredOutcome]) -> list[Any]:
    """The audit, oldest first."""
    parts: list[Any] = []
    for outcome, kept in zip(document["outcomes"], outcomes, strict=True):
        mark = ""
        if outcome["is_withheld"]:
            mark = ", withheld"
            if outcome["is_replayed"]:
                mark += ": retries get OutcomeUnavailable"
        elif outcome["is_replayed"]:
            mark = ", replayed to retries"
        title = (
            f"\noutcome of attempt {outcome['attempt']}: {outcome['ending']} at "
            f"{outcome['settled_at']}, kept until {outcome['audit_ends_at']}{mark}"
        )
        parts += [Text(title, style="bold"), _body(kept.payload)]
    if not document["outcomes"]:
        parts.append(Text("\nno outcome is stored", style="dim"))
    return parts


def _body(payload: Payload) -> Padding:
    name, body = inspection.readable_body(payload)
    text = body if name != "body" else json.dumps(body, indent=2, ensure_ascii=False)
    if len(text) > BODY_LIMIT_CHARACTERS:
        left = len(text) - BODY_LIMIT_CHARACTERS
        text = f"{text[:BODY_LIMIT_CHARACTERS]}\n… {left:,} more characters; --json shows all"
    what = [payload.form, f"{payload.size_bytes:,} bytes"]
    response = inspection.response_json(payload)
    if response is not None:
        lines = [inspection.status_text(response["status"])]
        lines += [f"{name}: {value}" for name, value in response["headers"]]
        text = "\n".join(lines) + (f"\n\n{text}" if payload.body else "")
    elif payload.head:
        what.append(payload.head.decode(errors="backslashreplace"))
    if name == "body_base64":
        what.append("in base 64")
    shown = Text(output.safe(", ".join(what)) + "\n", style="dim")
    shown.append(output.safe_lines(text), style="not dim")
    return Padding(shown, (0, 0, 0, 2), expand=False)
