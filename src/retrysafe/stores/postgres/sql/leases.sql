-- Renewals of leases, on the key's row or beside it. Each statement is its own transaction, correct
-- under READ COMMITTED. Time is the server's clock.
--
-- Both spell out one cell of the core's table: a lease whose token holds a pending row is extended.

-- name: extend
-- Extends leases whose tokens still hold their keys; a lease never gets shorter. Rows that somebody
-- is writing at this moment are left out. Mostly they are being settled by this very owner, and
-- waiting for them while holding others could deadlock with that settlement, whose rows come in
-- another order. Or a user's open transaction has recorded a step: nobody takes over a locked row,
-- and the renewals of all other operations must not wait for that transaction.
WITH clock AS MATERIALIZED (
    SELECT {now_ms} AS now_ms
), held AS MATERIALIZED (
    SELECT k.digest, w.lease_ms
    FROM {schema}.keys AS k
    JOIN unnest($1::bytea[], $2::bytea[], $3::bigint[]) AS w (digest, token, lease_ms)
        ON k.digest = w.digest AND k.token = w.token
    WHERE k.state = 1
    FOR NO KEY UPDATE OF k SKIP LOCKED
)
UPDATE {schema}.keys AS k SET
    lease_ends_at_ms = greatest(k.lease_ends_at_ms, c.now_ms + h.lease_ms)
FROM clock AS c, held AS h
WHERE k.digest = h.digest
RETURNING k.digest, k.lease_ends_at_ms, k.lease_ends_at_ms - c.now_ms;

-- name: extend_beside
-- The same for leases whose operation writes in its user's transaction: it may have locked the row,
-- for longer than the lease lasts, and a transaction on a snapshot could not write a row that was
-- renewed since. So the row is not touched, and the renewal is written beside it. The weakest lock
-- goes along with whatever the user's transaction does to the row, and takeovers take the strongest:
-- while a renewal is being written nobody takes over, and while somebody takes over its row is left
-- out. So what is here of another token is of a claim that is over.
WITH clock AS MATERIALIZED (
    SELECT {now_ms} AS now_ms
), held AS MATERIALIZED (
    SELECT k.digest, k.token, k.lease_ends_at_ms, w.lease_ms
    FROM {schema}.keys AS k
    JOIN unnest($1::bytea[], $2::bytea[], $3::bigint[]) AS w (digest, token, lease_ms)
        ON k.digest = w.digest AND k.token = w.token
    WHERE k.state = 1
    ORDER BY k.digest
    FOR KEY SHARE OF k SKIP LOCKED
)
INSERT INTO {schema}.renewals AS r (digest, token, lease_ends_at_ms)
SELECT h.digest, h.token, greatest(h.lease_ends_at_ms, c.now_ms + h.lease_ms)
FROM clock AS c, held AS h
ON CONFLICT (digest) DO UPDATE SET
    token = excluded.token,
    lease_ends_at_ms = CASE
        WHEN r.token = excluded.token THEN greatest(r.lease_ends_at_ms, excluded.lease_ends_at_ms)
        ELSE excluded.lease_ends_at_ms
    END
RETURNING r.digest, r.lease_ends_at_ms, r.lease_ends_at_ms - (SELECT now_ms FROM clock);

-- name: read_renewals
-- What was renewed beside the rows of these keys, and for which claim. A statement of its own, so
-- that replays and running keys pay nothing for it.
SELECT digest, token, lease_ends_at_ms FROM {schema}.renewals WHERE digest = ANY ($1::bytea[]);
