-- Claims of keys: a batch, a single claim, and what replaces a record. Each statement is its own
-- transaction, correct under READ COMMITTED, and needs no session state: it works behind PgBouncer in
-- transaction mode. Time is the server's clock.
--
-- `commit` and `claim_one` spell out one cell of the core's table: a claim of a key that has no row is
-- admitted. Every other claim is decided in Python and comes here as a record to replace.

-- name: commit
-- Claims new keys and ends attempts, for a whole batch in one round trip and one flush of the WAL.
-- A key that has a row is skipped without a lock (the caller then reads it); an attempt whose token
-- no longer holds its key is skipped too. No key is in a batch twice. Rows come sorted by digest, so
-- two batches that insert the same keys wait for each other in the same order and cannot deadlock;
-- the endings come after all insertions, and no rival writes the rows of another owner's token.
-- A user's open transaction may have written a row of the batch. It is not waited for longer than the
-- lock's limit, which holds for this statement's transaction alone: then nothing has happened.
--
-- A claim's identities are its digest, its fingerprint and its token (16 bytes each) and the number
-- of its manner (1 byte): an operation, a rule, a lease and an owner, which many rows share. An
-- ending's are its digest, its token and the number of its way: a state, two windows, a form, and
-- whether nothing happened.
WITH clock AS MATERIALIZED (
    SELECT {now_ms} AS now_ms, set_config('lock_timeout', '{lock_wait}', true)
), claimed AS (
    INSERT INTO {schema}.keys AS k (
        digest, caller, key, operation, rule, fingerprint, state, token, attempt,
        first_claimed_at_ms, claimed_at_ms, lease_ends_at_ms, owner
    )
    SELECT
        substring(w.ids FROM 1 FOR 16), w.caller, w.key, ($4::text[])[w.manner],
        ($5::smallint[])[w.manner], substring(w.ids FROM 17 FOR 16), 1,
        substring(w.ids FROM 33 FOR 16), 1, c.now_ms, c.now_ms,
        c.now_ms + ($6::bigint[])[w.manner], ($7::text[])[w.manner]
    FROM clock AS c, (
        SELECT ids, caller, key, get_byte(ids, 48) + 1 AS manner
        FROM unnest($1::bytea[], $2::text[], $3::text[]) AS sent (ids, caller, key)
    ) AS w
    ON CONFLICT (digest) DO NOTHING
    RETURNING k.digest
), settled AS (
    UPDATE {schema}.keys AS k SET
        state = ($11::smallint[])[w.way],
        settled_at_ms = c.now_ms,
        expires_at_ms = c.now_ms + ($12::bigint[])[w.way],
        audit_ends_at_ms = c.now_ms + ($13::bigint[])[w.way],
        nothing_happened_token =
            CASE WHEN ($15::boolean[])[w.way] AND NOT k.is_uncertain THEN k.token END
    FROM clock AS c, (
        SELECT
            substring(ids FROM 1 FOR 16) AS digest, substring(ids FROM 17 FOR 16) AS token,
            get_byte(ids, 32) + 1 AS way, head, body
        FROM unnest($8::bytea[], $9::bytea[], $10::bytea[]) AS sent (ids, head, body)
    ) AS w
    WHERE k.digest = w.digest AND k.token = w.token AND k.state = 1
    RETURNING
        k.digest, k.token, k.attempt, k.state, ($14::text[])[w.way] AS form, w.head, w.body,
        k.settled_at_ms, k.audit_ends_at_ms
), stored AS (
    INSERT INTO {schema}.outcomes (
        digest, token, attempt, state, form, head, body, settled_at_ms, audit_ends_at_ms
    )
    SELECT digest, token, attempt, state, form, head, body, settled_at_ms, audit_ends_at_ms
    FROM settled
    WHERE form IS NOT NULL
)
SELECT
    c.now_ms,
    coalesce((SELECT string_agg(digest, '') FROM claimed), ''),
    coalesce((SELECT string_agg(digest, '') FROM settled), '')
FROM clock AS c;

-- name: claim_one
-- `commit` for a single claim, without arrays and without the other half of the statement: while
-- there is little to do most batches are of one row, and somebody waits for each of them.
INSERT INTO {schema}.keys AS k (
    digest, caller, key, operation, rule, fingerprint, state, token, attempt,
    first_claimed_at_ms, claimed_at_ms, lease_ends_at_ms, owner
)
SELECT
    $1::bytea, $2::text, $3::text, $4::text, $5::smallint, $6::bytea, 1, $7::bytea, 1,
    c.now_ms, c.now_ms, c.now_ms + $8::bigint, $9::text
FROM (
    SELECT {now_ms} AS now_ms, set_config('lock_timeout', '{lock_wait}', true) AS lock_wait
) AS c
WHERE c.lock_wait IS NOT NULL
ON CONFLICT (digest) DO NOTHING
RETURNING k.claimed_at_ms;

-- name: replace_record
-- Writes a decided transition, if the row is still the one that the decision was made from: the
-- token, the state and the instants together change with every transition. A lease may have been
-- renewed beside its row after that was read, and the snapshot of this statement need not show it. So
-- whoever takes a pending row away writes there as well: an INSERT that meets a row looks at its
-- newest version, waits for one that is being written, and fails with 40001 on an older snapshot. If
-- it finds a later end than the one that was read, nothing is replaced. The lock on the key's row
-- keeps renewals out from here on.
-- A new life of the key drops the steps and the arguments of the earlier one in the same transaction,
-- and a corrected request those of the one before it. Arguments that come along are kept with it,
-- unless this life has some. That nothing happened, and that no step is stored, is looked at again
-- here, where the row is locked. The store bounds the wait for a row that somebody's open transaction
-- has written; in a user's transaction the user's own bound holds.
WITH bound AS MATERIALIZED (
    SELECT CASE WHEN $23::text IS NOT NULL THEN set_config('lock_timeout', $23::text, true) END
), held AS MATERIALIZED (
    SELECT k.digest
    FROM bound, {schema}.keys AS k
    WHERE k.digest = $13 AND k.token = $14 AND k.state = $15::smallint AND k.attempt = $16
        AND k.lease_ends_at_ms <= $17 AND k.expires_at_ms IS NOT DISTINCT FROM $18::bigint
        AND {nothing_happened} = $28::boolean
    FOR UPDATE OF k
), fenced AS (
    INSERT INTO {schema}.renewals AS r (digest, token, lease_ends_at_ms)
    SELECT digest, $5, 0 FROM held WHERE $15::smallint = 1
    ON CONFLICT (digest) DO UPDATE SET token = excluded.token, lease_ends_at_ms = 0
    WHERE r.token <> $14 OR r.lease_ends_at_ms <= $17
    RETURNING r.digest
), allowed AS MATERIALIZED (
    SELECT digest FROM fenced
    UNION ALL
    SELECT digest FROM held WHERE $15::smallint <> 1
), replaced AS (
    UPDATE {schema}.keys AS k SET
        operation = $1, rule = $2, fingerprint = $3, state = $4::smallint, token = $5, attempt = $6,
        first_claimed_at_ms = $7, claimed_at_ms = $8, lease_ends_at_ms = $9, settled_at_ms = $10,
        expires_at_ms = $11, audit_ends_at_ms = CASE WHEN $4::smallint = 1 THEN NULL ELSE audit_ends_at_ms END,
        owner = $12, releases = $24, is_uncertain = $25::boolean,
        nothing_happened_token = CASE WHEN $26::boolean THEN $5 END, corrected_at_ms = $27::bigint
    FROM allowed AS a
    WHERE k.digest = a.digest
    RETURNING k.digest
), forgotten AS (
    DELETE FROM {schema}.steps WHERE $19::boolean AND digest IN (SELECT digest FROM replaced)
), dropped AS (
    DELETE FROM {schema}.arguments
    WHERE $19::boolean AND $20::text IS NULL AND digest IN (SELECT digest FROM replaced)
), kept AS (
    INSERT INTO {schema}.arguments AS a (digest, first_claimed_at_ms, form, head, body)
    SELECT digest, $7, $20::text, $21::bytea, $22::bytea FROM replaced WHERE $20::text IS NOT NULL
    ON CONFLICT (digest) DO UPDATE SET
        first_claimed_at_ms = excluded.first_claimed_at_ms,
        form = excluded.form, head = excluded.head, body = excluded.body
    WHERE $19::boolean OR a.first_claimed_at_ms <> excluded.first_claimed_at_ms
)
SELECT count(*) FROM replaced;

-- name: replace_records
-- Also as `replace_records_unlocked` and `replace_records_patiently`, see `statements` in schema.py.
-- `replace_record` for the claims of a batch: whatever becomes pending again, compared and replaced in
-- one round trip and one flush of the WAL. Rivals want the same rows, so each statement first locks
-- its own in the order of the digests, whatever the plan: they wait for each other and cannot
-- deadlock. A row that is no longer the one that the decision was made from is left out, also when it
-- changed during the wait, or was renewed beside. Claims that bring arguments are replaced one by one.
WITH bound AS MATERIALIZED (
    SELECT set_config('lock_timeout', '{lock_wait}', true)
), held AS MATERIALIZED (
    SELECT w.*
    FROM bound, unnest(
        $1::bytea[], $2::text[], $3::smallint[], $4::bytea[], $5::bytea[], $6::integer[], $7::bigint[],
        $8::bigint[], $9::bigint[], $10::text[], $11::boolean[],
        $12::bytea[], $13::smallint[], $14::integer[], $15::bigint[], $16::bigint[], $17::integer[],
        $18::boolean[], $19::bigint[], $20::boolean[]
    ) AS w (
        digest, operation, rule, fingerprint, token, attempt, first_claimed_at_ms,
        claimed_at_ms, lease_ends_at_ms, owner, is_new_request,
        old_token, old_state, old_attempt, old_lease_ends_at_ms, old_expires_at_ms, releases,
        is_uncertain, corrected_at_ms, old_nothing_happened
    )
    JOIN {schema}.keys AS k
        ON k.digest = w.digest AND k.token = w.old_token AND k.state = w.old_state
        AND k.attempt = w.old_attempt AND k.lease_ends_at_ms <= w.old_lease_ends_at_ms
        AND k.expires_at_ms IS NOT DISTINCT FROM w.old_expires_at_ms
        AND {nothing_happened} = w.old_nothing_happened
    ORDER BY k.digest
    FOR UPDATE OF k{skip_locked}
), fenced AS (
    INSERT INTO {schema}.renewals AS r (digest, token, lease_ends_at_ms)
    SELECT digest, token, 0 FROM held WHERE old_state = 1
    ON CONFLICT (digest) DO UPDATE SET token = excluded.token, lease_ends_at_ms = 0
    WHERE NOT EXISTS (
        SELECT 1 FROM held AS h
        WHERE h.digest = r.digest AND h.old_token = r.token
            AND h.old_lease_ends_at_ms < r.lease_ends_at_ms
    )
    RETURNING r.digest
), allowed AS MATERIALIZED (
    SELECT h.* FROM held AS h JOIN fenced AS f ON f.digest = h.digest
    UNION ALL
    SELECT h.* FROM held AS h WHERE h.old_state <> 1
), replaced AS (
    UPDATE {schema}.keys AS k SET
        operation = h.operation, rule = h.rule, fingerprint = h.fingerprint, state = 1,
        token = h.token, attempt = h.attempt, first_claimed_at_ms = h.first_claimed_at_ms,
        claimed_at_ms = h.claimed_at_ms, lease_ends_at_ms = h.lease_ends_at_ms,
        settled_at_ms = NULL, expires_at_ms = NULL, audit_ends_at_ms = NULL, owner = h.owner,
        releases = h.releases, is_uncertain = h.is_uncertain, nothing_happened_token = NULL,
        corrected_at_ms = h.corrected_at_ms
    FROM allowed AS h
    WHERE k.digest = h.digest
    RETURNING k.digest, h.is_new_request
), forgotten AS (
    DELETE FROM {schema}.steps
    WHERE digest IN (SELECT digest FROM replaced WHERE is_new_request)
), dropped AS (
    DELETE FROM {schema}.arguments
    WHERE digest IN (SELECT digest FROM replaced WHERE is_new_request)
)
SELECT coalesce(string_agg(digest, ''), '') FROM replaced;
