-- Steps of operations, on the store's own connections. Each statement is its own transaction, correct
-- under READ COMMITTED.

-- name: record_step
-- Stores a step's result while the token holds the key; the lock on the key's row makes a takeover
-- wait for it. The first result stands: says whether the key is held, and whether this is the first.
WITH held AS (
    SELECT digest FROM {schema}.keys
    WHERE digest = $1 AND token = $2 AND state = 1
    FOR NO KEY UPDATE
), stored AS (
    INSERT INTO {schema}.steps (digest, name, position, form, head, body, recorded_at_ms)
    SELECT digest, $3, $4, $5, $6, $7, {now_ms}
    FROM held
    ON CONFLICT (digest, name) DO NOTHING
    RETURNING name
)
SELECT (SELECT count(*) FROM held), (SELECT count(*) FROM stored);

-- name: has_step
-- Whether a step stands with this very result. Asked in a statement of its own: the one that records
-- it may have waited for the other result, which its snapshot does not show.
SELECT count(*) FROM {schema}.steps
WHERE digest = $1 AND name = $2 AND form = $3 AND head = $4 AND body = $5;

-- name: read_steps
-- The finished steps of a key in their order.
SELECT name, position, form, head, body FROM {schema}.steps WHERE digest = $1 ORDER BY position;
