-- The statements that run on a user's connection, inside the user's transaction. They are correct
-- under READ COMMITTED, REPEATABLE READ and SERIALIZABLE: under the last two a rival's commit shows
-- as SQLSTATE 40001. They leave nothing in the session. Time is always the server's clock.

-- name: database
-- Which database this is, and whether this role may ask for the identifier of its server: everybody
-- may unless that was revoked, and asking without the right would abort the transaction.
SELECT
    current_database(),
    has_function_privilege(to_regprocedure('pg_catalog.pg_control_system()'), 'EXECUTE');

-- name: system_identifier
-- Tells servers apart, whatever address they are reached by; the copies of one server share it.
SELECT system_identifier FROM pg_catalog.pg_control_system();

-- name: try_lock
-- Keeps other atomic runs off the key until the transaction, or the savepoint, is over. A lock of
-- the transaction works behind PgBouncer, and a process that dies gives it back.
SELECT pg_try_advisory_xact_lock($1::bigint);

-- name: wait_for_lock
-- The same, waiting as long as lock_timeout allows. The server wakes the waiters in their order,
-- and sees two transactions that wait for each other.
SELECT 1 FROM pg_advisory_xact_lock($1::bigint);

-- name: limit_lock_wait
-- Bounds the wait for a lock until the end of the transaction; the earlier bound comes back.
WITH earlier AS MATERIALIZED (
    SELECT current_setting('lock_timeout') AS bound
)
SELECT bound, set_config('lock_timeout', $1::text, true) FROM earlier;

-- name: restore_lock_wait
-- Gives the transaction its own bound back.
SELECT set_config('lock_timeout', $1::text, true);

-- name: insert_record
-- Claims a key that has no row; nothing comes back when there is one. The lock keeps rivals in other
-- transactions off, so this waits for no longer than a leased claim takes. A row that can be seen is
-- not run into: an INSERT waits for whoever is writing it, and that may be a leased attempt that
-- completes in a user's open transaction. Only under READ COMMITTED, though. On a snapshot it is the
-- INSERT that notices what others have committed since; and under SERIALIZABLE a look for a row that
-- is not there makes rivals of all keys on the same page of the index.
WITH clock AS MATERIALIZED (
    SELECT {now_ms} AS now_ms
)
INSERT INTO {schema}.keys AS k (
    digest, caller, key, operation, rule, fingerprint, state, token, attempt,
    first_claimed_at_ms, claimed_at_ms, lease_ends_at_ms, owner
)
SELECT
    $1::bytea, $2::text, $3::text, $4::text, $5::smallint, $6::bytea, 1, $7::bytea, 1,
    c.now_ms, c.now_ms, c.now_ms + $8::bigint, $9::text
FROM clock AS c
WHERE CASE
    WHEN current_setting('transaction_isolation') LIKE 'read %'
    THEN NOT EXISTS (SELECT 1 FROM {schema}.keys AS seen WHERE seen.digest = $1::bytea)
    ELSE true
END
ON CONFLICT (digest) DO NOTHING
RETURNING k.claimed_at_ms;

-- name: lock_record
-- Locks a key's row for the write that follows; nothing comes back while somebody else writes it.
SELECT 1 FROM {schema}.keys WHERE digest = $1::bytea FOR NO KEY UPDATE SKIP LOCKED;

-- name: isolation
-- Whether later statements see what others commit meanwhile.
SELECT current_setting('transaction_isolation');

-- name: settle_record
-- Ends the attempt if the token still holds the key, and stores its outcome. The row stays locked
-- until the transaction ends, so nobody takes over in between. Atomic runs find the key's lock shared
-- until then, and wait or give up as for each other; who has that lock at this moment is not waited
-- for. Comes back with the transaction's id, by which its fate is found out later.
WITH clock AS MATERIALIZED (
    SELECT {now_ms} AS now_ms
), settled AS (
    UPDATE {schema}.keys AS k SET
        state = $3::smallint,
        settled_at_ms = c.now_ms,
        expires_at_ms = c.now_ms + $4::bigint,
        audit_ends_at_ms = c.now_ms + $5::bigint,
        nothing_happened_token = CASE WHEN $10::boolean AND NOT k.is_uncertain THEN k.token END
    FROM clock AS c
    WHERE k.digest = $1::bytea AND k.token = $2::bytea AND k.state = 1
    RETURNING k.digest, k.token, k.attempt, k.state, k.settled_at_ms, k.audit_ends_at_ms
), stored AS (
    INSERT INTO {schema}.outcomes (
        digest, token, attempt, state, form, head, body, settled_at_ms, audit_ends_at_ms
    )
    SELECT
        digest, token, attempt, state, $6::text, $7::bytea, $8::bytea, settled_at_ms, audit_ends_at_ms
    FROM settled
), dropped AS (
    DELETE FROM {schema}.arguments
    WHERE $11::boolean AND digest IN (SELECT digest FROM settled)
)
SELECT pg_current_xact_id()::text, pg_try_advisory_xact_lock_shared($9::bigint) FROM settled;

-- name: record_step_joined
-- Records a step while the token holds the key. The row stays locked until the transaction ends, so
-- nobody takes over in between; renewals pass over it, and atomic runs find the key's lock shared.
-- Comes back with the transaction's id, and with nothing when the step is recorded already: then the
-- user's transaction repeats what it stands for.
WITH held AS (
    SELECT digest FROM {schema}.keys
    WHERE digest = $1::bytea AND token = $2::bytea AND state = 1
    FOR NO KEY UPDATE
), stored AS (
    INSERT INTO {schema}.steps (digest, name, position, form, head, body, recorded_at_ms)
    SELECT digest, $3::text, $4::integer, $5::text, $6::bytea, $7::bytea, {now_ms}
    FROM held
    ON CONFLICT (digest, name) DO NOTHING
    RETURNING digest
)
SELECT pg_current_xact_id()::text, pg_try_advisory_xact_lock_shared($8::bigint) FROM stored;

-- name: transaction_status
-- Runs on the store's own connection: whether a transaction is still open.
SELECT pg_xact_status($1::text::xid8);

-- name: count_outcomes
-- Runs on the store's own connection: whether the outcome of this token is committed. The audit is
-- asked and not the record, because somebody may have taken over since. A standby that a pooler leads
-- to may not know of it yet.
SELECT count(*), pg_is_in_recovery() FROM {schema}.outcomes
WHERE digest = $1::bytea AND token = $2::bytea AND state = $3::smallint;

-- name: count_steps
-- Runs on the store's own connection: whether a step is committed, and whether a standby says so.
SELECT count(*), pg_is_in_recovery() FROM {schema}.steps WHERE digest = $1::bytea AND name = $2::text;
