-- Transactions of users, which hold the file's write lock themselves.

-- name: take_write_lock
-- Changes nothing, and makes a transaction that has only read so far the file's one writer.
UPDATE retrysafe_keys SET owner = owner WHERE 0;

-- name: count_outcomes
-- Whether the outcome of this token is there, as the connection sees it.
SELECT count(*) FROM retrysafe_keys AS k JOIN retrysafe_outcomes AS o ON o.id = k.outcome_id
WHERE k.digest = :digest AND o.token = :token AND k.token = :token AND k.state <> 1;
