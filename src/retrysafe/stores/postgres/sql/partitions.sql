-- The daily partitions of the outcomes.

-- name: list_partitions
-- The partitions of the outcomes, without the default one.
SELECT c.relname FROM pg_inherits AS i
JOIN pg_class AS c ON c.oid = i.inhrelid
WHERE i.inhparent = '{schema}.outcomes'::regclass AND c.relname LIKE 'outcomes\_2%'
ORDER BY c.relname;

-- name: last_audit_day
-- The latest end of an audit window that has no partition, and whether the given instant or later
-- ones are in use at all. One probe of an index, and one row of the last partitions.
SELECT
    coalesce((SELECT max(audit_ends_at_ms) FROM {schema}.outcomes_default WHERE audit_ends_at_ms < $2), 0),
    EXISTS (SELECT 1 FROM {schema}.outcomes WHERE audit_ends_at_ms >= $1 AND audit_ends_at_ms < $2);

-- name: days_in_default
-- Which of these days have outcomes in the default partition; a day that has some cannot get a
-- partition until they are gone.
SELECT day FROM unnest($1::bigint[]) AS day
WHERE EXISTS (
    SELECT 1 FROM {schema}.outcomes_default
    WHERE audit_ends_at_ms >= day AND audit_ends_at_ms < day + 86400000
);

-- name: try_tending
-- One sweeper at a time makes and drops partitions; the lock ends with the transaction.
SELECT pg_try_advisory_xact_lock(hashtextextended('retrysafe partitions {schema}', 0));

-- name: has_partition
-- Whether it exists by now: a rival may have made or dropped it.
SELECT to_regclass($1) IS NOT NULL;

-- name: first_partitions
-- The partitions of the coming days, in the transaction that makes the table: by then nobody uses
-- it, so all locks are free.
DO $partitions$
DECLARE
    today bigint := {now_ms} / 86400000 * 86400000;
    day bigint;
    name text;
BEGIN
    FOR day IN SELECT generate_series(today, today + {horizon_days} * 86400000::bigint, 86400000) LOOP
        name := '{schema}.outcomes_' || to_char(to_timestamp(day / 1000) AT TIME ZONE 'UTC', 'YYYYMMDD');
        EXECUTE 'CREATE TABLE ' || name || ' (LIKE {schema}.outcomes INCLUDING ALL)';
        EXECUTE 'ALTER TABLE {schema}.outcomes ATTACH PARTITION ' || name
            || ' FOR VALUES FROM (' || day || ') TO (' || day + 86400000 || ')';
    END LOOP;
END
$partitions$;
