"""`retrysafe keys`: look at records, at one or at many."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer
from rich.console import Group

from retrysafe import inspection
from retrysafe.cli import key_filters, key_output, options, output
from retrysafe.cli.problems import ExitCode, Problem
from retrysafe.core.keys.key import Key
from retrysafe.core.listing import Position, RecordPage
from retrysafe.core.machine import how_far
from retrysafe.core.model import Condition, OperatorAction, StoredKey, StoredOutcome
from retrysafe.core.ports import Store
from retrysafe.runtime.drive import run_sync
from retrysafe.stores.audit import Audited

app = typer.Typer(help="Look at keys, and release or expire them.", rich_markup_mode="rich")


@app.command("list")
@options.examples(
    "retrysafe keys list --store sqlite:///app.db",
    "retrysafe keys list --condition running --condition abandoned",
    "retrysafe keys list --operation charge --older-than 1h --limit 500 --json",
)
def list_keys(
    context: typer.Context,
    store: options.StoreUrl = None,
    caller: key_filters.CallerFilter = None,
    bearer: key_filters.BearerFilter = None,
    api_key: key_filters.ApiKeyFilter = None,
    is_global: key_filters.GlobalFilter = False,
    prefix: key_filters.PrefixFilter = "",
    operation: key_filters.OperationFilter = None,
    condition: key_filters.ConditionFilter = None,
    older_than: key_filters.OlderThan = None,
    newer_than: key_filters.NewerThan = None,
    after: Annotated[
        str | None,
        typer.Option(
            "--after",
            metavar="POSITION",
            help="Go on behind a page: with what it said at its end.",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[
        int, typer.Option("--limit", min=1, max=100_000, help="How many keys to show at most.")
    ] = 50,
    within: options.Within = options.SEARCH_SECONDS,
    busy_timeout: options.BusyTimeout = options.BUSY_SECONDS,
    as_json: options.AsJson = False,
) -> None:
    """List keys, newest claim first.

    Filters combine. A search that takes longer than --within ends there, and says what it has not
    seen and how to go on.
    """
    filters = key_filters.Filters(
        caller, bearer, api_key, is_global, prefix, operation, condition, older_than, newer_than
    )
    # One more tells whether there are more than can be shown.
    queries = filters.queries(limit + 1, key_filters.chosen_position(after), within or None)
    with options.opened_store(store, busy_timeout) as opened:
        pages = [run_sync(opened.list_records(query)) for query in queries]
    page = pages[0]
    if len(pages) > 1:
        page = _joined(pages)
    shown, has_more = page.keys[:limit], len(page.keys) > limit
    follows = page.after
    if has_more:
        follows = Position(shown[-1].record.claimed_at_ms, shown[-1].record.digest)
    if options.is_json(context, as_json):
        output.write_json(
            {
                "keys": [inspection.record_json(item) for item in shown],
                "has_more": has_more,
                "after": None if follows is None else str(follows),
                "not_searched": page.unsearched or None,
            }
        )
        return
    _show_list(shown)
    if has_more:
        output.note(f"more than {limit} keys match: go on with --after {follows}, or filter")
    elif page.unsearched:
        on = f"go on with --after {follows}, or search" if follows else "search"
        output.note(f"not searched in {within:g} s: {page.unsearched}; {on} longer with --within")


def _joined(pages: list[RecordPage]) -> RecordPage:
    """The pages of a caller that is stored in several forms, as one."""
    found = [item for page in pages for item in page.keys]
    found.sort(key=lambda item: (-item.record.claimed_at_ms, item.record.digest))
    # What one search has reached, all have: it goes on from the latest end.
    ends = [page.after for page in pages if page.unsearched and page.after is not None]
    after = max(ends, default=None)
    if after is not None:
        found = [item for item in found if item.record.claimed_at_ms > after.claimed_at_ms]
    unsearched = next((page.unsearched for page in pages if page.unsearched), "")
    return RecordPage(found, after, unsearched)


def _show_list(shown: list[StoredKey]) -> None:
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
    within: options.Within = options.SEARCH_SECONDS,
    busy_timeout: options.BusyTimeout = options.BUSY_SECONDS,
    as_json: options.AsJson = False,
) -> None:
    """Show one key: its record, its finished steps, what operators did, and every stored outcome.

    Of a key that a sweep has removed, the outcomes are shown until their audit window ends.
    """
    named = options.chosen_keys(key, caller, bearer, api_key, is_global)
    with options.opened_store(store, busy_timeout) as opened:
        wanted = stored_keys(opened, named)[0]
        stored = run_sync(opened.read(wanted))
        found, unsearched = _audit(opened, wanted, within)
        for form in named if stored is None and not found.outcomes else ():
            found, unsearched = _audit(opened, form, within)
            wanted = form
            if found.outcomes:
                break
    if stored is None and not (found.outcomes or found.actions):
        raise unknown(wanted)
    if stored is None:
        document = inspection.past_json(wanted, found.outcomes)
    else:
        # The standing outcome is known by its number, also where the search did not get to it.
        standing = [item for item in stored.outcomes if item not in found.outcomes]
        found.outcomes = stored.outcomes = found.outcomes + standing
        document = inspection.detail_json(stored)
    document["actions"] = [inspection.action_json(item) for item in found.actions]
    document["not_searched"] = unsearched or None
    if options.is_json(context, as_json):
        output.write_json(document)
        return
    if stored is None:
        shown = key_output.past(wanted, document)
    else:
        shown = key_output.detail(stored, document)
    shown += key_output.actions(document)
    output.console().print(Group(*shown, *key_output.endings(document, found.outcomes)))
    if unsearched:
        output.note(f"not searched in {within:g} s: {unsearched}; search longer with --within")


@dataclass(slots=True)
class _Audit:
    outcomes: list[StoredOutcome]
    actions: list[OperatorAction]


def _audit(store: Store, key: Key, within: float) -> tuple[_Audit, str]:
    assert isinstance(store, Audited)  # As all are that outlive their process.
    outcomes, unsearched = run_sync(store.read_audit(key, within or None))
    return _Audit(outcomes, run_sync(store.read_actions(key))), unsearched


def unknown(key: Key) -> Problem:
    """There is nothing of that key."""
    return Problem(
        "KeyUnknown",
        f"there is no record of {key}: check the key and the caller",
        ExitCode.REFUSED,
    )


def stored_keys(store: Store, named: list[Key]) -> list[Key]:
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
