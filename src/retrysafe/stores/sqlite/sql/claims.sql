-- Claims of keys.
-- They rely on BEGIN IMMEDIATE: the transaction holds the one write lock of the file from its first
-- statement on, so nothing changes between a read and the write that was decided by it.

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

-- name: select_existing
-- Which of several keys have a row.
SELECT digest FROM retrysafe_keys WHERE digest IN ({rows:?});

-- name: select_outcome
-- The payload to replay; the token must be the one of the attempt that settled the record.
SELECT o.form, o.head, o.body
FROM retrysafe_keys AS k
JOIN retrysafe_outcomes AS o ON o.id = k.outcome_id AND o.token = k.token
WHERE k.digest = ?;
