"""`retrysafe export`: the audit of a time window as JSON lines, for auditors and other systems."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final

import typer

from retrysafe import inspection
from retrysafe.cli import options, output
from retrysafe.cli.problems import usage
from retrysafe.cli.progress import shown_progress
from retrysafe.runtime.drive import run_sync
from retrysafe.stores.audit import AuditEntry, Exportable

_ACTIONS_PER_PAGE: Final = 500
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(slots=True)
class _Counts:
    outcomes: int = 0
    actions: int = 0
    percent: int = 0


@options.examples(
    "retrysafe export --from 2026-11-01 --to 2026-12-01 --store sqlite:///app.db > november.jsonl",
    "retrysafe export --from 2026-11-18T10:00:00Z --operation charge | gzip > audit.jsonl.gz",
)
def export(
    context: typer.Context,
    store: options.StoreUrl = None,
    first: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="INSTANT",
            help="Settled at this instant or later; a date or ISO 8601, UTC unless it says so.",
            show_default=False,
        ),
    ] = None,
    past: Annotated[
        str | None,
        typer.Option(
            "--to", metavar="INSTANT", help="Settled before this instant.", show_default=False
        ),
    ] = None,
    caller: Annotated[
        str | None,
        typer.Option("--caller", metavar="CALLER", help="Only of this caller.", show_default=False),
    ] = None,
    operation: Annotated[
        str | None,
        typer.Option(
            "--operation", metavar="NAME", help="Only of this operation.", show_default=False
        ),
    ] = None,
    without_bodies: Annotated[
        bool, typer.Option("--without-bodies", help="Leave out what was answered.")
    ] = False,
    busy_timeout: options.BusyTimeout = options.BUSY_SECONDS,
    as_json: options.AsJson = False,
) -> None:
    """Write the audit of a time window to stdout, one JSON object a line.

    Outcomes come in the order in which the store keeps them, then what operators did, by `kind`.
    Reads everything that is kept, in short statements. Of a key that a sweep has removed, caller,
    key and operation are null: the digest tells which it was. The last line counts the others.
    """
    first_ms = 0 if first is None else _instant_ms("--from", first)
    past_ms = 2**62 if past is None else _instant_ms("--to", past)
    if first_ms >= past_ms:
        raise usage("--from must be before --to")
    counts = _Counts()
    words = {"outcomes": "outcomes", "actions": "actions", "percent": "%"}
    is_quiet = options.is_json(context, as_json)
    with (
        options.opened_store(store, busy_timeout) as opened,
        shown_progress("exporting", words, is_quiet=is_quiet) as show,
    ):
        assert isinstance(opened, Exportable)  # As all are that outlive their process.
        position: tuple[int, int] | None = (0, 0)
        while position is not None:
            part = run_sync(opened.audit_part(first_ms, past_ms, position))
            for entry in part.entries:
                if caller is not None and entry.caller != caller:
                    continue
                if operation is not None and entry.operation != operation:
                    continue
                _write(_outcome(entry, with_body=not without_bodies))
                counts.outcomes += 1
            counts.percent = int(100 * part.share)
            show(counts)
            position = part.next
        # An action does not know the operation.
        number = None if operation is not None else 0
        while number is not None:
            page = run_sync(opened.actions_between(first_ms, past_ms, number, _ACTIONS_PER_PAGE))
            for _, key, action in page:
                if caller is None or key.caller == caller:
                    _write(
                        {"kind": "action", "digest": key.digest.hex(), "key": key.text}
                        | {"caller": key.caller or None}
                        | inspection.action_json(action)
                    )
                    counts.actions += 1
            number = page[-1][0] if len(page) == _ACTIONS_PER_PAGE else None
            show(counts)
    _write({"kind": "end", "outcomes": counts.outcomes, "actions": counts.actions})
    sys.stdout.flush()
    if not is_quiet:
        output.note(f"{counts.outcomes:,} outcomes and {counts.actions:,} actions")


def _outcome(entry: AuditEntry, *, with_body: bool) -> dict[str, Any]:
    document = {
        "kind": "outcome",
        "digest": entry.digest.hex(),
        "caller": entry.caller or None,
        "key": entry.text,
        "operation": entry.operation,
    } | inspection.outcome_json(entry.outcome)
    if not with_body:
        for name in ("body", "body_text", "body_base64"):
            document.pop(name, None)
    return document


def _write(document: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(document, separators=(",", ":")) + "\n")


def _instant_ms(option: str, text: str) -> int:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise usage(
            f"{option} takes a date or an instant, such as 2026-11-18 or 2026-11-18T10:00:00Z"
        ) from None
    if found.tzinfo is None:
        found = found.replace(tzinfo=UTC)
    return (found - _EPOCH) // timedelta(milliseconds=1)
