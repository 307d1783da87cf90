"""`retrysafe keys release` and `expire`: one key or all that match, and never without a reason."""

from __future__ import annotations

import getpass
import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Final

import typer

from retrysafe import inspection
from retrysafe.cli import key_filters, options, output
from retrysafe.cli.keys import stored_keys, unknown
from retrysafe.cli.problems import ExitCode, Problem, usage
from retrysafe.cli.progress import shown_progress
from retrysafe.core.keys.key import Key
from retrysafe.core.listing import RecordQuery
from retrysafe.core.machine import decide, operator_trigger
from retrysafe.core.model import (
    Condition,
    Decision,
    OperatorCommand,
    OperatorNote,
    StoredKey,
)
from retrysafe.core.ports import Store
from retrysafe.core.recovery import key_of
from retrysafe.errors import OperatorRefused
from retrysafe.runtime.checks import operator_outcome
from retrysafe.runtime.drive import run_sync

# Keys that one search gives; each of them is changed in a transaction of its own.
_PAGE: Final = 500
# How many of those that match are named before anything happens.
_SAMPLE: Final = 5
_REASON_LIMIT: Final = 1_000

OptionalKey = Annotated[
    str | None,
    typer.Argument(metavar="[KEY]", help="The key; none with --all.", show_default=False),
]
All = Annotated[
    bool, typer.Option("--all", help="All keys that match the filters, instead of one.")
]
Reason = Annotated[
    str | None,
    typer.Option(
        "--reason",
        metavar="TEXT",
        help="Why; kept with your name, and shown by keys show. Required.",
        show_default=False,
    ),
]
Operator = Annotated[
    str | None,
    typer.Option(
        "--operator",
        envvar="RETRYSAFE_OPERATOR",
        metavar="NAME",
        help="Who you are; if not given, your login on this host.",
        show_default=False,
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be changed.")]


@options.examples(
    "retrysafe keys release charge:42 --caller acme --reason 'worker 7 is gone, see INC-12'",
    "retrysafe keys release --all --condition abandoned --operation charge --dry-run",
    "retrysafe keys release charge:42 --caller acme --force --yes --reason 'host was wiped'",
)
def release_key(
    context: typer.Context,
    key: OptionalKey = None,
    store: options.StoreUrl = None,
    caller: options.Caller = None,
    bearer: options.Bearer = None,
    api_key: options.ApiKey = None,
    is_global: options.IsGlobal = False,
    every: All = False,
    prefix: key_filters.PrefixFilter = "",
    operation: key_filters.OperationFilter = None,
    condition: key_filters.ConditionFilter = None,
    older_than: key_filters.OlderThan = None,
    newer_than: key_filters.NewerThan = None,
    reason: Reason = None,
    operator: Operator = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Also when the lease still holds: its owner loses the claim."),
    ] = False,
    dry_run: DryRun = False,
    yes: options.Yes = False,
    busy_timeout: options.BusyTimeout = options.BUSY_SECONDS,
    as_json: options.AsJson = False,
) -> None:
    """Free a key, or all that match, so that the next use is a new attempt.

    For keys whose owner is gone, or whose stored failure is to be tried again. A key whose
    operation succeeded is refused: expire it instead. With --force a running operation may take
    place twice, so be sure that its owner is gone.
    """
    command = OperatorCommand.FORCE_RELEASE if force else OperatorCommand.RELEASE
    filters = key_filters.Filters(
        caller, bearer, api_key, is_global, prefix, operation, condition, older_than, newer_than
    )
    change = _Change(command, operator, reason, dry_run, yes, options.is_json(context, as_json))
    _run(change, key, every, filters, store, busy_timeout)


@options.examples(
    "retrysafe keys expire charge:42 --caller acme --reason 'refunded by hand, INC-12'",
    "retrysafe keys expire --all --operation report --older-than 1d --dry-run",
)
def expire_key(
    context: typer.Context,
    key: OptionalKey = None,
    store: options.StoreUrl = None,
    caller: options.Caller = None,
    bearer: options.Bearer = None,
    api_key: options.ApiKey = None,
    is_global: options.IsGlobal = False,
    every: All = False,
    prefix: key_filters.PrefixFilter = "",
    operation: key_filters.OperationFilter = None,
    condition: key_filters.ConditionFilter = None,
    older_than: key_filters.OlderThan = None,
    newer_than: key_filters.NewerThan = None,
    reason: Reason = None,
    operator: Operator = None,
    dry_run: DryRun = False,
    yes: options.Yes = False,
    busy_timeout: options.BusyTimeout = options.BUSY_SECONDS,
    as_json: options.AsJson = False,
) -> None:
    """End the active window of a settled key, or of all that match: the next use runs it again.

    The stored outcome stays in the audit. A pending key is refused: release it instead. Once a
    sweep has removed the key, only show and SQL reach its outcomes, until their audit window ends.
    """
    filters = key_filters.Filters(
        caller, bearer, api_key, is_global, prefix, operation, condition, older_than, newer_than
    )
    change = _Change(
        OperatorCommand.EXPIRE, operator, reason, dry_run, yes, options.is_json(context, as_json)
    )
    _run(change, key, every, filters, store, busy_timeout)


@dataclass(slots=True)
class _Change:
    """What is to be done, by whom and why."""

    command: OperatorCommand
    operator: str | None
    reason: str | None
    is_dry: bool
    is_confirmed: bool
    is_json: bool

    def note(self) -> OperatorNote:
        """Who and why; raises a usage problem without a reason."""
        reason = (self.reason or "").strip()
        if not reason or len(reason) > _REASON_LIMIT:
            raise usage(
                f"say why you {self.command.value} it: pass --reason TEXT, at most "
                f"{_REASON_LIMIT:,} characters; it is kept and shown by keys show"
            )
        operator = options.checked_text("--operator", self.operator or _login())
        return OperatorNote(operator[:200], options.checked_text("--reason", reason))


def _login() -> str:
    try:
        login = os.environ.get("SUDO_USER") or getpass.getuser()
    except (KeyError, OSError):
        login = str(os.getuid())  # A container may know its user by number alone.
    return f"{login}@{socket.gethostname()[:100]}"


_CONSEQUENCES: Final = {
    OperatorCommand.RELEASE: "the next use of the key runs the operation again",
    OperatorCommand.FORCE_RELEASE: (
        "whoever holds the claim loses it, and the operation may take place twice"
    ),
    OperatorCommand.EXPIRE: "the next use of the key runs the operation again",
}
_DONE: Final = {
    OperatorCommand.RELEASE: "released",
    OperatorCommand.FORCE_RELEASE: "released",
    OperatorCommand.EXPIRE: "expired",
}


def _run(
    change: _Change,
    key: str | None,
    every: bool,
    filters: key_filters.Filters,
    store: str | None,
    busy_timeout: float,
) -> None:
    if every and key is not None:
        raise usage("either a key or --all: a key is one")
    if not every and key is None:
        raise usage(f"which key? Name it, or {change.command.value} all that match with --all")
    if key is not None:
        narrow = replace(filters, caller=None, bearer=None, api_key=None, is_global=False)
        if not narrow.is_empty:
            raise usage("filters choose among keys: add --all, or leave them out")
        caller, bearer, api_key = filters.caller, filters.bearer, filters.api_key
        named = options.chosen_keys(key, caller, bearer, api_key, filters.is_global)
        with options.opened_store(store, busy_timeout) as opened:
            _operate(opened, named, change)
        return
    if filters.is_empty:
        raise usage("--all without a filter means every key there is: say which, with a filter")
    if not change.is_dry:
        change.note()  # Nobody waits for a search that leads to a usage problem.
    queries = [_allowed(query, change.command) for query in filters.queries(_PAGE)]
    with options.opened_store(store, busy_timeout) as opened:
        _operate_on_all(opened, queries, change)


# One key.


def _operate(store: Store, named: list[Key], change: _Change) -> None:
    """Acts on every form of the key; somebody is asked once, and JSON tells of the first done.

    A form that is refused does not keep the others as they are: it is told of at the end.
    """
    refusal: OperatorRefused | None = None
    is_told = False
    for key in stored_keys(store, named):
        try:
            document = _operate_on(store, key, change, is_confirmed=change.is_confirmed or is_told)
        except OperatorRefused as error:
            refusal = refusal or error
            continue
        if not change.is_json:
            _report_done(key, change, document)
        elif not is_told:
            output.write_json(document)
        is_told = True
    if refusal is not None:
        raise refusal


def _operate_on(store: Store, key: Key, change: _Change, *, is_confirmed: bool) -> dict[str, Any]:
    command = change.command
    before = run_sync(store.read(key))
    if before is None:
        raise unknown(key)
    # Nobody is asked about a command that will be refused.
    decision = decide(operator_trigger(command), before.condition)
    operator_outcome(decision, command, key, before)
    after: StoredKey | None = before
    if not change.is_dry:
        note = replace(change.note(), seen=before.seen)
        if not is_confirmed:
            _confirm(key, command, before)
        # Decided once more by the store: the record may have changed while somebody was thinking.
        decision = run_sync(store.operate(key, command, note))
        after = run_sync(store.read(key))
        operator_outcome(decision, command, key, after)
    return {
        "command": command.value,
        "is_dry_run": change.is_dry,
        "decision": decision.value,
        "condition_before": before.condition.value,
        "record": None if after is None else inspection.record_json(after),
    }


def _report_done(key: Key, change: _Change, document: dict[str, Any]) -> None:
    name = output.safe(str(key))
    done = _DONE[change.command]
    if document["decision"] == Decision.CONFIRM.value:
        output.line(f"nothing to do: {name} has expired already")
    elif change.is_dry:
        output.line(f"would be {done}: {name}; it is {document['condition_before']}")
    else:
        output.line(f"{done} {name}; it was {document['condition_before']}")


def _confirm(key: Key, command: OperatorCommand, stored: StoredKey) -> None:
    if not sys.stdin.isatty():
        raise usage(f"there is no terminal to ask on: add --yes to {command.value} the key")
    output.note(
        f"{key} is {stored.condition.value} (attempt {stored.record.attempt}, "
        f"{inspection.time_left_text(stored)}); after this, {_CONSEQUENCES[command]}."
    )
    if not typer.confirm(f"{command.value.capitalize()} it?", err=True):
        raise Problem("Declined", "nothing was changed", ExitCode.REFUSED)


# All that match.


@dataclass(slots=True)
class _Counts:
    """How far the work has come."""

    matched: int = 0
    changed: int = 0
    refused: int = 0
    refusals: list[str] = field(default_factory=list)
    # When they were looked at, by the store's clock.
    looked_at_ms: int = 0
    # What the store did not search, in words.
    unsearched: str = ""


def _allowed(query: RecordQuery, command: OperatorCommand) -> RecordQuery:
    """Only the conditions that the command is not refused in: the others would only be told of."""
    takes = frozenset(
        item
        for item in Condition
        if item is not Condition.ABSENT
        and decide(operator_trigger(command), item) is Decision.APPLY
    )
    # What is free already is released again, for its count of attempts, only when you say so.
    usual = takes if command is OperatorCommand.EXPIRE else takes - {Condition.RELEASED}
    conditions = query.conditions & takes if query.conditions else usual
    if command is OperatorCommand.FORCE_RELEASE and not query.conditions:
        raise usage("--force with --all needs --condition: it ends operations that are running")
    if not conditions:
        listed = ", ".join(sorted(item.value for item in takes))
        raise usage(f"{command.value} takes keys that are {listed}")
    return replace(query, conditions=conditions)


def _matching(store: Store, queries: list[RecordQuery], counts: _Counts) -> Iterator[StoredKey]:
    for query in queries:
        asked = query
        while True:
            page = run_sync(store.list_records(asked))
            counts.unsearched = counts.unsearched or page.unsearched
            yield from page.keys
            if page.after is None:
                break
            asked = replace(asked, after=page.after)


def _operate_on_all(store: Store, queries: list[RecordQuery], change: _Change) -> None:
    counts = _Counts()
    sample: list[str] = []
    with shown_progress("looking", {"matched": "match"}, is_quiet=change.is_json) as show:
        for stored in _matching(store, queries, counts):
            counts.matched += 1
            counts.looked_at_ms = counts.looked_at_ms or stored.now_ms
            if len(sample) < _SAMPLE:
                sample.append(f"{key_of(stored.record)} ({stored.condition.value})")
            if counts.matched % _PAGE == 0:
                show(counts)
    if not change.is_json:
        for line in sample:
            output.note(line)
        if counts.matched > len(sample):
            output.note(f"… and {counts.matched - len(sample):,} more")
        if counts.unsearched:
            output.note(f"not searched: {counts.unsearched}; run the command again after this one")
    if counts.matched and not change.is_dry:
        if not change.is_confirmed:
            _confirm_all(counts, change.command)
        _change_all(store, queries, change, counts)
    if change.is_json:
        output.write_json(
            {
                "command": change.command.value,
                "is_dry_run": change.is_dry,
                "matched": counts.matched,
                "changed": counts.changed,
                "refused": counts.refused,
                "refusals": counts.refusals,
                "not_searched": counts.unsearched or None,
                "sample": sample,
            }
        )
    elif change.is_dry:
        output.line(f"{counts.matched:,} keys would be {_DONE[change.command]}")
    else:
        output.line(
            f"{counts.changed:,} keys {_DONE[change.command]}, {counts.refused:,} had changed and "
            "were left"
        )


def _confirm_all(counts: _Counts, command: OperatorCommand) -> None:
    if not sys.stdin.isatty():
        raise usage(
            f"there is no terminal to ask on: {counts.matched:,} keys match; look at them with "
            f"--dry-run, then add --yes to {command.value} them"
        )
    output.note(f"after this, {_CONSEQUENCES[command]}.")
    if not typer.confirm(f"{command.value.capitalize()} {counts.matched:,} keys?", err=True):
        raise Problem("Declined", "nothing was changed", ExitCode.REFUSED)


def _change_all(store: Store, queries: list[RecordQuery], change: _Change, counts: _Counts) -> None:
    note = change.note()
    words = {"changed": f"of {counts.matched:,}", "refused": "left"}
    # Never more than somebody has agreed to: keys that match only now are another command's.
    left = counts.matched
    with shown_progress(
        change.command.value, words, is_quiet=change.is_json, total=counts.matched
    ) as show:
        for stored in _matching(store, queries, counts):
            if not left:
                break
            if not stored.was_so(counts.looked_at_ms):
                continue
            left -= 1
            key = key_of(stored.record)
            noted = replace(note, seen=stored.seen)
            decision = run_sync(store.operate(key, change.command, noted))
            if decision is Decision.APPLY:
                counts.changed += 1
            else:
                counts.refused += 1
                if len(counts.refusals) < _SAMPLE:
                    counts.refusals.append(str(key))
            show(counts)
