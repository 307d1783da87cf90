"""`retrysafe outbox`: look at entries, and decide about one that could not be delivered."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from typing import Annotated, Any, Final

import typer
from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from retrysafe import inspection
from retrysafe.cli import options, output
from retrysafe.cli.problems import ExitCode, Problem, usage
from retrysafe.core.model import Decision
from retrysafe.core.outbox.entries import (
    EntryCommand,
    EntryCondition,
    EntryQuery,
    StoredEntry,
    tries_text,
)
from retrysafe.core.outbox.port import Outbox, outbox_of
from retrysafe.runtime.drive import run_sync

BODY_LIMIT_CHARACTERS: Final = 10_000

# Dead entries are looked through for those that hold others back; more wait for an operator only
# where nobody looks at single ones.
_DEAD_LIMIT: Final = 1_000

# By the number of an entry that waits: the number of the dead one before it.
Held = dict[int, int]

_STYLES: Final = {
    EntryCondition.WAITING: "yellow",
    EntryCondition.CLAIMED: "cyan",
    EntryCondition.DEAD: "red",
    EntryCondition.DELIVERED: "green",
    EntryCondition.DISCARDED: "dim",
}

app = typer.Typer(help="Look at outbox entries, and retry or discard one.", rich_markup_mode="rich")

Number = Annotated[
    int,
    typer.Argument(metavar="NUMBER", min=1, help="The entry's number.", show_default=False),
]


class ListedEntryCondition(StrEnum):
    """The conditions that an entry can be in."""

    WAITING = EntryCondition.WAITING.value
    CLAIMED = EntryCondition.CLAIMED.value
    DEAD = EntryCondition.DEAD.value
    DELIVERED = EntryCondition.DELIVERED.value
    DISCARDED = EntryCondition.DISCARDED.value


@app.command("list")
@options.examples(
    "retrysafe outbox list --store sqlite:///app.db",
    "retrysafe outbox list --state dead",
    "retrysafe outbox list --topic orders.paid --aggregate order-7 --limit 500 --json",
)
def list_entries(
    context: typer.Context,
    store: options.StoreUrl = None,
    state: Annotated[
        list[ListedEntryCondition] | None,
        typer.Option(
            "--state",
            metavar="STATE",
            help=f"Only entries that are {', '.join(ListedEntryCondition)}; may be repeated.",
        ),
    ] = None,
    topic: Annotated[
        str | None,
        typer.Option(
            "--topic", metavar="TOPIC", help="Only entries of this topic.", show_default=False
        ),
    ] = None,
    aggregate: Annotated[
        str | None,
        typer.Option(
            "--aggregate",
            metavar="TEXT",
            help="Only entries of this aggregate.",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[
        int, typer.Option("--limit", min=1, max=100_000, help="How many entries to show at most.")
    ] = 50,
    busy_timeout: options.BusyTimeout = options.BUSY_SECONDS,
    as_json: options.AsJson = False,
) -> None:
    """List outbox entries, newest first."""
    query = EntryQuery(
        conditions=frozenset(EntryCondition(item.value) for item in state or ()),
        topic=topic and options.checked_text("--topic", topic),
        aggregate=aggregate and options.checked_text("--aggregate", aggregate),
        # One more tells whether there are more than can be shown.
        limit=limit + 1,
    )
    with options.opened_store(store, busy_timeout) as opened:
        outbox = outbox_of(opened)
        found = run_sync(outbox.list_entries(query))
        shown, has_more = found[:limit], len(found) > limit
        held = _held_back(outbox, shown)
    if options.is_json(context, as_json):
        output.write_json(
            {"entries": [entry_json(item, held) for item in shown], "has_more": has_more}
        )
        return
    if not shown:
        output.note("no entry matches")
        return
    output.show_list(output.console(), _table(shown, held), (_block(item, held) for item in shown))
    if has_more:
        output.note(f"more than {limit} entries match: raise --limit, or filter")


def _held_back(outbox: Outbox, found: list[StoredEntry]) -> Held:
    """Which of the entries wait behind a dead one of their aggregate, and behind which."""
    lanes = {
        stored.entry.aggregate
        for stored in found
        if stored.condition is EntryCondition.WAITING and stored.entry.aggregate is not None
    }
    if not lanes:
        return {}
    query = EntryQuery(
        conditions=frozenset({EntryCondition.DEAD}),
        aggregate=lanes.pop() if len(lanes) == 1 else None,
        limit=_DEAD_LIMIT,
    )
    # Newest first, so that the oldest of an aggregate is what remains: it holds all others back.
    dead = run_sync(outbox.list_entries(query))
    heads: dict[str | None, int] = {item.entry.aggregate: item.entry.id for item in dead}
    return {
        stored.entry.id: heads[stored.entry.aggregate]
        for stored in found
        if stored.condition is EntryCondition.WAITING
        and stored.entry.aggregate is not None
        and heads.get(stored.entry.aggregate, stored.entry.id) < stored.entry.id
    }


def entry_json(stored: StoredEntry, held: Held) -> dict[str, Any]:
    """One entry as JSON, without its body."""
    entry = stored.entry
    is_waiting = stored.condition in (EntryCondition.WAITING, EntryCondition.CLAIMED)
    return {
        "number": entry.id,
        "key": entry.key,
        "topic": entry.topic,
        "aggregate": entry.aggregate,
        "state": stored.condition.value,
        # The dead entry of its aggregate that it waits for, unless relays run with --dead-frees.
        "held_back_by": held.get(entry.id),
        "attempts": entry.attempts,
        "content_type": entry.content_type,
        "size_bytes": len(entry.body),
        "caller": entry.caller or None,
        "is_global": entry.caller == "",
        "operation_key": entry.origin,
        "staged_at": inspection.instant_text(entry.staged_at_ms),
        "due_at": inspection.instant_text(entry.due_at_ms) if is_waiting else None,
        "settled_at": inspection.instant_text(entry.settled_at_ms),
        "expires_at": inspection.instant_text(entry.expires_at_ms),
        "age_ms": max(0, stored.now_ms - entry.staged_at_ms),
        "last_error": entry.last_error,
    }


def _when(stored: StoredEntry, held: Held) -> str:
    """What happens next and when, in words."""
    entry = stored.entry
    if entry.id in held:
        return f"held back by entry {held[entry.id]}"
    left_ms = entry.due_at_ms - stored.now_ms
    if stored.condition is EntryCondition.CLAIMED:
        return f"lease {inspection.duration_text(left_ms)}"
    if stored.condition is EntryCondition.WAITING:
        return f"due in {inspection.duration_text(left_ms)}" if left_ms > 0 else "due"
    if entry.settled_at_ms is None:
        return ""
    return f"{inspection.duration_text(stored.now_ms - entry.settled_at_ms)} ago"


def _table(found: list[StoredEntry], held: Held) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("number", justify="right", no_wrap=True)
    for title in ("topic", "aggregate", "state"):
        table.add_column(title, no_wrap=True)
    table.add_column("attempts", justify="right", no_wrap=True)
    table.add_column("age", justify="right", no_wrap=True)
    table.add_column("when", no_wrap=True)
    table.add_column("last error", no_wrap=True)
    for stored in found:
        entry = stored.entry
        table.add_row(
            str(entry.id),
            output.cell(entry.topic),
            output.cell(entry.aggregate or "-"),
            output.cell(stored.condition.value, _STYLES[stored.condition]),
            str(entry.attempts),
            inspection.duration_text(stored.now_ms - entry.staged_at_ms),
            _when(stored, held),
            output.cell(entry.last_error or ""),
        )
    return table


def _block(stored: StoredEntry, held: Held) -> Group:
    """The same for a narrow screen."""
    entry = stored.entry
    title = Text(f"{entry.id}  ", style="bold").append(output.safe(entry.topic))
    parts: list[str | Text] = [output.cell(stored.condition.value, _STYLES[stored.condition])]
    parts += [text for text in (_when(stored, held),) if text]
    if entry.aggregate is not None:
        parts.append(output.cell(f"aggregate {entry.aggregate}"))
    parts.append(tries_text(entry.attempts))
    parts.append(f"{inspection.duration_text(stored.now_ms - entry.staged_at_ms)} old")
    if entry.last_error is not None:
        parts.append(output.cell(f"last error: {entry.last_error}"))
    return output.block(title, parts)


@app.command("show")
@options.examples(
    "retrysafe outbox show 42 --store sqlite:///app.db",
    "retrysafe outbox show 42 --json",
)
def show_entry(
    context: typer.Context,
    number: Number,
    store: options.StoreUrl = None,
    busy_timeout: options.BusyTimeout = options.BUSY_SECONDS,
    as_json: options.AsJson = False,
) -> None:
    """Show one entry with its body, and the last error if its delivery failed."""
    with options.opened_store(store, busy_timeout) as opened:
        outbox = outbox_of(opened)
        stored = _stored(outbox, number)
        held = _held_back(outbox, [stored])
    if options.is_json(context, as_json):
        name, body = inspection.readable(stored.entry.body, may_be_json=True)
        output.write_json(entry_json(stored, held) | {name: body})
    else:
        output.console().print(_detail(stored, held))


def _stored(outbox: Outbox, number: int) -> StoredEntry:
    stored = run_sync(outbox.read(number))
    if stored is None:
        raise Problem(
            "EntryUnknown",
            f"there is no outbox entry {number}: it was never there, or was swept away",
            ExitCode.REFUSED,
        )
    return stored


def _detail(stored: StoredEntry, held: Held) -> Group:
    entry, document = stored.entry, entry_json(stored, held)
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row("number", str(entry.id))
    grid.add_row("key", output.cell(entry.key))
    grid.add_row("topic", output.cell(entry.topic))
    grid.add_row("aggregate", output.cell(entry.aggregate or "-"))
    when = _when(stored, held)
    state = output.cell(stored.condition.value, _STYLES[stored.condition])
    grid.add_row("state", state.append(f" ({when})" if when else ""))
    grid.add_row("attempts", str(entry.attempts))
    if entry.origin is not None:
        caller = entry.caller or "GLOBAL"
        grid.add_row("staged by", output.cell(f"{entry.origin} of {caller}"))
    for name in ("staged_at", "due_at", "settled_at", "expires_at"):
        if document[name] is not None:
            grid.add_row(name.replace("_", " "), document[name])
    if entry.last_error is not None:
        grid.add_row("last error", output.cell(entry.last_error))
    return Group(grid, Text("\nbody", style="bold"), _body(stored))


def _body(stored: StoredEntry) -> Padding:
    name, body = inspection.readable(stored.entry.body, may_be_json=True)
    text = body if name != "body" else json.dumps(body, indent=2, ensure_ascii=False)
    if len(text) > BODY_LIMIT_CHARACTERS:
        left = len(text) - BODY_LIMIT_CHARACTERS
        text = f"{text[:BODY_LIMIT_CHARACTERS]}\n… {left:,} more characters; --json shows all"
    what = [stored.entry.content_type, f"{len(stored.entry.body):,} bytes"]
    if name == "body_base64":
        what.append("in base 64")
    lines = Text(output.safe(", ".join(what)) + "\n", style="dim")
    return Padding(
        lines.append(output.safe_lines(text), style="not dim"), (0, 0, 0, 2), expand=False
    )


@app.command("retry")
@options.examples(
    "retrysafe outbox retry 42 --store sqlite:///app.db",
    "retrysafe outbox retry 42 --yes --json",
)
def retry_entry(
    context: typer.Context,
    number: Number,
    store: options.StoreUrl = None,
    yes: options.Yes = False,
    busy_timeout: options.BusyTimeout = options.BUSY_SECONDS,
    as_json: options.AsJson = False,
) -> None:
    """Have a dead or waiting entry delivered now, with all its tries again.

    The later entries of its aggregate follow it.
    """
    with options.opened_store(store, busy_timeout) as opened:
        is_json = options.is_json(context, as_json)
        _operate(outbox_of(opened), number, EntryCommand.RETRY, yes, is_json)


@app.command("discard")
@options.examples(
    "retrysafe outbox discard 42 --store sqlite:///app.db",
    "retrysafe outbox discard 42 --yes --json",
)
def discard_entry(
    context: typer.Context,
    number: Number,
    store: options.StoreUrl = None,
    yes: options.Yes = False,
    busy_timeout: options.BusyTimeout = options.BUSY_SECONDS,
    as_json: options.AsJson = False,
) -> None:
    """Give up a dead or waiting entry: it is never delivered, and holds nothing back any more.

    It can still be looked at for a week.
    """
    with options.opened_store(store, busy_timeout) as opened:
        is_json = options.is_json(context, as_json)
        _operate(outbox_of(opened), number, EntryCommand.DISCARD, yes, is_json)


_CONSEQUENCES: Final = {
    EntryCommand.RETRY: "a relay delivers it",
    EntryCommand.DISCARD: "it is never delivered",
}
_DONE: Final = {
    EntryCommand.RETRY: "due again",
    EntryCommand.DISCARD: "discarded",
}


def _operate(
    outbox: Outbox, number: int, command: EntryCommand, is_confirmed: bool, is_json: bool
) -> None:
    before = _stored(outbox, number)
    if before.condition not in (EntryCondition.WAITING, EntryCondition.DEAD):
        raise _refused(before, command)
    if not is_confirmed:
        _confirm(before, command)
    # Decided by the store: the entry may have changed while somebody was thinking.
    decision = run_sync(outbox.operate(number, command))
    after = _stored(outbox, number)
    if decision is not Decision.APPLY:
        raise _refused(after, command)
    if is_json:
        output.write_json(
            {
                "command": command.value,
                "state_before": before.condition.value,
                "entry": entry_json(after, _held_back(outbox, [after])),
            }
        )
    else:
        sys.stdout.write(f"entry {number} is {_DONE[command]}; it was {before.condition.value}\n")


def _refused(stored: StoredEntry, command: EntryCommand) -> Problem:
    advice = {
        EntryCondition.CLAIMED: "a relay is delivering it; wait for the end of its lease",
        EntryCondition.DELIVERED: "the receiver has it",
        EntryCondition.DISCARDED: "it was given up; stage it anew",
    }.get(stored.condition, "it changed meanwhile; look at it and try again")
    return Problem(
        "OperatorRefused",
        f"cannot {command.value} entry {stored.entry.id} while it is {stored.condition.value}: "
        f"{advice}",
        ExitCode.REFUSED,
    )


def _confirm(stored: StoredEntry, command: EntryCommand) -> None:
    if not sys.stdin.isatty():
        raise usage(f"there is no terminal to ask on: add --yes to {command.value} the entry")
    entry = stored.entry
    output.note(
        f"entry {entry.id} for {entry.topic} is {stored.condition.value} after "
        f"{tries_text(entry.attempts)}; after this, {_CONSEQUENCES[command]}."
    )
    if not typer.confirm(f"{command.value.capitalize()} it?", err=True):
        raise Problem("Declined", "nothing was changed", ExitCode.REFUSED)
