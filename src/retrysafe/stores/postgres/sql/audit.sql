-- The audit as a whole, partition by partition and page by page. Reads without a lock.

-- name: audit_tables
-- The partitions of the outcomes and their pages, in the order of their days.
SELECT
    c.relname::text,
    (pg_catalog.pg_relation_size(c.oid) / current_setting('block_size')::bigint)::bigint
FROM pg_catalog.pg_inherits AS i
JOIN pg_catalog.pg_class AS c ON c.oid = i.inhrelid
WHERE i.inhparent = '{schema}.outcomes'::regclass
ORDER BY c.relname;

-- name: audit_in_pages
-- Outcomes in a range of pages of one partition that were settled between two instants, with what is
-- known of their keys. {partition} is a name from the catalog.
SELECT
    o.digest, k.caller, k.key, k.operation,
    o.token, o.attempt, o.state, o.form, o.head, o.body, o.settled_at_ms, o.audit_ends_at_ms
FROM {schema}.{partition} AS o
LEFT JOIN {schema}.keys AS k ON k.digest = o.digest
WHERE o.ctid >= $1::text::tid AND o.ctid < $2::text::tid
    AND o.settled_at_ms >= $3::bigint AND o.settled_at_ms < $4::bigint
ORDER BY o.settled_at_ms;
