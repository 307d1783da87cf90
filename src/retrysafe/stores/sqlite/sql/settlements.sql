-- Endings of attempts.
-- They rely on BEGIN IMMEDIATE: the transaction holds the one write lock of the file from its first
-- statement on, so nothing changes between a read and the write that was decided by it.

-- name: count_held
-- How many of several keys their tokens still hold, and the next free id of an outcome. The write
-- lock keeps both true until the transaction ends.
SELECT
    (
        SELECT count(*)
        FROM (VALUES {rows:(?, ?)}) AS ended
        JOIN retrysafe_keys AS k ON k.digest = ended.column1
        WHERE k.token = ended.column2 AND k.state = 1
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
    state = ended.column1,
    settled_at_ms = ended.column2,
    expires_at_ms = ended.column3,
    outcome_id = ended.column4,
    nothing_happened_token = CASE WHEN ended.column5 AND NOT is_uncertain THEN token END
FROM (VALUES {rows:(?, ?, ?, ?, ?, ?)}) AS ended
WHERE retrysafe_keys.digest = ended.column6;

-- name: insert_outcomes
-- Stores the endings of attempts, in the transaction that settles their keys.
INSERT INTO retrysafe_outcomes (
    id, digest, token, attempt, state, form, head, body, settled_at_ms, audit_ends_at_ms
) SELECT
    ended.column1, k.digest, k.token, k.attempt, ended.column3, ended.column4, ended.column5,
    ended.column6, ended.column7, ended.column8
FROM (VALUES {rows:(?, ?, ?, ?, ?, ?, ?, ?)}) AS ended
JOIN retrysafe_keys AS k ON k.digest = ended.column2;
