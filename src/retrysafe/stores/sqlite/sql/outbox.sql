-- The statements of the outbox. Those that write rely on BEGIN IMMEDIATE, or on the write lock that
-- a user's transaction has taken before.

-- name: insert_entry
-- Stages one entry in the transaction that settles its operation, or in the user's own.
INSERT INTO retrysafe_outbox (
    entry_key, topic, aggregate, content_type, body, caller, origin, due_at_ms, staged_at_ms
) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: free_entries
-- Due entries without an aggregate, the longest due first. Reads without a lock: claiming checks
-- again.
SELECT id, open_try FROM retrysafe_outbox
WHERE aggregate IS NULL AND state = 1 AND due_at_ms <= ?
ORDER BY due_at_ms, id LIMIT ?;

-- name: heads
-- The first entry of each aggregate that is not over, for a bounded number of aggregates. Jumps from
-- one aggregate to the next in the index; the entries behind a head are never read.
WITH RECURSIVE walk (aggregate, id, visited) AS (
    SELECT * FROM (
        SELECT aggregate, id, 1 FROM retrysafe_outbox
        WHERE aggregate IS NOT NULL AND state <= 2 AND aggregate > :after
            AND (state = 1 OR :dead_blocks)
        ORDER BY aggregate, id LIMIT 1
    )
    UNION ALL
    SELECT next.aggregate, next.id, walk.visited + 1
    FROM walk JOIN retrysafe_outbox AS next ON next.id = (
        SELECT o.id FROM retrysafe_outbox AS o
        WHERE o.aggregate IS NOT NULL AND o.state <= 2 AND o.aggregate > walk.aggregate
            AND (o.state = 1 OR :dead_blocks)
        ORDER BY o.aggregate, o.id LIMIT 1
    )
    WHERE walk.visited < :visits
)
SELECT walk.aggregate, o.id, o.open_try, o.state = 1 AND o.due_at_ms <= :now_ms
FROM walk JOIN retrysafe_outbox AS o ON o.id = walk.id
ORDER BY walk.visited;

-- name: claim_entries
-- Takes the chosen entries that are still due. They were chosen without a lock, and whatever was a
-- head then is a head now or is over: an earlier entry never comes back. The first ones
-- without an open try begin at once; one of which a try was left open since the look is left to the
-- next one.
UPDATE retrysafe_outbox SET
    token = :token,
    due_at_ms = :lease_ends_at_ms,
    attempts = attempts + (open_try = 0 AND id <= :begins_to),
    open_try = CASE WHEN open_try = 0 AND id <= :begins_to THEN 1 ELSE open_try END
WHERE id IN (SELECT value FROM json_each(:ids)) AND state = 1 AND due_at_ms <= :now_ms
    AND (open_try = 0 OR id IN (SELECT value FROM json_each(:suspects)))
RETURNING
    id, entry_key, topic, aggregate, content_type, body, caller, origin, state, token, attempts,
    due_at_ms, staged_at_ms, settled_at_ms, expires_at_ms, last_error, open_try;

-- name: settle_entry
-- Writes what became of a delivery, if the token is still the entry's.
UPDATE retrysafe_outbox SET
    state = :state,
    token = NULL,
    attempts = coalesce(:attempts, attempts),
    open_try = :open_try,
    due_at_ms = CASE WHEN :state = 1 THEN :now_ms + :wait_ms ELSE due_at_ms END,
    settled_at_ms = CASE WHEN :state = 1 THEN NULL ELSE :now_ms END,
    expires_at_ms = CASE WHEN :state = 3 THEN :now_ms + :keep_ms END,
    last_error = coalesce(:error, last_error)
WHERE id = :id AND token = :token AND state = 1;

-- name: begin_entry
-- Counts a try before its delivery begins and extends the lease, if the token is still the entry's.
UPDATE retrysafe_outbox SET
    attempts = :attempt, open_try = :open_try, due_at_ms = max(due_at_ms, :lease_ends_at_ms)
WHERE id = :id AND token = :token AND state = 1;

-- name: extend_entry
-- Extends a lease, if the token is still the entry's; a lease never gets shorter.
UPDATE retrysafe_outbox SET due_at_ms = max(due_at_ms, ?)
WHERE id = ? AND token = ? AND state = 1;

-- name: select_entry
-- One entry, for a decision under the write lock or for an operator.
SELECT
    id, entry_key, topic, aggregate, content_type, body, caller, origin, state, token, attempts,
    due_at_ms, staged_at_ms, settled_at_ms, expires_at_ms, last_error, open_try
FROM retrysafe_outbox WHERE id = ?;

-- name: select_entries
-- Entries for an operator, newest first.
SELECT
    id, entry_key, topic, aggregate, content_type, body, caller, origin, state, token, attempts,
    due_at_ms, staged_at_ms, settled_at_ms, expires_at_ms, last_error, open_try
FROM retrysafe_outbox
WHERE (:topic IS NULL OR topic = :topic)
  AND (:aggregate IS NULL OR aggregate = :aggregate)
  AND (:any_condition OR (
    CASE
        WHEN state = 1 AND token IS NOT NULL AND due_at_ms > :now_ms THEN 'claimed'
        WHEN state = 1 THEN 'waiting'
        WHEN state = 2 THEN 'dead'
        WHEN state = 3 THEN 'delivered'
        ELSE 'discarded'
    END IN (SELECT value FROM json_each(:conditions))))
ORDER BY id DESC
LIMIT :limit;

-- name: update_entry
-- Writes an operator's decision; the write lock has kept the row as it was read.
UPDATE retrysafe_outbox SET
    state = ?, token = ?, attempts = ?, open_try = ?, due_at_ms = ?, settled_at_ms = ?,
    expires_at_ms = ?
WHERE id = ?;

-- name: delete_entries
-- Removes a bounded number of entries that are over and were kept long enough.
DELETE FROM retrysafe_outbox WHERE id IN (
    SELECT id FROM retrysafe_outbox WHERE expires_at_ms <= ? LIMIT ?
);
