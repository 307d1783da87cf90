-- The statements of the outbox. Like the others they are correct under READ COMMITTED with each
-- statement its own transaction, and work behind PgBouncer. Time is always the server's clock.

-- name: settle_staged
-- Ends attempts, stages their entries and drops their arguments in the same transaction. As in the
-- statement for a whole batch, an attempt whose token no longer holds its key is skipped, and what
-- comes with it.
WITH clock AS MATERIALIZED (
    SELECT {now_ms} AS now_ms, set_config('lock_timeout', '{lock_wait}', true)
), settled AS (
    UPDATE {schema}.keys AS k SET
        state = w.state,
        settled_at_ms = c.now_ms,
        expires_at_ms = c.now_ms + w.active_ms,
        audit_ends_at_ms = c.now_ms + w.audit_ms,
        nothing_happened_token =
            CASE WHEN w.nothing_happened AND NOT k.is_uncertain THEN k.token END
    FROM clock AS c, unnest(
        $1::bytea[], $2::bytea[], $3::smallint[], $4::bigint[], $5::bigint[],
        $6::text[], $7::bytea[], $8::bytea[], $16::boolean[], $17::boolean[]
    ) AS w (
        digest, token, state, active_ms, audit_ms, form, head, body, nothing_happened,
        drops_arguments
    )
    WHERE k.digest = w.digest AND k.token = w.token AND k.state = 1
    RETURNING
        k.digest, k.token, k.attempt, k.state, w.form, w.head, w.body,
        k.settled_at_ms, k.audit_ends_at_ms, k.caller, k.key, w.drops_arguments
), stored AS (
    INSERT INTO {schema}.outcomes (
        digest, token, attempt, state, form, head, body, settled_at_ms, audit_ends_at_ms
    )
    SELECT digest, token, attempt, state, form, head, body, settled_at_ms, audit_ends_at_ms
    FROM settled
    WHERE form IS NOT NULL
), dropped AS (
    DELETE FROM {schema}.arguments
    WHERE digest IN (SELECT digest FROM settled WHERE drops_arguments)
), staged AS (
    -- Sorted before the numbers are given out: the order of staging is the order of delivery.
    INSERT INTO {schema}.outbox (
        entry_key, topic, aggregate, content_type, body, caller, origin, due_at_ms, staged_at_ms
    )
    SELECT
        e.entry_key, e.topic, e.aggregate, e.content_type, e.body, s.caller, s.key,
        greatest(e.deliver_at_ms, s.settled_at_ms), s.settled_at_ms
    FROM settled AS s
    JOIN unnest(
        $9::bytea[], $10::text[], $11::text[], $12::text[], $13::text[], $14::bytea[], $15::bigint[]
    ) WITH ORDINALITY
        AS e (digest, entry_key, topic, aggregate, content_type, body, deliver_at_ms, place)
        ON e.digest = s.digest
    ORDER BY e.place
)
SELECT digest FROM settled;

-- name: stage_entries
-- Runs on a user's connection, inside the user's transaction, and stages entries in their order.
WITH clock AS MATERIALIZED (
    SELECT {now_ms} AS now_ms
)
INSERT INTO {schema}.outbox (
    entry_key, topic, aggregate, content_type, body, caller, origin, due_at_ms, staged_at_ms
)
SELECT
    e.entry_key, e.topic, e.aggregate, e.content_type, e.body, $7::text, $8::text,
    greatest(e.deliver_at_ms, c.now_ms), c.now_ms
FROM clock AS c, unnest(
    $1::text[], $2::text[], $3::text[], $4::text[], $5::bytea[], $6::bigint[]
) WITH ORDINALITY AS e (entry_key, topic, aggregate, content_type, body, deliver_at_ms, place)
ORDER BY e.place;

-- name: claim_entries
-- Takes due entries for one relay: free ones, and the first entry of each aggregate. The walk jumps
-- from one aggregate to the next in the index, for a bounded number of them, and never reads the
-- entries behind a head. Rivals skip each other's rows. The lock looks at the newest version of a
-- row, so it takes nothing that a rival has claimed or settled since the walk; and whatever was a
-- head then is a head now or is over, because an earlier entry never comes back. The first of them
-- without an open try, up to a limit, begin with the claim.
WITH RECURSIVE clock AS MATERIALIZED (
    SELECT {now_ms} AS now_ms
), walk AS (
    (
        SELECT o.aggregate, o.id, o.state, o.due_at_ms, 1 AS visited
        FROM {schema}.outbox AS o
        WHERE o.aggregate IS NOT NULL AND o.state <= 2 AND o.aggregate > $4::text COLLATE "C"
            AND (o.state = 1 OR $5::boolean)
        ORDER BY o.aggregate, o.id LIMIT 1
    )
    UNION ALL
    SELECT n.aggregate, n.id, n.state, n.due_at_ms, w.visited + 1
    FROM walk AS w CROSS JOIN LATERAL (
        SELECT o.aggregate, o.id, o.state, o.due_at_ms
        FROM {schema}.outbox AS o
        WHERE o.aggregate IS NOT NULL AND o.state <= 2 AND o.aggregate > w.aggregate
            AND (o.state = 1 OR $5::boolean)
        ORDER BY o.aggregate, o.id LIMIT 1
    ) AS n
    WHERE w.visited < $6::integer
), heads AS MATERIALIZED (
    SELECT w.id, w.aggregate, w.visited FROM walk AS w
    WHERE w.state = 1 AND w.due_at_ms <= (SELECT now_ms FROM clock)
    ORDER BY w.visited LIMIT $3::integer
), free AS MATERIALIZED (
    SELECT o.id, o.open_try FROM {schema}.outbox AS o
    WHERE o.aggregate IS NULL AND o.state = 1 AND o.due_at_ms <= (SELECT now_ms FROM clock)
    ORDER BY o.due_at_ms, o.id LIMIT $3::integer
    FOR UPDATE SKIP LOCKED
), held AS MATERIALIZED (
    SELECT o.id, o.open_try FROM {schema}.outbox AS o
    WHERE o.id = ANY (ARRAY(SELECT id FROM heads))
        AND o.state = 1 AND o.due_at_ms <= (SELECT now_ms FROM clock)
    FOR UPDATE SKIP LOCKED
), chosen AS MATERIALIZED (
    SELECT id, open_try FROM free UNION ALL SELECT id, open_try FROM held
), begins AS MATERIALIZED (
    SELECT id FROM chosen WHERE open_try = 0 ORDER BY id LIMIT $7::integer
), claimed AS (
    UPDATE {schema}.outbox AS o SET
        token = $1::bytea,
        due_at_ms = c.now_ms + $2::bigint,
        attempts = o.attempts + (o.open_try = 0 AND o.id <= c.begins_to)::integer,
        open_try = CASE WHEN o.open_try = 0 AND o.id <= c.begins_to THEN 1 ELSE o.open_try END
    FROM (
        SELECT now_ms, coalesce((SELECT max(id) FROM begins), 0) AS begins_to FROM clock
    ) AS c
    WHERE o.id = ANY (ARRAY(SELECT id FROM chosen))
    RETURNING
        o.id, o.entry_key, o.topic, o.aggregate, o.content_type, o.body, o.caller, o.origin,
        o.state, o.token, o.attempts, o.due_at_ms, o.staged_at_ms, o.settled_at_ms,
        o.expires_at_ms, o.last_error, o.open_try
), stop AS (
    -- Where the walk goes on: behind the last head if there were as many as wanted, else behind the
    -- last aggregate that was looked at; nowhere if there was no further one.
    SELECT CASE
        WHEN (SELECT count(*) FROM heads) = $3::integer
            THEN (SELECT aggregate FROM heads ORDER BY visited DESC LIMIT 1)
        WHEN (SELECT count(*) FROM walk) = $6::integer
            THEN (SELECT aggregate FROM walk ORDER BY visited DESC LIMIT 1)
    END AS aggregate
)
SELECT stop.aggregate, begins.id IS NOT NULL, claimed.*
FROM stop LEFT JOIN claimed ON true LEFT JOIN begins ON begins.id = claimed.id
ORDER BY claimed.id;

-- name: write_entries
-- Writes what became of deliveries, and counts the tries that begin now with a new lease for each,
-- for the entries whose token is still the relay's. Both in one statement, so that they are one
-- commit; no entry is in both. A row that is not the relay's is not locked, so two relays that had
-- the same entries cannot wait for each other.
WITH clock AS MATERIALIZED (
    SELECT {now_ms} AS now_ms
), ended AS (
    UPDATE {schema}.outbox AS o SET
        state = w.state,
        token = NULL,
        attempts = coalesce(w.attempts, o.attempts),
        open_try = w.open_try,
        due_at_ms = CASE WHEN w.state = 1 THEN c.now_ms + w.wait_ms ELSE o.due_at_ms END,
        settled_at_ms = CASE WHEN w.state = 1 THEN NULL ELSE c.now_ms END,
        expires_at_ms = CASE WHEN w.state = 3 THEN c.now_ms + w.keep_ms END,
        last_error = coalesce(w.error, o.last_error)
    FROM clock AS c, unnest(
        $1::bigint[], $2::bytea[], $3::smallint[], $4::integer[], $5::smallint[], $6::bigint[],
        $7::bigint[], $8::text[]
    ) AS w (id, token, state, attempts, open_try, wait_ms, keep_ms, error)
    WHERE o.id = w.id AND o.token = w.token AND o.state = 1
    RETURNING o.id
), begun AS (
    UPDATE {schema}.outbox AS o SET
        attempts = w.attempt,
        open_try = w.open_try,
        due_at_ms = greatest(o.due_at_ms, c.now_ms + w.lease_ms)
    FROM clock AS c, unnest(
        $9::bigint[], $10::bytea[], $11::integer[], $12::smallint[], $13::bigint[]
    ) AS w (id, token, attempt, open_try, lease_ms)
    WHERE o.id = w.id AND o.token = w.token AND o.state = 1
    RETURNING o.id
)
SELECT id FROM ended UNION ALL SELECT id FROM begun;

-- name: extend_entries
-- Extends leases whose token is still the relay's; a lease never gets shorter.
WITH clock AS MATERIALIZED (
    SELECT {now_ms} AS now_ms
)
UPDATE {schema}.outbox AS o SET due_at_ms = greatest(o.due_at_ms, c.now_ms + $3::bigint)
FROM clock AS c
WHERE o.id = ANY ($2::bigint[]) AND o.token = $1::bytea AND o.state = 1
RETURNING o.id;

-- name: read_entry
-- One entry, and the instant it was read at.
SELECT
    {now_ms}, o.id, o.entry_key, o.topic, o.aggregate, o.content_type, o.body, o.caller, o.origin,
    o.state, o.token, o.attempts, o.due_at_ms, o.staged_at_ms, o.settled_at_ms, o.expires_at_ms,
    o.last_error, o.open_try
FROM {schema}.outbox AS o WHERE o.id = $1::bigint;

-- name: list_entries
-- Entries for an operator, newest first.
WITH clock AS MATERIALIZED (
    SELECT {now_ms} AS now_ms
)
SELECT
    c.now_ms, o.id, o.entry_key, o.topic, o.aggregate, o.content_type, o.body, o.caller, o.origin,
    o.state, o.token, o.attempts, o.due_at_ms, o.staged_at_ms, o.settled_at_ms, o.expires_at_ms,
    o.last_error, o.open_try
FROM {schema}.outbox AS o, clock AS c
WHERE ($1::text IS NULL OR o.topic = $1)
  AND ($2::text IS NULL OR o.aggregate = $2)
  AND (cardinality($3::text[]) = 0 OR CASE
        WHEN o.state = 1 AND o.token IS NOT NULL AND o.due_at_ms > c.now_ms THEN 'claimed'
        WHEN o.state = 1 THEN 'waiting'
        WHEN o.state = 2 THEN 'dead'
        WHEN o.state = 3 THEN 'delivered'
        ELSE 'discarded'
    END = ANY ($3::text[]))
ORDER BY o.id DESC
LIMIT $4;

-- name: replace_entry
-- Writes an operator's decision, if the row is still the one that it was made from.
UPDATE {schema}.outbox SET
    state = $1, token = NULL, attempts = $2, open_try = 0, due_at_ms = $3, settled_at_ms = $4,
    expires_at_ms = $5
WHERE id = $6 AND state = $7 AND attempts = $8 AND due_at_ms = $9
    AND token IS NOT DISTINCT FROM $10::bytea
RETURNING id;

-- name: sweep_entries
-- Removes a bounded number of entries that are over and were kept long enough. Two sweepers never
-- wait for each other.
WITH past AS (
    SELECT id FROM {schema}.outbox
    WHERE expires_at_ms IS NOT NULL AND expires_at_ms <= (SELECT {now_ms})
    LIMIT $1
    FOR UPDATE SKIP LOCKED
), removed AS (
    DELETE FROM {schema}.outbox WHERE id = ANY (ARRAY(SELECT id FROM past)) RETURNING 1
)
SELECT count(*) FROM removed;
