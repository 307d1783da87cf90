-- What operators did to keys.

-- name: keep_action
-- Keeps who changed a key by a command and why, in the transaction of the change.
INSERT INTO {schema}.operator_actions (
    digest, caller, key, command, condition, attempt, operator, reason, acted_at_ms
) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9);

-- name: read_actions
-- What operators did to a key, oldest first.
SELECT command, condition, attempt, operator, reason, acted_at_ms
FROM {schema}.operator_actions WHERE digest = $1 AND caller = $2 AND key = $3 ORDER BY id;

-- name: sweep_actions
-- Removes a bounded number of actions that were kept long enough; the oldest have the lowest numbers.
-- Two sweepers never wait for each other.
WITH oldest AS (
    SELECT id FROM {schema}.operator_actions ORDER BY id LIMIT $1 FOR UPDATE SKIP LOCKED
), removed AS (
    DELETE FROM {schema}.operator_actions
    WHERE id IN (SELECT id FROM oldest) AND acted_at_ms <= {now_ms} - $2::bigint
    RETURNING 1
)
SELECT count(*) FROM removed;

-- name: actions_between
-- What operators did between two instants, by their numbers.
SELECT id, caller, key, command, condition, attempt, operator, reason, acted_at_ms
FROM {schema}.operator_actions
WHERE acted_at_ms >= $1::bigint AND acted_at_ms < $2::bigint AND id > $3::bigint
ORDER BY id LIMIT $4::bigint;
