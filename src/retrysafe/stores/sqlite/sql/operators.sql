-- What operators did to keys.

-- name: insert_action
-- Keeps who changed a key by a command and why, in the transaction of the change.
INSERT INTO retrysafe_operator_actions (
    digest, caller, key, command, condition, attempt, operator, reason, acted_at_ms
) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: select_actions
-- What operators did to a key, oldest first.
SELECT command, condition, attempt, operator, reason, acted_at_ms
FROM retrysafe_operator_actions WHERE digest = ? AND caller = ? AND key = ? ORDER BY id;

-- name: delete_actions
-- Removes a bounded number of actions that were kept long enough; the oldest have the lowest numbers.
DELETE FROM retrysafe_operator_actions WHERE id IN (
    SELECT id FROM retrysafe_operator_actions ORDER BY id LIMIT :limit
) AND acted_at_ms <= :past_ms;

-- name: select_actions_between
-- What operators did between two instants, by their numbers.
SELECT id, caller, key, command, condition, attempt, operator, reason, acted_at_ms
FROM retrysafe_operator_actions
WHERE id > :after AND acted_at_ms >= :first_ms AND acted_at_ms < :past_ms
ORDER BY id LIMIT :limit;
