-- Every statement of the SQLite store. Those that write rely on BEGIN IMMEDIATE: the transaction
-- holds the one write lock of the file from its first statement on, so nothing changes between a
-- read and the write that was decided by it.

-- name: insert_key
-- Claims a key that has no row, in one statement; zero rows mean that the row must be looked at.
INSERT INTO retrysafe_keys (
    digest, caller, key, operation, rule, fingerprint, state, token, attempt,
    first_claimed_at_ms, claimed_at_ms, lease_ends_at_ms, owner
) VALUES (?, ?, ?, ?, ?, ?, 1, ?, 1, ?, ?, ?, ?)
ON CONFLICT (digest) DO NOTHING;

-- name: insert_keys
-- Claims several keys that were just seen to have no row. Rows of zeros only fill up the statement.
INSERT INTO retrysafe_keys (
    digest, caller, key, operation, rule, fingerprint, state, token, attempt,
    first_claimed_at_ms, claimed_at_ms, lease_ends_at_ms, owner
) SELECT
    column1, column2, column3, column4, column5, column6, 1, column7, 1,
    column8, column9, column10, column11
FROM (VALUES {rows:(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)}) WHERE column1 <> 0;

-- name: select_key
-- One record, for a decision under the write lock or for an operator.
SELECT
    digest, caller, key, operation, rule, fingerprint, state, token, attempt,
    first_claimed_at_ms, claimed_at_ms, lease_ends_at_ms, settled_at_ms, expires_at_ms, owner,
    releases, is_uncertain, {nothing_happened}, corrected_at_ms
FROM retrysafe_keys AS k WHERE digest = ?;

-- name: select_existing
-- Which of several keys have a row.
SELECT digest FROM retrysafe_keys WHERE digest IN ({rows:?});

-- name: update_key
-- Writes a decided transition; the write lock has kept the row as it was read.
UPDATE retrysafe_keys SET
    operation = ?, rule = ?, fingerprint = ?, state = ?, token = ?, attempt = ?,
    first_claimed_at_ms = ?, claimed_at_ms = ?, lease_ends_at_ms = ?,
    settled_at_ms = ?, expires_at_ms = ?, owner = ?, releases = ?, is_uncertain = ?,
    nothing_happened_token = ?, corrected_at_ms = ?
WHERE digest = ?;

-- name: count_held
-- How many of several keys their tokens still hold, and the next free id of an outcome. The write
-- lock keeps both true until the transaction ends.
SELECT
    (
        SELECT count(*)
        FROM (VALUES {rows:(?, ?)}) AS wish
        JOIN retrysafe_keys AS k ON k.digest = wish.column1
        WHERE k.token = wish.column2 AND k.state = 1
    ),
    (SELECT coalesce(max(id), 0) + 1 FROM retrysafe_outcomes);

-- name: insert_outcome
-- Stores an ending if the token still holds the key; zero rows mean lost or already settled.
INSERT INTO retrysafe_outcomes (
    digest, token, attempt, state, form, head, body, settled_at_ms, audit_ends_at_ms
) SELECT digest, token, attempt, ?, ?, ?, ?, ?, ? FROM retrysafe_keys
WHERE digest = ? AND token = ? AND state = 1;

-- name: settle_key
-- Ends the attempt whose outcome was just stored; the write lock has kept the row as it was.
UPDATE retrysafe_keys SET
    state = ?, settled_at_ms = ?, expires_at_ms = ?, outcome_id = ?,
    nothing_happened_token = CASE WHEN ? AND NOT is_uncertain THEN token END
WHERE digest = ?;

-- name: settle_keys
-- The same for several keys that were just seen to be held.
UPDATE retrysafe_keys SET
    state = wish.column1,
    settled_at_ms = wish.column2,
    expires_at_ms = wish.column3,
    outcome_id = wish.column4,
    nothing_happened_token = CASE WHEN wish.column5 AND NOT is_uncertain THEN token END
FROM (VALUES {rows:(?, ?, ?, ?, ?, ?)}) AS wish
WHERE retrysafe_keys.digest = wish.column6;

-- name: insert_outcomes
-- Stores the endings of attempts, in the transaction that settles their keys.
INSERT INTO retrysafe_outcomes (
    id, digest, token, attempt, state, form, head, body, settled_at_ms, audit_ends_at_ms
) SELECT
    wish.column1, k.digest, k.token, k.attempt, wish.column3, wish.column4, wish.column5,
    wish.column6, wish.column7, wish.column8
FROM (VALUES {rows:(?, ?, ?, ?, ?, ?, ?, ?)}) AS wish
JOIN retrysafe_keys AS k ON k.digest = wish.column2;

-- name: select_outcome
-- The payload to replay; the token must be the one of the attempt that settled the record.
SELECT o.form, o.head, o.body
FROM retrysafe_keys AS k
JOIN retrysafe_outcomes AS o ON o.id = k.outcome_id AND o.token = k.token
WHERE k.digest = ?;

-- name: select_standing
-- The whole outcome that a replay gives, found by its id.
SELECT
    o.token, o.attempt, o.state, o.form, o.head, o.body, o.settled_at_ms, o.audit_ends_at_ms
FROM retrysafe_keys AS k
JOIN retrysafe_outcomes AS o ON o.id = k.outcome_id AND o.token = k.token
WHERE k.digest = ? AND k.state IN (2, 3);

-- name: select_outcomes
-- The audit of a key, oldest first. A scan on purpose: an index for it would cost every operation.
SELECT token, attempt, state, form, head, body, settled_at_ms, audit_ends_at_ms
FROM retrysafe_outcomes WHERE digest = ? ORDER BY id;

-- name: select_last_outcome
-- The newest ending of a key's present life. A claim leaves the id of the last one where it was, so
-- nothing is scanned; the sweep may have removed it, and its id may be of another key since.
SELECT
    o.token, o.attempt, o.state, o.form, o.head, o.body, o.settled_at_ms, o.audit_ends_at_ms
FROM retrysafe_keys AS k
JOIN retrysafe_outcomes AS o ON o.id = k.outcome_id AND o.digest = k.digest
WHERE k.digest = ? AND k.caller = ? AND k.key = ? AND o.settled_at_ms >= k.first_claimed_at_ms;

-- name: take_write_lock
-- Changes nothing, and makes a transaction that has only read so far the file's one writer.
UPDATE retrysafe_keys SET owner = owner WHERE 0;

-- name: count_outcomes
-- Whether the outcome of this token is there, as the connection sees it.
SELECT count(*) FROM retrysafe_keys AS k JOIN retrysafe_outcomes AS o ON o.id = k.outcome_id
WHERE k.digest = :digest AND o.token = :token AND k.token = :token AND k.state <> 1;

-- name: insert_step
-- A step's first result, which stands; under the write lock, nobody else records one meanwhile.
INSERT INTO retrysafe_steps (digest, name, position, form, head, body, recorded_at_ms)
VALUES (?, ?, ?, ?, ?, ?, ?);

-- name: select_step
-- The result of one step.
SELECT form, head, body FROM retrysafe_steps WHERE digest = ? AND name = ?;

-- name: select_steps
-- The finished steps of a key in their order.
SELECT name, position, form, head, body FROM retrysafe_steps WHERE digest = ? ORDER BY position;

-- name: count_steps
-- Whether a step is recorded, as the connection sees it.
SELECT count(*) FROM retrysafe_steps WHERE digest = ? AND name = ?;

-- name: delete_steps
-- Ends the steps of a key's earlier life, in the transaction that starts the new one.
DELETE FROM retrysafe_steps WHERE digest = ?;

-- name: select_keys
-- Records for an operator. A scan on purpose: an index for it would cost every claim.
SELECT
    digest, caller, key, operation, rule, fingerprint, state, token, attempt,
    first_claimed_at_ms, claimed_at_ms, lease_ends_at_ms, settled_at_ms, expires_at_ms, owner,
    releases, is_uncertain, {nothing_happened}, corrected_at_ms
FROM retrysafe_keys AS k
WHERE (:caller IS NULL OR caller = :caller)
  AND substr(key, 1, length(:prefix)) = :prefix
  AND (:any_condition OR (
    CASE
        WHEN state = 1 AND lease_ends_at_ms > :now_ms THEN 'running'
        WHEN state = 1 THEN 'abandoned'
        WHEN expires_at_ms <= :now_ms THEN 'outlived'
        WHEN state = 2 THEN 'succeeded'
        WHEN state = 3 THEN 'failed'
        ELSE 'released'
    END IN (SELECT value FROM json_each(:conditions))))
ORDER BY claimed_at_ms DESC, digest
LIMIT :limit;

-- name: create_schema_table
-- Remembers which migrations were applied; made by the first one under the write lock.
CREATE TABLE IF NOT EXISTS retrysafe_schema (
    version INTEGER NOT NULL PRIMARY KEY,
    name TEXT NOT NULL,
    checksum TEXT NOT NULL,
    oldest_schema INTEGER NOT NULL,
    applied_at_ms INTEGER NOT NULL
);

-- name: has_schema_table
-- Whether anything was ever applied here.
SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name = 'retrysafe_schema';

-- name: select_schema
-- What was applied here.
SELECT version, checksum, oldest_schema FROM retrysafe_schema ORDER BY version;

-- name: insert_schema
-- Notes a migration in the transaction that applied it.
INSERT INTO retrysafe_schema (version, name, checksum, oldest_schema, applied_at_ms)
VALUES (?, ?, ?, ?, ?);
