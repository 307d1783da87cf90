-- How large the file is, without a scan.

-- name: read_sizes
-- Rows are appended and swept from the other end, so the ids tell about how many there are.
SELECT
    (SELECT page_count * page_size FROM pragma_page_count, pragma_page_size),
    coalesce((SELECT max(id) FROM retrysafe_keys), 0),
    coalesce((SELECT min(id) FROM retrysafe_keys), 1),
    coalesce((SELECT max(id) FROM retrysafe_outcomes), 0),
    coalesce((SELECT min(id) FROM retrysafe_outcomes), 1),
    coalesce((SELECT max(id) FROM retrysafe_outbox), 0),
    coalesce((SELECT min(id) FROM retrysafe_outbox), 1);

-- name: read_outbox_size
-- Entries that wait and entries that are dead, up to a limit, and since when the first could have
-- been delivered. Each part reads a partial index that holds nothing else.
SELECT
    (SELECT count(*) FROM (
        SELECT 1 FROM retrysafe_outbox WHERE aggregate IS NULL AND state = 1 LIMIT :limit
    )) + w.entries,
    (SELECT count(*) FROM (SELECT 1 FROM retrysafe_outbox WHERE state = 2 LIMIT :limit)),
    (SELECT min(due_at_ms) FROM retrysafe_outbox WHERE aggregate IS NULL AND state = 1),
    w.due_at_ms
FROM (
    SELECT count(*) AS entries, min(due_at_ms) AS due_at_ms FROM (
        SELECT due_at_ms FROM retrysafe_outbox
        WHERE aggregate IS NOT NULL AND state <= 2 AND state = 1 LIMIT :limit
    )
) AS w;
