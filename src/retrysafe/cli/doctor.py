"""`retrysafe doctor`: what is wrong with a store, before it costs somebody money."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final

import typer

from retrysafe.cli import options, output
from retrysafe.cli.problems import ExitCode
from retrysafe.core.listing import RecordPage, RecordQuery
from retrysafe.core.model import Condition, StoredKey
from retrysafe.core.ports import Store
from retrysafe.core.settings import environment_secret, secrets_of
from retrysafe.core.size import Measurable, StoreSize
from retrysafe.figures import SAMPLE, quantile
from retrysafe.inspection import duration_text
from retrysafe.runtime.drive import run_sync
from retrysafe.stores.diagnosis import Checkup, Diagnosable, Finding
from retrysafe.stores.sampling import Sampled

# What the worker and the next call have not taken over by then, nobody will.
_ABANDONED_MS: Final = 15 * 60_000
# A sweep that is this far behind does not run.
_SWEEP_LAG_MS: Final = 6 * 3_600_000
# Clients back off for longer than this between two retries.
_SHORT_WINDOW_MS: Final = 60_000
# Fewer settled keys than this say nothing about an operation.
_ENOUGH: Final = 20


@options.examples(
    "retrysafe doctor --store sqlite:////var/lib/app/keys.db",
    "retrysafe doctor --store postgresql://app@db/app --json",
)
def doctor(
    context: typer.Context,
    store: options.StoreUrl = None,
    busy_timeout: options.BusyTimeout = options.BUSY_SECONDS,
    as_json: options.AsJson = False,
) -> None:
    """Look at a store, say what was checked and what would break a promise; exit 1 then.

    Settings, schema, partitions, pooler, time-outs, clock and autovacuum of PostgreSQL; schema,
    mode, access and file system of SQLite; abandoned keys, leases, windows, sweep and outbox of
    both; RETRYSAFE_SECRET of this environment. Each finding has what mends it. Changes nothing.
    Good at the start of a deployment, after migrate.
    """
    with options.opened_store(store, busy_timeout) as chosen:
        assert isinstance(chosen, Diagnosable)  # As all are that outlive their process.
        checkup = run_sync(chosen.check_up())
        if not any(item.is_problem for item in checkup.findings) or _has_schema(checkup):
            _check_keys(chosen, checkup)
    checkup.add("secret", _secret_findings())
    if options.is_json(context, as_json):
        output.write_json(_document(checkup))
    else:
        _show(checkup)
    if any(item.is_problem for item in checkup.findings):
        raise typer.Exit(ExitCode.REFUSED)


def _has_schema(checkup: Checkup) -> bool:
    """Whether keys can be asked for: nothing found would make that fail."""
    failed = {item.check for item in checkup.findings if item.is_problem}
    return "schema" in checkup.checked and not failed & {"schema", "access"}


def _document(checkup: Checkup) -> dict[str, Any]:
    return {
        "checked": checkup.checked,
        "findings": [
            {
                "check": item.check,
                "is_problem": item.is_problem,
                "text": item.text,
                "mend": item.mend or None,
            }
            for item in checkup.findings
        ],
        "problems": [item.text for item in checkup.findings if item.is_problem],
        "notes": [item.text for item in checkup.findings if not item.is_problem],
    }


def _show(checkup: Checkup) -> None:
    for item in checkup.findings:
        word = "problem" if item.is_problem else "note"
        output.line(output.safe(f"{word}: {item.text}"))
        if item.mend:
            output.line(output.safe(f"  mend: {item.mend}"))
    if not checkup.findings:
        output.line("nothing to complain about")
    output.line(f"checked: {', '.join(checkup.checked)}")


def _check_keys(store: Store, checkup: Checkup) -> None:
    """What the keys themselves say, as far as a second allows."""
    assert isinstance(store, Sampled)
    assert isinstance(store, Measurable)
    sample = run_sync(store.sample(SAMPLE))
    query = RecordQuery(
        conditions=frozenset({Condition.ABANDONED}), limit=SAMPLE, older_than_ms=None, seconds=0.2
    )
    checkup.add("abandoned keys", abandoned_findings(run_sync(store.list_records(query))))
    checkup.add("leases", lease_findings(sample))
    checkup.add("windows", window_findings(sample))
    checkup.add("sweep", sweep_findings(sample))
    checkup.add("outbox", outbox_findings(run_sync(store.measure())))


def abandoned_findings(page: RecordPage) -> list[Finding]:
    """Keys that nobody has taken over for long."""
    old = [
        item for item in page.keys if item.now_ms - item.record.lease_ends_at_ms >= _ABANDONED_MS
    ]
    if not old:
        return []
    seen = "" if not (page.unsearched or page.after) else "at least "
    return [
        Finding(
            f"{seen}{len(old):,} keys are abandoned for more than {duration_text(_ABANDONED_MS)}: "
            "no worker resumes them, and no client retries. Run a worker, or find out what was "
            "done and release them.",
            is_problem=False,
            mend="retrysafe keys list --condition abandoned --older-than 15m",
        )
    ]


def lease_findings(sample: Sequence[StoredKey]) -> list[Finding]:
    """Operations that are settled after their lease: a rival could have taken over."""
    settled: dict[str, list[StoredKey]] = defaultdict(list)
    for item in sample:
        if item.condition in (Condition.SUCCEEDED, Condition.FAILED):
            settled[item.record.operation].append(item)
    found = []
    for operation, items in sorted(settled.items()):
        late = [
            item
            for item in items
            if (item.record.settled_at_ms or 0) > item.record.lease_ends_at_ms
        ]
        if len(items) < _ENOUGH or len(late) * 100 < len(items):
            continue
        durations = [
            float((item.record.settled_at_ms or 0) - item.record.claimed_at_ms) for item in items
        ]
        usual = duration_text(int(quantile(durations, 0.95) or 0))
        found.append(
            Finding(
                f"{len(late)} of {len(items)} sampled keys of {operation or 'an operation'} were "
                f"settled after their lease had ended (95 % take up to {usual}): its processes "
                "stand still, or the store answers renewals too late, and a retry could have run "
                "the operation twice. Raise Policy(lease=…) above that time.",
                is_problem=False,
                mend=f"Policy(lease=…) of {operation or 'the operation'}, longer than {usual}",
            )
        )
    return found


def window_findings(sample: Sequence[StoredKey]) -> list[Finding]:
    """Outcomes that are forgotten while clients may still retry."""
    short: dict[str, int] = {}
    for item in sample:
        record = item.record
        if record.expires_at_ms is None or record.settled_at_ms is None:
            continue
        window_ms = record.expires_at_ms - record.settled_at_ms
        # What an operator expired has a window of nothing.
        if item.condition is not Condition.OUTLIVED and window_ms < _SHORT_WINDOW_MS:
            short[record.operation] = window_ms
    return [
        Finding(
            f"Outcomes of {operation or 'an operation'} are remembered for "
            f"{duration_text(window_ms)}: a client that retries later runs it again. Raise "
            "Policy(active_window=…) above the time for which clients retry.",
            is_problem=False,
            mend=f"Policy(active_window=timedelta(days=1)) of {operation or 'the operation'}",
        )
        for operation, window_ms in sorted(short.items())
    ]


def sweep_findings(sample: Sequence[StoredKey]) -> list[Finding]:
    """Whether somebody removes what is over."""
    late_ms = [
        item.now_ms - item.record.expires_at_ms
        for item in sample
        if item.condition is Condition.OUTLIVED and item.record.expires_at_ms is not None
    ]
    if max(late_ms, default=0) < _SWEEP_LAG_MS:
        return []
    return [
        Finding(
            f"{len(late_ms) / len(sample):.0%} of the sampled keys are past their window, by up to "
            f"{duration_text(max(late_ms))}: nobody sweeps, and the tables grow. Run a worker, or "
            "a sweeper as a service.",
            is_problem=False,
            mend="retrysafe sweep --forever",
        )
    ]


def outbox_findings(size: StoreSize) -> list[Finding]:
    """Entries that nobody will deliver."""
    if not size.outbox_dead:
        return []
    return [
        Finding(
            f"{size.outbox_dead:,} outbox entries are dead: they were given up, and hold back what "
            "is behind them in their aggregate.",
            is_problem=False,
            mend="retrysafe outbox list --state dead",
        )
    ]


def _secret_findings() -> list[Finding]:
    """What the secret of this environment says; raises `SecretMissing` for a short one."""
    secrets = secrets_of(environment_secret())
    if not secrets.listed:
        return [
            Finding(
                "RETRYSAFE_SECRET is not set here. An application without a secret stores "
                "fingerprints and callers as plain hashes, against which short tokens and small "
                "requests can be tried by who reads the store, and has no body or child keys",
                is_problem=False,
                mend="export RETRYSAFE_SECRET=$(openssl rand -hex 32)",
            )
        ]
    if len(secrets.listed) == 1 and not secrets.has_plain:
        return []
    return [
        Finding(
            "RETRYSAFE_SECRET lists several secrets: remove the old ones when the longest active "
            "window has passed since the last process without the first one ended",
            is_problem=False,
        )
    ]
