-- The statements of recovery. Like the others they are correct under READ COMMITTED with each
-- statement its own transaction, and work behind PgBouncer. Time is always the server's clock.

-- name: claim_resumable
-- Claims new keys as `commit` does, each together with what its operation is called with. A
-- statement of its own, so that claims without arguments pay nothing for it. A row of arguments that
-- an earlier life has left behind is replaced.
WITH clock AS MATERIALIZED (
    SELECT {now_ms} AS now_ms, set_config('lock_timeout', '{lock_wait}', true)
), sent AS MATERIALIZED (
    SELECT * FROM unnest(
        $1::bytea[], $2::text[], $3::text[], $4::text[], $5::smallint[], $6::bytea[], $7::bytea[],
        $8::bigint[], $9::text[], $10::text[], $11::bytea[], $12::bytea[]
    ) AS w (
        digest, caller, key, operation, rule, fingerprint, token, lease_ms, owner, form, head, body
    )
), claimed AS (
    INSERT INTO {schema}.keys AS k (
        digest, caller, key, operation, rule, fingerprint, state, token, attempt,
        first_claimed_at_ms, claimed_at_ms, lease_ends_at_ms, owner
    )
    SELECT
        w.digest, w.caller, w.key, w.operation, w.rule, w.fingerprint, 1, w.token, 1,
        c.now_ms, c.now_ms, c.now_ms + w.lease_ms, w.owner
    FROM clock AS c, sent AS w
    ON CONFLICT (digest) DO NOTHING
    RETURNING k.digest, k.first_claimed_at_ms
), kept AS (
    INSERT INTO {schema}.arguments (digest, first_claimed_at_ms, form, head, body)
    SELECT n.digest, n.first_claimed_at_ms, w.form, w.head, w.body
    FROM claimed AS n JOIN sent AS w ON w.digest = n.digest
    ON CONFLICT (digest) DO UPDATE SET
        first_claimed_at_ms = excluded.first_claimed_at_ms,
        form = excluded.form, head = excluded.head, body = excluded.body
)
SELECT c.now_ms, coalesce((SELECT string_agg(digest, '') FROM claimed), '') FROM clock AS c;

-- name: read_arguments
-- What the operation of this life of the key was called with.
SELECT form, head, body FROM {schema}.arguments WHERE digest = $1 AND first_claimed_at_ms = $2;

-- name: list_resumable
-- Abandoned records of some operations that have arguments, by their digests. The table of arguments
-- is small, because the sweep removes those of operations that have ended; each of its rows is one
-- look at the keys. Arguments of operations that are not asked for are not sent.
SELECT
    {now_ms}, k.digest, k.caller, k.key, k.operation, k.rule, k.fingerprint, k.state, k.token,
    k.attempt, k.first_claimed_at_ms, k.claimed_at_ms, {lease_ends_at_ms}, k.settled_at_ms,
    k.expires_at_ms, k.owner, k.releases, k.is_uncertain, {nothing_happened}, k.corrected_at_ms,
    a.form, a.head, a.body
FROM {schema}.arguments AS a
JOIN {schema}.keys AS k ON k.digest = a.digest AND k.first_claimed_at_ms = a.first_claimed_at_ms
WHERE a.digest > $1 AND k.state = 1 AND k.lease_ends_at_ms <= (SELECT {now_ms})
  AND {lease_ends_at_ms} <= (SELECT {now_ms})
  AND k.operation = ANY($3::text[])
ORDER BY a.digest
LIMIT $2;

-- name: sweep_arguments
-- Removes a bounded number of arguments of operations that have ended for good, or whose life is
-- over. A released key keeps its own: the next attempt may be abandoned too. A row that belongs to a
-- new life by the time that it is deleted stays: its instant is another one. Rows that somebody is
-- writing are left for the next pass: an atomic run drops them in a transaction that may last.
WITH needless AS (
    SELECT a.digest, a.first_claimed_at_ms FROM {schema}.arguments AS a
    LEFT JOIN {schema}.keys AS k
        ON k.digest = a.digest AND k.first_claimed_at_ms = a.first_claimed_at_ms
    WHERE k.digest IS NULL OR k.state IN (2, 3)
    LIMIT $1
    FOR UPDATE OF a SKIP LOCKED
), removed AS (
    DELETE FROM {schema}.arguments AS a USING needless AS n
    WHERE a.digest = n.digest AND a.first_claimed_at_ms = n.first_claimed_at_ms
    RETURNING 1
)
SELECT count(*) FROM removed;
