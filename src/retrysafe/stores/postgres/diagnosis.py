"""A look at the server's settings: what would make claims forgettable, slow or impossible.

Owns the sentences and what they are judged by. It changes nothing and needs no rights beyond those
of a worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from retrysafe.errors import SchemaMissing, StoreError, StoreNotWritable
from retrysafe.stores.diagnosis import Finding
from retrysafe.stores.migrations import Migration
from retrysafe.stores.postgres.partitions import DAY_MS, partition_name

# The tests do not run on older servers.
OLDEST_VERSION: Final = 15
# Outcomes of the default audit window and a little more; later days are made by the next sweep.
_DAYS_AHEAD: Final = 31
# What is noticed later than this is worth a word: leases are mostly shorter.
_DEAD_HOST_NOTED_MS: Final = 120_000
# For so long Linux sends an answer again that nobody acknowledges (tcp_retries2), and no probes
# meanwhile, unless tcp_user_timeout ends it.
_SENT_AGAIN_MS: Final = 924_000
# Network and rounding; nothing is decided by the difference.
_SKEW_NOTED_MS: Final = 1_000

# Those that no migration builds where the table is large: it would keep writers out.
_BUILT_LATER: Final = {
    "keys_claimed": "keys USING brin (claimed_at_ms) WITH (pages_per_range = 64)",
    "outbox_dead": "outbox (id) WHERE state = 2",
}

POOLER: Final = Finding(
    "A pooler such as PgBouncer stands in front of the server, and prepared statements are on: in "
    "transaction mode another connection does not know them. Add ?prepared=off to the URL.",
    mend="add ?prepared=off to the URL of the store",
)


def not_writable(error: StoreNotWritable) -> Finding:
    """What a store is of no use for."""
    return Finding(
        f"{error}. Every claim is a write: let the URL lead to the primary, or list all servers in "
        "it. If this one is the primary, look for default_transaction_read_only."
    )


def settings_findings(row: Sequence[Any]) -> list[Finding]:
    """What the server's settings mean for a store of claims."""
    version, fsync, full_page_writes, synchronous_commit, autovacuum = row
    found = []
    if version // 10_000 < OLDEST_VERSION:
        found.append(
            Finding(
                f"PostgreSQL {version // 10_000} is too old: retrysafe is tested from "
                f"{OLDEST_VERSION} up. Upgrade the server."
            )
        )
    if fsync == "off":
        found.append(
            Finding(
                "fsync is off: a crash of the machine forgets claims whose effects have happened, "
                "and can damage the database. Set fsync = on.",
                mend="ALTER SYSTEM SET fsync = on; SELECT pg_reload_conf();",
            )
        )
    if full_page_writes == "off":
        found.append(
            Finding(
                "full_page_writes is off: a crash of the machine can damage pages. Set it on, "
                "unless the file system writes pages as a whole.",
                mend="ALTER SYSTEM SET full_page_writes = on; SELECT pg_reload_conf();",
            )
        )
    if synchronous_commit == "off":
        found.append(
            Finding(
                "synchronous_commit is off for this user and database: a crash of the server "
                "forgets claims whose effects have happened. Set it to on.",
                mend="ALTER ROLE CURRENT_USER SET synchronous_commit = on;",
            )
        )
    if autovacuum == "off":
        found.append(
            Finding(
                "autovacuum is off: the tables grow without end. Set autovacuum = on.",
                mend="ALTER SYSTEM SET autovacuum = on; SELECT pg_reload_conf();",
            )
        )
    return found


def dead_host_findings(settings: Mapping[str, int]) -> list[Finding]:
    """How long a key stays locked whose host died inside a transaction; only worth knowing.

    Such a host closes nothing. The server learns of it from a time limit alone, and until then the
    transaction holds the rows that it has written.
    """
    limits = (settings["idle_in_transaction_session_timeout"], _silence_noticed_ms(settings))
    noticed_ms = min((limit for limit in limits if limit), default=None)
    found = []
    if noticed_ms is None or noticed_ms > _DEAD_HOST_NOTED_MS:
        when = "never" if noticed_ms is None else f"after {noticed_ms // 60_000} minutes"
        found.append(
            Finding(
                "A host that dies inside a transaction keeps the keys locked that it was writing "
                f"there until the server gives the connection up: {when}. Set "
                "idle_in_transaction_session_timeout = '1min', longer than your transactions "
                "pause between two statements; or tcp_keepalives_idle = 30, "
                "tcp_keepalives_interval = 10 and tcp_user_timeout = '1min'.",
                is_problem=False,
                mend="ALTER SYSTEM SET idle_in_transaction_session_timeout = '1min'; "
                "SELECT pg_reload_conf();",
            )
        )
    if not settings["client_connection_check_interval"]:
        found.append(
            Finding(
                "client_connection_check_interval is 0: when a host closes its connection while a "
                "statement of its transaction runs or waits for a lock, the server notices after "
                "the statement. Set it to '10s'.",
                is_problem=False,
                mend="ALTER SYSTEM SET client_connection_check_interval = '10s'; "
                "SELECT pg_reload_conf();",
            )
        )
    return found


def _silence_noticed_ms(settings: Mapping[str, int]) -> int:
    """After how long a silent host is given up at the latest; 0 when there are no keepalives."""
    idle, interval = settings["tcp_keepalives_idle"], settings["tcp_keepalives_interval"]
    if not idle:
        return 0
    user_timeout_ms = settings["tcp_user_timeout"]
    if user_timeout_ms:
        # It takes the place of the count: Linux gives up with the first probe after that time.
        return max(user_timeout_ms, (idle + interval) * 1000)
    probed_ms = (idle + interval * settings["tcp_keepalives_count"]) * 1000
    return max(probed_ms, _SENT_AGAIN_MS)


def replication_findings(row: Sequence[Any]) -> list[Finding]:
    """Whether a standby that takes over would know all claims; only worth knowing.

    A server may be followed for reports alone, which nobody fails over to.
    """
    followers, synchronous_names, synchronous_commit = row
    if not followers or synchronous_commit == "off":
        return []  # Nobody takes over; or an outcome can be lost without that, as told elsewhere.
    if not synchronous_names:
        lack = "no commit waits for it (synchronous_standby_names is empty)"
    elif synchronous_commit == "local":
        lack = "commits of this user do not wait for it (synchronous_commit is local)"
    else:
        return []
    return [
        Finding(
            f"A standby follows this server, and {lack}: a failover to it forgets the last claims "
            "and outcomes, and their operations can run again. Set synchronous_standby_names, and "
            "synchronous_commit to on, if you fail over to it.",
            is_problem=False,
            mend="ALTER SYSTEM SET synchronous_standby_names = '*'; SELECT pg_reload_conf();",
        )
    ]


def table_findings(rows: Sequence[Sequence[Any]]) -> list[Finding]:
    """What the tables' own options mean."""
    found = []
    for name, is_unlogged, is_never_vacuumed in rows:
        if is_unlogged:
            found.append(
                Finding(
                    f"The table {name} is unlogged: a crash of the server empties it, and every "
                    f"operation could run again. Run ALTER TABLE {name} SET LOGGED.",
                    mend=f"ALTER TABLE {name} SET LOGGED;",
                )
            )
        if is_never_vacuumed:
            found.append(
                Finding(
                    f"autovacuum is off for the table {name}, which then grows without end. Run "
                    f"ALTER TABLE {name} RESET (autovacuum_enabled).",
                    mend=f"ALTER TABLE {name} RESET (autovacuum_enabled);",
                )
            )
    return found


def index_findings(existing: set[str], schema: str) -> list[Finding]:
    """Which indexes are still to be built, beside the work; only worth knowing."""
    found = []
    for name in _BUILT_LATER.keys() - existing:
        table, _, rest = _BUILT_LATER[name].partition(" ")
        drop = f"DROP INDEX IF EXISTS {schema}.{name};"
        build = f"CREATE INDEX CONCURRENTLY {name} ON {schema}.{table} {rest};"
        found.append(
            Finding(
                f"The index {name} is missing: the table {schema}.{table} was too large to be "
                "locked by a migration, and operators' lists and counts read all of it. Run, "
                f"outside of a transaction: {build}",
                is_problem=False,
                mend=f"{drop} {build}",
            )
        )
    return found


def schema_findings(pending: Sequence[Migration] | StoreError, schema: str) -> list[Finding]:
    """Whether the schema is there and is this release's."""
    if isinstance(pending, StoreError) and not isinstance(pending, SchemaMissing):
        return [Finding(f"{pending}.")]
    if not isinstance(pending, SchemaMissing) and not pending:
        return []
    return [
        Finding(
            f"The schema {schema} is missing or not up to date. Run retrysafe migrate.",
            mend="retrysafe migrate",
        )
    ]


def partition_findings(existing: set[str], now_ms: int) -> list[Finding]:
    """Whether the coming days have partitions; without one, outcomes are removed row by row."""
    names = [partition_name(now_ms + number * DAY_MS) for number in range(_DAYS_AHEAD + 1)]
    missing = [name for name in names if name not in existing]
    if not missing:
        return []
    return [
        Finding(
            f"{len(missing)} of the coming {_DAYS_AHEAD + 1} days have no partition of outcomes "
            f"(the first is {missing[0]}): nobody has swept for some time. Run retrysafe sweep "
            "every day.",
            mend="retrysafe sweep",
        )
    ]


def clock_finding(server_ms: int, asked_ms: int, answered_ms: int) -> list[Finding]:
    """How far this host's clock is from the server's; only worth knowing."""
    skew_ms = server_ms - (asked_ms + answered_ms) // 2
    if abs(skew_ms) < _SKEW_NOTED_MS:
        return []
    direction = "ahead of" if skew_ms < 0 else "behind"
    return [
        Finding(
            f"This host's clock is {abs(skew_ms) / 1000:.1f} s {direction} the server's. Nothing "
            "is decided by it, but times in logs will not fit together.",
            is_problem=False,
            mend="timedatectl set-ntp true",
        )
    ]
