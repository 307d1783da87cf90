-- The statements of a batch that has met somebody else's open transaction. They run in one
-- transaction with what is then written, on a connection of the store; a transaction of its own works
-- behind PgBouncer. They are correct under READ COMMITTED.

-- name: skip_locked
-- Says which claims and endings wait for no user's transaction, and keeps them so until this
-- transaction ends. Kind 1 is a new key without an atomic run: the shared lock keeps such runs off,
-- and claims of others in. Kind 2 is a claim whose key has a row that is not pending; where it is
-- pending, somebody may be ending it. Kind 3 is an attempt whose row is locked for us now. Nothing
-- here waits.
WITH claims AS MATERIALIZED (
    SELECT w.digest, w.number, k.state
    FROM unnest($1::bytea[], $2::bigint[]) AS w (digest, number)
    LEFT JOIN {schema}.keys AS k ON k.digest = w.digest
), held AS MATERIALIZED (
    SELECT k.digest
    FROM {schema}.keys AS k
    JOIN unnest($3::bytea[], $4::bytea[]) AS w (digest, token)
        ON k.digest = w.digest AND k.token = w.token
    WHERE k.state = 1
    FOR NO KEY UPDATE OF k SKIP LOCKED
)
SELECT 1, digest FROM claims
WHERE CASE WHEN state IS NULL THEN pg_try_advisory_xact_lock_shared(number) ELSE false END
UNION ALL
SELECT 2, digest FROM claims WHERE state <> 1
UNION ALL
SELECT 3, digest FROM held;
