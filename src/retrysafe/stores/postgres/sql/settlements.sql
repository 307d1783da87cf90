-- Endings of attempts, one at a time; those of a batch are in `commit`, beside its claims (claims.sql).
-- Each statement is its own transaction, correct under READ COMMITTED. Time is the server's clock.
--
-- Like `commit`, it spells out one cell of the core's table: an ending whose token holds a pending row is
-- applied. Every other ending is decided in Python.

-- name: settle_one
-- `commit` for a single ending that has an outcome, as `claim_one` is for a single claim.
WITH settled AS (
    UPDATE {schema}.keys AS k SET
        state = $3::smallint,
        settled_at_ms = c.now_ms,
        expires_at_ms = c.now_ms + $4::bigint,
        audit_ends_at_ms = c.now_ms + $5::bigint,
        nothing_happened_token = CASE WHEN $9::boolean AND NOT k.is_uncertain THEN k.token END
    FROM (
        SELECT {now_ms} AS now_ms, set_config('lock_timeout', '{lock_wait}', true) AS lock_wait
    ) AS c
    WHERE k.digest = $1::bytea AND k.token = $2::bytea AND k.state = 1 AND c.lock_wait IS NOT NULL
    RETURNING k.digest, k.token, k.attempt, k.state, k.settled_at_ms, k.audit_ends_at_ms
)
INSERT INTO {schema}.outcomes (
    digest, token, attempt, state, form, head, body, settled_at_ms, audit_ends_at_ms
)
SELECT
    digest, token, attempt, state, $6::text, $7::bytea, $8::bytea, settled_at_ms, audit_ends_at_ms
FROM settled
RETURNING settled_at_ms;
