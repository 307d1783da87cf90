-- Steps of operations. What is written relies on the write lock of BEGIN IMMEDIATE.

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
