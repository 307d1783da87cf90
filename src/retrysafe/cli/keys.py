"""`retrysafe keys`: look at records, and change one when an incident asks for it."""

from __future__ import annotations

import sys
from dataclasses import replace
from enum import StrEnum
from typing import Annotated, Any, Final

import typer
from rich.console import Group

from retrysafe import inspection
from retrysafe.cli import key_output, options, output
from retrysafe.cli.problems import ExitCode, Problem, usage
from retrysafe.core.keys.key import Key
from retrysafe.core.machine import decide, how_far, operator_trigger
from retrysafe.core.model import (
    Condition,
    Decision,
    OperatorCommand,
    RecordQuery,
    StoredKey,
    StoredOutcome,
)
from retrysafe.core.ports import Store
from retrysafe.errors import OperatorRefused
from retrysafe.runtime.checks import operator_outcome
from retrysafe.runtime.drive import run_sync
from retrysafe.stores.audit import Audited

app = typer.Typer(help="Look at keys, and release or expire one.", rich_markup_mode="rich")


class ListedCondition(StrEnum):
    """The conditions that a stored record can be in."""

    RUNNING = Condition.RUNNING.value
    ABANDONED = Condition.ABANDONED.value
    SUCCEEDED = Condition.SUCCEEDED.value
    FAILED = Condition.FAILED.value
    RELEASED = Condition.RELEASED.value
    OUTLIVED = Condition.OUTLIVED.value


@app.command("list")
@options.examples(
    "retrysafe keys list --store sqlite:///app.db",
    "retrysafe keys list --condition running --condition abandoned",
    "retrysafe keys list --caller acme --prefix charge: --limit 500 --json",
)
def list_keys(
    context: typer.Context,
    store: options.StoreUrl = None,
    caller: Annotated[
        str | None,
        typer.Option(
            "--caller", metavar="CALLER", help="Only keys of this caller.", show_default=False
        ),
    ] = None,
    bearer: Annotated[
        str | None,
        typer.Option(
            "--bearer",
            metavar="TOKEN",
            help="Only keys of HTTP clients with this bearer token.",
            show_default=False,
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key",
            metavar="APIKEY",
            help="Only keys of HTTP clients with this API key.",
            show_default=False,
        ),
    ] = None,
    is_global: Annotated[
        bool, typer.Option("--global", help="Only keys in the namespace shared by all callers.")
    ] = False,
    prefix: Annotated[
        str, typer.Option("--prefix", metavar="TEXT", help="Only keys that start so.")
    ] = "",
    condition: Annotated[
        list[ListedCondition] | None,
        typer.Option(
            "--condition",
            metavar="CONDITION",
            help=f"Only keys that are {', '.join(ListedCondition)}; may be repeated.",
        ),
    ] = None,
    limit: Annotated[
        int, typer.Option("--limit", min=1, max=100_000, help="How many keys to show at most.")
    ] = 50,
    busy_timeout: options.BusyTimeout = options.BUSY_SECONDS,
    as_json: options.AsJson = False,
) -> None:
    """List keys, newest claim first."""
    if caller == "":
        raise usage("--caller must not be empty: use --global for the shared namespace")
    callers: list[str | None] = [
        options.checked_text("--caller", each)
        for each in options.chosen_callers(caller, bearer, api_key, is_global)
    ]
    query = RecordQuery(
        caller="" if is_global else None,
        text_prefix=options.checked_text("--prefix", prefix),
        conditions=frozenset(Condition(item.value) for item in condition or ()),
        # One more tells whether there are more than can be shown.
        limit=limit + 1,
    )
    with options.opened_store(store, busy_timeout) as opened:
        found = [
            stored
            for each in callers or [query.caller]
            for stored in _found(opened, replace(query, caller=each))
        ]
    if len(callers) > 1:
        found.sort(key=lambda item: item.record.claimed_at_ms, reverse=True)
    shown, has_more = found[:limit], len(found) > limit
    if options.is_json(context, as_json):
        output.write_json(
            {"keys": [inspection.record_json(item) for item in shown], "has_more": has_more}
        )
        return
    if not shown:
        output.note("no key matches")
        return
    screen = output.console()
    # What is searched or copied from comes whole; on a screen the digest of a token only fills it.
    caller_text = inspection.short_caller_text if screen.is_terminal else inspection.caller_text
    output.show_list(
        screen,
        key_output.table(shown, caller_text),
        (key_output.block(item, caller_text) for item in shown),
    )
    if has_more:
        output.note(f"more than {limit} keys match: raise --limit, or filter")


def _found(store: Store, query: RecordQuery) -> list[StoredKey]:
    only_abandoned = RecordQuery(conditions=frozenset({Condition.ABANDONED}), limit=query.limit)
    if query == only_abandoned:
        # What people look for in an incident, when one more long scan is the last thing they need.
        found = run_sync(store.list_abandoned(query.limit))
        return sorted(found, key=lambda item: item.record.claimed_at_ms, reverse=True)
    return run_sync(store.list_records(query))


@app.command("show")
@options.examples(
    "retrysafe keys show charge:42 --caller acme --store sqlite:///app.db",
    'retrysafe keys show 8e03978e-40d5 --bearer "$TOKEN"',
    "retrysafe keys show nightly-report --global --json",
)
def show_key(
    context: typer.Context,
    key: options.KeyText,
    store: options.StoreUrl = None,
    caller: options.Caller = None,
    bearer: options.Bearer = None,
    api_key: options.ApiKey = None,
    is_global: options.IsGlobal = False,
    busy_timeout: options.BusyTimeout = options.BUSY_SECONDS,
    as_json: options.AsJson = False,
) -> None:
    """Show one key: its record, its finished steps, and every outcome in its audit.

    Of a key that a sweep has removed, the outcomes are shown until their audit window ends.
    """
    named = options.chosen_keys(key, caller, bearer, api_key, is_global)
    with options.opened_store(store, busy_timeout) as opened:
        wanted = _stored_keys(opened, named)[0]
        stored = run_sync(opened.read(wanted, with_audit=True))
        past: list[StoredOutcome] = []
        if stored is None and isinstance(opened, Audited):
            for form in named:
                past = run_sync(opened.read_audit(form))
                if past:
                    wanted = form
                    break
    if stored is None and not past:
        raise _unknown(wanted)
    if stored is None:
        document, outcomes = inspection.past_json(wanted, past), past
    else:
        document, outcomes = inspection.detail_json(stored), stored.outcomes
    if options.is_json(context, as_json):
        output.write_json(document)
        return
    if stored is None:
        shown = key_output.past(wanted, document)
    else:
        shown = key_output.detail(stored, document)
    output.console().print(Group(*shown, *key_output.endings(document, outcomes)))


def _unknown(key: Key) -> Problem:
    return Problem(
        "KeyUnknown",
        f"there is no record of {key}: check the key and the caller",
        ExitCode.REFUSED,
    )


def _stored_keys(store: Store, named: list[Key]) -> list[Key]:
    """Those forms of a client's key that have a record, the one that has come furthest first.

    What is outlived counts where nothing else is left; the first form where none has a record.
    """
    if len(named) == 1:
        return named
    found = {key: run_sync(store.read(key)) for key in named}
    reached = {key: how_far(item.condition) for key, item in found.items() if item is not None}
    least = how_far(Condition.OUTLIVED)
    live = [key for key, far in reached.items() if far > least] or [*reached]
    return sorted(live, key=reached.__getitem__, reverse=True) or named[:1]


def _stored(store: Store, key: Key) -> StoredKey:
    stored = run_sync(store.read(key))
    if stored is None:
        raise _unknown(key)
    return stored


@app.command("release")
@options.examples(
    "retrysafe keys release charge:42 --caller acme --store sqlite:///app.db",
    "retrysafe keys release charge:42 --caller acme --force --yes",
)
def release_key(
    context: typer.Context,
    key: options.KeyText,
    store: options.StoreUrl = None,
    caller: options.Caller = None,
    bearer: options.Bearer = None,
    api_key: options.ApiKey = None,
    is_global: options.IsGlobal = False,
    force: Annotated[
        bool,
        typer.Option("--force", help="Also when the lease still holds: its owner loses the claim."),
    ] = False,
    yes: options.Yes = False,
    busy_timeout: options.BusyTimeout = options.BUSY_SECONDS,
    as_json: options.AsJson = False,
) -> None:
    """Free a key, so that its next use is a new attempt.

    For a key whose owner is gone, or whose stored failure is to be tried again. A key whose
    operation succeeded is refused: expire it instead. With --force a running operation may take
    place twice, so be sure that its owner is gone.
    """
    command = OperatorCommand.FORCE_RELEASE if force else OperatorCommand.RELEASE
    named = options.chosen_keys(key, caller, bearer, api_key, is_global)
    with options.opened_store(store, busy_timeout) as opened:
        _operate(opened, named, command, yes, options.is_json(context, as_json))


@app.command("expire")
@options.examples(
    "retrysafe keys expire charge:42 --caller acme --store sqlite:///app.db",
    "retrysafe keys expire nightly-report --global --yes --json",
)
def expire_key(
    context: typer.Context,
    key: options.KeyText,
    store: options.StoreUrl = None,
    caller: options.Caller = None,
    bearer: options.Bearer = None,
    api_key: options.ApiKey = None,
    is_global: options.IsGlobal = False,
    yes: options.Yes = False,
    busy_timeout: options.BusyTimeout = options.BUSY_SECONDS,
    as_json: options.AsJson = False,
) -> None:
    """End a settled key's active window now: its next use runs the operation again.

    The stored outcome stays in the audit. A pending key is refused: release it instead. Once a
    sweep has removed the key, only show and SQL reach its outcomes, until their audit window ends.
    """
    named = options.chosen_keys(key, caller, bearer, api_key, is_global)
    with options.opened_store(store, busy_timeout) as opened:
        _operate(opened, named, OperatorCommand.EXPIRE, yes, options.is_json(context, as_json))


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


def _operate(
    store: Store, named: list[Key], command: OperatorCommand, is_confirmed: bool, is_json: bool
) -> None:
    """Acts on every form of the key; somebody is asked once, and JSON tells of the first done.

    A form that is refused does not keep the others as they are: it is told of at the end.
    """
    refusal: OperatorRefused | None = None
    is_told = False
    for key in _stored_keys(store, named):
        try:
            document = _operate_on(store, key, command, is_confirmed=is_confirmed or is_told)
        except OperatorRefused as error:
            refusal = refusal or error
            continue
        if not is_json:
            _report_done(key, command, document)
        elif not is_told:
            output.write_json(document)
        is_told = True
    if refusal is not None:
        raise refusal


def _operate_on(
    store: Store, key: Key, command: OperatorCommand, *, is_confirmed: bool
) -> dict[str, Any]:
    before = _stored(store, key)
    # Nobody is asked about a command that will be refused.
    operator_outcome(decide(operator_trigger(command), before.condition), command, key, before)
    if not is_confirmed:
        _confirm(key, command, before)
    # Decided once more by the store: the record may have changed while somebody was thinking.
    decision = run_sync(store.operate(key, command))
    after = run_sync(store.read(key))
    operator_outcome(decision, command, key, after)
    return {
        "command": command.value,
        "decision": decision.value,
        "condition_before": before.condition.value,
        "record": None if after is None else inspection.record_json(after),
    }


def _report_done(key: Key, command: OperatorCommand, document: dict[str, Any]) -> None:
    if document["decision"] == Decision.CONFIRM.value:
        sys.stdout.write(f"nothing to do: {output.safe(str(key))} has expired already\n")
    else:
        sys.stdout.write(
            f"{_DONE[command]} {output.safe(str(key))}; it was {document['condition_before']}\n"
        )


def _confirm(key: Key, command: OperatorCommand, stored: StoredKey) -> None:
    if not sys.stdin.isatty():
        raise usage(f"there is no terminal to ask on: add --yes to {command.value} the key")
    output.note(
        f"{key} is {stored.condition.value} (attempt {stored.record.attempt}, "
        f"{inspection.time_left_text(stored)}); after this, {_CONSEQUENCES[command]}."
    )
    if not typer.confirm(f"{command.value.capitalize()} it?", err=True):
        raise Problem("Declined", "nothing was changed", ExitCode.REFUSED)
