-- The table of applied migrations.

-- name: create_schema_table
-- Remembers which migrations were applied; made by the first one under the write lock.
CREATE TABLE IF NOT EXISTS retrysafe_schema (
    version INTEGER NOT NULL PRIMARY KEY,
    name TEXT NOT NULL,
    checksum TEXT NOT NULL,
    oldest_schema INTEGER NOT NULL,
    applied_at_ms INTEGER NOT NULL
);

-- name: has_schema_table
-- Whether anything was ever applied here.
SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name = 'retrysafe_schema';

-- name: select_schema
-- What was applied here.
SELECT version, checksum, oldest_schema FROM retrysafe_schema ORDER BY version;

-- name: insert_schema
-- Notes a migration in the transaction that applied it.
INSERT INTO retrysafe_schema (version, name, checksum, oldest_schema, applied_at_ms)
VALUES (?, ?, ?, ?, ?);
