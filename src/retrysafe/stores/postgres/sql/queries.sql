-- The statements of the PostgreSQL store on its own connections: claims, settlements, leases, steps,
-- reading, the sweep and the schema. Those of the outbox, of recovery, of atomic mode, of busy keys
-- and of printed migrations are in the files beside this one. All of them are correct under READ
-- COMMITTED with each statement its own transaction, so they need no session state and work behind
-- PgBouncer in transaction mode. Time is always the server's clock.

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

-- name: settle_one
-- The same for a single ending that has an outcome.
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

-- name: extend
-- Extends leases whose tokens still hold their keys; a lease never gets shorter. Rows that somebody
-- is writing at this moment are left out. Mostly they are being settled by this very owner, and
-- waiting for them while holding others could deadlock with that settlement, whose rows come in
-- another order. Or a user's open transaction has recorded a step: nobody takes over a locked row,
-- and the renewals of all other operations must not wait for that transaction.
WITH clock AS MATERIALIZED (
    SELECT {now_ms} AS now_ms
), held AS MATERIALIZED (
    SELECT k.digest, w.lease_ms
    FROM {schema}.keys AS k
    JOIN unnest($1::bytea[], $2::bytea[], $3::bigint[]) AS w (digest, token, lease_ms)
        ON k.digest = w.digest AND k.token = w.token
    WHERE k.state = 1
    FOR NO KEY UPDATE OF k SKIP LOCKED
)
UPDATE {schema}.keys AS k SET
    lease_ends_at_ms = greatest(k.lease_ends_at_ms, c.now_ms + h.lease_ms)
FROM clock AS c, held AS h
WHERE k.digest = h.digest
RETURNING k.digest, k.lease_ends_at_ms, k.lease_ends_at_ms - c.now_ms;

-- name: extend_beside
-- The same for leases whose operation writes in its user's transaction: it may have locked the row,
-- for longer than the lease lasts, and a transaction on a snapshot could not write a row that was
-- renewed since. So the row is not touched, and the renewal is written beside it. The weakest lock
-- goes along with whatever the user's transaction does to the row, and takeovers take the strongest:
-- while a renewal is being written nobody takes over, and while somebody takes over its row is left
-- out. So what is here of another token is of a claim that is over.
WITH clock AS MATERIALIZED (
    SELECT {now_ms} AS now_ms
), held AS MATERIALIZED (
    SELECT k.digest, k.token, k.lease_ends_at_ms, w.lease_ms
    FROM {schema}.keys AS k
    JOIN unnest($1::bytea[], $2::bytea[], $3::bigint[]) AS w (digest, token, lease_ms)
        ON k.digest = w.digest AND k.token = w.token
    WHERE k.state = 1
    ORDER BY k.digest
    FOR KEY SHARE OF k SKIP LOCKED
)
INSERT INTO {schema}.renewals AS r (digest, token, lease_ends_at_ms)
SELECT h.digest, h.token, greatest(h.lease_ends_at_ms, c.now_ms + h.lease_ms)
FROM clock AS c, held AS h
ON CONFLICT (digest) DO UPDATE SET
    token = excluded.token,
    lease_ends_at_ms = CASE
        WHEN r.token = excluded.token THEN greatest(r.lease_ends_at_ms, excluded.lease_ends_at_ms)
        ELSE excluded.lease_ends_at_ms
    END
RETURNING r.digest, r.lease_ends_at_ms, r.lease_ends_at_ms - (SELECT now_ms FROM clock);

-- name: read_records
-- The records of several keys, the instant they were read at, and the payloads to replay whose
-- audits end between the two given instants. By these bounds the server knows when the statement
-- starts which partitions it needs not read, where it would otherwise look into all of them.
SELECT
    (SELECT {now_ms}),
    k.digest, k.caller, k.key, k.operation, k.rule, k.fingerprint, k.state, k.token, k.attempt,
    k.first_claimed_at_ms, k.claimed_at_ms, k.lease_ends_at_ms, k.settled_at_ms, k.expires_at_ms,
    k.owner, k.releases, k.is_uncertain, {nothing_happened}, k.corrected_at_ms,
    k.audit_ends_at_ms, o.form, o.head, o.body
FROM {schema}.keys AS k
LEFT JOIN {schema}.outcomes AS o
    ON k.state IN (2, 3)
    AND o.audit_ends_at_ms = k.audit_ends_at_ms AND o.digest = k.digest AND o.token = k.token
    AND o.attempt = k.attempt AND o.audit_ends_at_ms BETWEEN $2::bigint AND $3::bigint
WHERE k.digest = ANY ($1::bytea[]);

-- name: read_renewals
-- What was renewed beside the rows of these keys, and for which claim. A statement of its own, so
-- that replays and running keys pay nothing for it.
SELECT digest, token, lease_ends_at_ms FROM {schema}.renewals WHERE digest = ANY ($1::bytea[]);

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

-- name: record_step
-- Stores a step's result while the token holds the key; the lock on the key's row makes a takeover
-- wait for it. The first result stands: says whether the key is held, and whether this is the first.
WITH held AS (
    SELECT digest FROM {schema}.keys
    WHERE digest = $1 AND token = $2 AND state = 1
    FOR NO KEY UPDATE
), stored AS (
    INSERT INTO {schema}.steps (digest, name, position, form, head, body, recorded_at_ms)
    SELECT digest, $3, $4, $5, $6, $7, {now_ms}
    FROM held
    ON CONFLICT (digest, name) DO NOTHING
    RETURNING name
)
SELECT (SELECT count(*) FROM held), (SELECT count(*) FROM stored);

-- name: has_step
-- Whether a step stands with this very result. Asked in a statement of its own: the one that records
-- it may have waited for the other result, which its snapshot does not show.
SELECT count(*) FROM {schema}.steps
WHERE digest = $1 AND name = $2 AND form = $3 AND head = $4 AND body = $5;

-- name: read_steps
-- The finished steps of a key in their order.
SELECT name, position, form, head, body FROM {schema}.steps WHERE digest = $1 ORDER BY position;

-- name: read_standing
-- The whole outcome that a replay gives, if the record is still that of the token.
SELECT
    o.token, o.attempt, o.state, o.form, o.head, o.body, o.settled_at_ms, o.audit_ends_at_ms
FROM {schema}.keys AS k
JOIN {schema}.outcomes AS o
    ON o.audit_ends_at_ms = k.audit_ends_at_ms AND o.digest = k.digest AND o.token = k.token
    AND o.attempt = k.attempt
WHERE k.digest = $1 AND k.token = $2 AND k.state IN (2, 3);

-- name: read_outcomes
-- The audit of a key, oldest first.
SELECT token, attempt, state, form, head, body, settled_at_ms, audit_ends_at_ms
FROM {schema}.outcomes WHERE digest = $1 ORDER BY settled_at_ms, attempt;

-- name: read_last_outcome
-- The newest ending of a key's present life, by the index of each partition.
SELECT
    o.token, o.attempt, o.state, o.form, o.head, o.body, o.settled_at_ms, o.audit_ends_at_ms
FROM {schema}.keys AS k
JOIN {schema}.outcomes AS o ON o.digest = k.digest AND o.settled_at_ms >= k.first_claimed_at_ms
WHERE k.digest = $1 AND k.caller = $2 AND k.key = $3
ORDER BY o.settled_at_ms DESC, o.attempt DESC
LIMIT 1;

-- name: list_records
-- Records for an operator. A scan on purpose: an index for it would cost every claim.
WITH clock AS MATERIALIZED (
    SELECT {now_ms} AS now_ms
)
SELECT
    c.now_ms, k.digest, k.caller, k.key, k.operation, k.rule, k.fingerprint, k.state, k.token,
    k.attempt, k.first_claimed_at_ms, k.claimed_at_ms, {lease_ends_at_ms}, k.settled_at_ms,
    k.expires_at_ms, k.owner, k.releases, k.is_uncertain, {nothing_happened}, k.corrected_at_ms
FROM {schema}.keys AS k, clock AS c
WHERE ($1::text IS NULL OR k.caller = $1)
  AND starts_with(k.key, $2)
  AND (cardinality($3::text[]) = 0 OR CASE
        WHEN k.state = 1 AND {lease_ends_at_ms} > c.now_ms THEN 'running'
        WHEN k.state = 1 THEN 'abandoned'
        WHEN k.expires_at_ms <= c.now_ms THEN 'outlived'
        WHEN k.state = 2 THEN 'succeeded'
        WHEN k.state = 3 THEN 'failed'
        ELSE 'released'
    END = ANY ($3::text[]))
ORDER BY k.claimed_at_ms DESC, k.digest
LIMIT $4;

-- name: table_pages
-- How many pages a search has to walk over.
SELECT (pg_relation_size('{schema}.keys') / current_setting('block_size')::bigint)::bigint;

-- name: abandoned_in_pages
-- Pending records whose lease has ended, in a range of pages. Reads without a lock; an index on the
-- lease would turn every renewal into a non-HOT update.
SELECT
    {now_ms}, k.digest, k.caller, k.key, k.operation, k.rule, k.fingerprint, k.state, k.token,
    k.attempt, k.first_claimed_at_ms, k.claimed_at_ms, {lease_ends_at_ms}, k.settled_at_ms,
    k.expires_at_ms, k.owner, k.releases, k.is_uncertain, {nothing_happened}, k.corrected_at_ms
FROM {schema}.keys AS k
WHERE k.ctid >= $1::text::tid AND k.ctid < $2::text::tid
    AND k.state = 1 AND k.lease_ends_at_ms <= (SELECT {now_ms})
    AND {lease_ends_at_ms} <= (SELECT {now_ms})
LIMIT $3;

-- name: sweep_pages
-- Removes outlived keys with their steps and arguments from a range of pages, and says how many keys,
-- from how many pages, the last of these, the pages of the whole table, and how many were chosen.
-- Rows that somebody else holds are left for the next pass; a pending record is never touched. What
-- was chosen is locked, so it is still outlived when it is deleted. One that was written after the
-- snapshot and is outlived all the same is chosen, but not removed.
WITH clock AS MATERIALIZED (
    SELECT {now_ms} AS now_ms
), outlived AS (
    SELECT k.ctid AS place FROM {schema}.keys AS k
    WHERE k.ctid >= $1::text::tid AND k.ctid < $2::text::tid
        AND k.state <> 1 AND k.expires_at_ms <= (SELECT now_ms FROM clock)
    LIMIT $3
    FOR UPDATE SKIP LOCKED
), removed AS (
    DELETE FROM {schema}.keys WHERE ctid = ANY (ARRAY(SELECT place FROM outlived))
    RETURNING digest, (ctid::text::point)[0]::bigint AS page
), forgotten AS (
    DELETE FROM {schema}.steps WHERE digest IN (SELECT digest FROM removed)
), dropped AS (
    DELETE FROM {schema}.arguments WHERE digest IN (SELECT digest FROM removed)
)
SELECT
    count(*), count(DISTINCT page), coalesce(max(page), 0),
    (pg_relation_size('{schema}.keys') / current_setting('block_size')::bigint)::bigint,
    (SELECT count(*) FROM outlived)
FROM removed;

-- name: sweep_renewals
-- Removes a bounded number of renewals whose instant is past: without them the lease has ended just
-- the same. One that is renewed in between is looked at again and stays.
WITH past AS (
    SELECT r.ctid AS place FROM {schema}.renewals AS r
    WHERE r.lease_ends_at_ms <= (SELECT {now_ms})
    LIMIT $1
    FOR UPDATE SKIP LOCKED
), removed AS (
    DELETE FROM {schema}.renewals WHERE ctid = ANY (ARRAY(SELECT place FROM past)) RETURNING 1
)
SELECT count(*) FROM removed;

-- name: sweep_default_outcomes
-- Removes a bounded number of outcomes past their audit window that have no partition of their own.
-- Two sweepers never wait for each other.
WITH past AS (
    SELECT ctid AS place FROM {schema}.outcomes_default
    WHERE audit_ends_at_ms <= {now_ms}
    LIMIT $1
    FOR UPDATE SKIP LOCKED
), removed AS (
    DELETE FROM {schema}.outcomes_default WHERE ctid = ANY (ARRAY(SELECT place FROM past)) RETURNING 1
)
SELECT count(*) FROM removed;

-- name: list_partitions
-- The partitions of the outcomes, without the default one.
SELECT c.relname FROM pg_inherits AS i
JOIN pg_class AS c ON c.oid = i.inhrelid
WHERE i.inhparent = '{schema}.outcomes'::regclass AND c.relname LIKE 'outcomes\_2%'
ORDER BY c.relname;

-- name: last_audit_day
-- The latest end of an audit window that has no partition, and whether the given instant or later
-- ones are in use at all. One probe of an index, and one row of the last partitions.
SELECT
    coalesce((SELECT max(audit_ends_at_ms) FROM {schema}.outcomes_default WHERE audit_ends_at_ms < $2), 0),
    EXISTS (SELECT 1 FROM {schema}.outcomes WHERE audit_ends_at_ms >= $1 AND audit_ends_at_ms < $2);

-- name: days_in_default
-- Which of these days have outcomes in the default partition; a day that has some cannot get a
-- partition until they are gone.
SELECT day FROM unnest($1::bigint[]) AS day
WHERE EXISTS (
    SELECT 1 FROM {schema}.outcomes_default
    WHERE audit_ends_at_ms >= day AND audit_ends_at_ms < day + 86400000
);

-- name: try_tending
-- One sweeper at a time makes and drops partitions; the lock ends with the transaction.
SELECT pg_try_advisory_xact_lock(hashtextextended('retrysafe partitions {schema}', 0));

-- name: has_partition
-- Whether it exists by now: a rival may have made or dropped it.
SELECT to_regclass($1) IS NOT NULL;

-- name: first_partitions
-- The partitions of the coming days, in the transaction that makes the table: by then nobody uses
-- it, so all locks are free.
DO $partitions$
DECLARE
    today bigint := {now_ms} / 86400000 * 86400000;
    day bigint;
    name text;
BEGIN
    FOR day IN SELECT generate_series(today, today + {horizon_days} * 86400000::bigint, 86400000) LOOP
        name := '{schema}.outcomes_' || to_char(to_timestamp(day / 1000) AT TIME ZONE 'UTC', 'YYYYMMDD');
        EXECUTE 'CREATE TABLE ' || name || ' (LIKE {schema}.outcomes INCLUDING ALL)';
        EXECUTE 'ALTER TABLE {schema}.outcomes ATTACH PARTITION ' || name
            || ' FOR VALUES FROM (' || day || ') TO (' || day + 86400000 || ')';
    END LOOP;
END
$partitions$;

-- name: now_ms
-- The server's clock.
SELECT {now_ms};

-- name: has_schema_table
-- Whether anything was ever applied here.
SELECT count(*) FROM pg_catalog.pg_tables WHERE schemaname = $1 AND tablename = 'schema_versions';

-- name: select_schema
-- What was applied here.
SELECT version, checksum, oldest_schema FROM {schema}.schema_versions ORDER BY version;

-- name: has_schema
-- Whether the schema is there; making it again would need a right on the database, even if it is.
SELECT count(*) FROM pg_catalog.pg_namespace WHERE nspname = $1;

-- name: create_schema_table
-- Remembers which migrations were applied; made under the migration lock.
CREATE TABLE IF NOT EXISTS {schema}.schema_versions (
    version integer NOT NULL PRIMARY KEY,
    name text NOT NULL,
    checksum text NOT NULL,
    oldest_schema integer NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- name: insert_schema
-- Notes a migration in the transaction that applied it.
INSERT INTO {schema}.schema_versions (version, name, checksum, oldest_schema)
VALUES ($1, $2, $3, $4);

-- name: read_settings
-- The settings that durability and cleanup rely on, as this session has them.
SELECT
    current_setting('server_version_num')::integer,
    current_setting('fsync'), current_setting('full_page_writes'),
    current_setting('synchronous_commit'), current_setting('autovacuum');

-- name: read_dead_host_settings
-- What ends the transaction of a host that died, as this session has it: in milliseconds, the
-- keepalives in seconds.
SELECT name, setting::bigint FROM pg_catalog.pg_settings
WHERE name IN (
    'idle_in_transaction_session_timeout', 'tcp_keepalives_idle', 'tcp_keepalives_interval',
    'tcp_keepalives_count', 'tcp_user_timeout', 'client_connection_check_interval'
);

-- name: read_replication
-- How many servers follow this one, and whether a commit waits for any of them. Who may not see what
-- a follower does is shown that it is there; backups are followers for as long as they take.
SELECT
    (SELECT count(*) FROM pg_catalog.pg_stat_replication
     WHERE coalesce(state, 'streaming') <> 'backup'),
    current_setting('synchronous_standby_names'), current_setting('synchronous_commit');

-- name: read_table_options
-- Which of the schema's tables would be emptied by a crash, or are never vacuumed.
SELECT
    n.nspname || '.' || c.relname,
    c.relpersistence = 'u',
    coalesce('autovacuum_enabled=false' = ANY (c.reloptions), false)
        OR coalesce('autovacuum_enabled=off' = ANY (c.reloptions), false)
FROM pg_catalog.pg_class AS c
JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
WHERE n.nspname = $1 AND c.relkind = 'r'
ORDER BY c.relname;
