"""PostgreSQL's own benchmark program as the baseline: the same rows without a line of Python."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

from tests.servers.postgres import embedded_binaries

BATCH = 64
_NOW = "(SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint AS now_ms) AS c"
_VARIABLES = """\
\\set a random(1, 9000000000000000000)
\\set b random(1, 9000000000000000000)
"""


def _claim(digest: str, token: str, source: str) -> str:
    return f"""
    INSERT INTO {{schema}}.keys AS k (
        digest, caller, key, operation, rule, fingerprint, state, token, attempt,
        first_claimed_at_ms, claimed_at_ms, lease_ends_at_ms, owner
    ) SELECT {digest}, '', 'key-' || :a, 'benchmarks.operation', 1, {token}, 1, {token}, 1,
        c.now_ms, c.now_ms, c.now_ms + 30000, 'host:1'
    FROM {_NOW}{source} ON CONFLICT (digest) DO NOTHING RETURNING k.token, k.lease_ends_at_ms"""


def _complete(rows: str) -> str:
    return f"""
    WITH settled AS (
        UPDATE {{schema}}.keys AS k SET state = 2, settled_at_ms = c.now_ms,
            expires_at_ms = c.now_ms + 86400000, audit_ends_at_ms = c.now_ms + 2592000000::bigint
        FROM {_NOW}, {rows} AS w
        WHERE k.digest = w.digest AND k.token = w.token AND k.state = 1
        RETURNING k.digest, k.token, attempt, state, settled_at_ms, audit_ends_at_ms
    ), stored AS (
        INSERT INTO {{schema}}.outcomes (
            digest, token, attempt, state, form, head, body, settled_at_ms, audit_ends_at_ms
        ) SELECT digest, token, attempt, state, 'json.1', '',
            convert_to(repeat('x', 500), 'UTF8'), settled_at_ms, audit_ends_at_ms
        FROM settled
    ) SELECT token FROM settled"""


def _script(*statements: str, variables: str = _VARIABLES) -> str:
    lines = [" ".join(statement.split()) for statement in statements]
    return variables + "".join(f"{line};\n" for line in lines)


def one_row(schema: str) -> str:
    """Claim, then complete, one row a transaction."""
    digest, token = "int8send(:a) || int8send(:b)", "int8send(:b) || int8send(:a)"
    rows = f"(SELECT {digest} AS digest, {token} AS token)"
    return _script(_claim(digest, token, ""), _complete(rows)).replace("{schema}", schema)


def merged(schema: str) -> str:
    """The same for a batch of rows a transaction: what merging can reach at best."""
    digest, token = "uuid_send(md5(:a || ':' || i)::uuid)", "int8send(:b) || int8send(i)"
    series = f"generate_series(1::bigint, {BATCH}) AS i"
    rows = f"(SELECT {digest} AS digest, {token} AS token FROM {series})"
    claim = _claim(digest, token, f", {series}")
    return _script(claim, _complete(rows)).replace("{schema}", schema)


def select(schema: str, keys: int) -> str:
    """One record by its primary key."""
    return _script(
        f"SELECT caller, key, fingerprint, state, token, attempt, expires_at_ms FROM {schema}.keys "
        "WHERE digest = uuid_send(md5('filled ' || :i)::uuid)",
        variables=f"\\set i random(1, {keys})\n",
    )


def run(url: str, script: str, *, clients: int, seconds: float) -> float:
    """Transactions of the whole script per second, with prepared statements."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "script.sql"
        path.write_text(script)
        done = subprocess.run(
            [
                embedded_binaries() / "pgbench",
                "--no-vacuum",
                "--protocol=prepared",
                f"--client={clients}",
                f"--jobs={min(clients, 2)}",
                f"--time={max(1, round(seconds))}",
                f"--file={path}",
                url,
            ],
            capture_output=True,
            text=True,
            check=False,
        )
    rate = re.search(r"tps = ([0-9.]+)", done.stdout)
    if done.returncode or rate is None:
        raise RuntimeError(f"pgbench failed: {done.stdout}{done.stderr}")
    return float(rate[1])
