-- The sweep. Each statement is its own transaction, correct under READ COMMITTED, and skips what
-- somebody else has locked.

-- name: sweep_pages
-- Removes outlived keys with their steps and arguments from a range of pages, and says how many keys,
-- from how many pages, the last of these, the pages of the whole table, and how many were chosen.
-- Rows that somebody else holds are left for the next pass; a pending record is never touched. What
-- was chosen is locked, so it is still outlived when it is deleted. One that was written after the
-- snapshot and is outlived all the same is chosen, but not removed.
WITH clock AS MATERIALIZED (
    SELECT {now_ms} AS now_ms
), outlived AS (
    SELECT k.ctid AS place FROM {schema}.keys AS k
    WHERE k.ctid >= $1::text::tid AND k.ctid < $2::text::tid
        AND k.state <> 1 AND k.expires_at_ms <= (SELECT now_ms FROM clock)
    LIMIT $3
    FOR UPDATE SKIP LOCKED
), removed AS (
    DELETE FROM {schema}.keys WHERE ctid = ANY (ARRAY(SELECT place FROM outlived))
    RETURNING digest, (ctid::text::point)[0]::bigint AS page
), forgotten AS (
    DELETE FROM {schema}.steps WHERE digest IN (SELECT digest FROM removed)
), dropped AS (
    DELETE FROM {schema}.arguments WHERE digest IN (SELECT digest FROM removed)
)
SELECT
    count(*), count(DISTINCT page), coalesce(max(page), 0),
    (pg_relation_size('{schema}.keys') / current_setting('block_size')::bigint)::bigint,
    (SELECT count(*) FROM outlived)
FROM removed;

-- name: sweep_renewals
-- Removes a bounded number of renewals whose instant is past: without them the lease has ended just
-- the same. One that is renewed in between is looked at again and stays.
WITH past AS (
    SELECT r.ctid AS place FROM {schema}.renewals AS r
    WHERE r.lease_ends_at_ms <= (SELECT {now_ms})
    LIMIT $1
    FOR UPDATE SKIP LOCKED
), removed AS (
    DELETE FROM {schema}.renewals WHERE ctid = ANY (ARRAY(SELECT place FROM past)) RETURNING 1
)
SELECT count(*) FROM removed;

-- name: sweep_default_outcomes
-- Removes a bounded number of outcomes past their audit window that have no partition of their own.
-- Two sweepers never wait for each other.
WITH past AS (
    SELECT ctid AS place FROM {schema}.outcomes_default
    WHERE audit_ends_at_ms <= {now_ms}
    LIMIT $1
    FOR UPDATE SKIP LOCKED
), removed AS (
    DELETE FROM {schema}.outcomes_default WHERE ctid = ANY (ARRAY(SELECT place FROM past)) RETURNING 1
)
SELECT count(*) FROM removed;
