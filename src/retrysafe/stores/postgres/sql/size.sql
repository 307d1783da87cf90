-- How large the store is, by what the server keeps of its tables anyway. They read only.

-- name: read_sizes
-- Rows, bytes with indexes, and rows ever inserted; partitions count for their parent. The server's
-- estimate of live rows is fresh, and gone after a crash: then the one of the last vacuum counts.
SELECT
    coalesce(p.relname, c.relname)::text,
    sum(CASE WHEN s.n_live_tup > 0 THEN s.n_live_tup ELSE greatest(c.reltuples, 0) END)::bigint,
    sum(pg_catalog.pg_total_relation_size(c.oid))::bigint,
    sum(coalesce(s.n_tup_ins, 0))::bigint
FROM pg_catalog.pg_class AS c
JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
LEFT JOIN pg_catalog.pg_inherits AS i ON i.inhrelid = c.oid
LEFT JOIN pg_catalog.pg_class AS p ON p.oid = i.inhparent
LEFT JOIN pg_catalog.pg_stat_all_tables AS s ON s.relid = c.oid
WHERE n.nspname = $1 AND c.relkind = 'r'
GROUP BY 1;

-- name: read_outbox_size
-- Entries that wait and entries that are dead, up to a limit, and since when the first could have
-- been delivered. Each part reads a partial index that holds nothing else.
SELECT
    {now_ms},
    (SELECT count(*) FROM (
        SELECT FROM {schema}.outbox WHERE aggregate IS NULL AND state = 1 LIMIT $1::integer
    ) AS free) + w.entries,
    (SELECT count(*) FROM (SELECT FROM {schema}.outbox WHERE state = 2 LIMIT $1::integer) AS dead),
    least(
        (SELECT min(due_at_ms) FROM {schema}.outbox WHERE aggregate IS NULL AND state = 1), w.due_at_ms
    )
FROM (
    SELECT count(*) AS entries, min(due_at_ms) AS due_at_ms FROM (
        SELECT due_at_ms FROM {schema}.outbox
        WHERE aggregate IS NOT NULL AND state <= 2 AND state = 1 LIMIT $1::integer
    ) AS ordered
) AS w;
