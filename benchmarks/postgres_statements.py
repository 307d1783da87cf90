"""What people write by hand on retrysafe's tables: a claim and a completion, alone or merged."""

from __future__ import annotations

BODY = "x" * 500

_NOW = "(SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint AS now_ms) AS c"


def _claim(row: str, source: str) -> str:
    digest, key, token = row.split(", ")
    return f"""
INSERT INTO {{schema}}.keys AS k (
    digest, caller, key, operation, rule, fingerprint, state, token, attempt,
    first_claimed_at_ms, claimed_at_ms, lease_ends_at_ms, owner
) SELECT {digest}, '', {key}, 'benchmarks.operation', 1, {digest}, 1, {token}, 1,
    c.now_ms, c.now_ms, c.now_ms + 30000, 'host:1'
FROM {_NOW}{source}
ON CONFLICT (digest) DO NOTHING RETURNING k.token"""


def _complete(rows: str) -> str:
    return f"""
WITH settled AS (
    UPDATE {{schema}}.keys AS k SET state = 2, settled_at_ms = c.now_ms,
        expires_at_ms = c.now_ms + 86400000, audit_ends_at_ms = c.now_ms + 2592000000::bigint
    FROM {_NOW}, {rows} AS w (digest, token, body)
    WHERE k.digest = w.digest AND k.token = w.token AND k.state = 1
    RETURNING k.digest, k.token, attempt, state, settled_at_ms, audit_ends_at_ms, w.body
), stored AS (
    INSERT INTO {{schema}}.outcomes (
        digest, token, attempt, state, form, head, body, settled_at_ms, audit_ends_at_ms
    ) SELECT digest, token, attempt, state, 'json.1', '', body, settled_at_ms, audit_ends_at_ms
    FROM settled
) SELECT token FROM settled"""


CLAIM = _claim("$1, $2, $3", "")
CLAIMS = _claim(
    "w.digest, 'key', w.token", ", unnest($1::bytea[], $2::bytea[]) AS w (digest, token)"
)
COMPLETE = _complete("(SELECT $1::bytea, $2::bytea, $3::bytea)")
COMPLETES = _complete("unnest($1::bytea[], $2::bytea[], $3::bytea[])")
