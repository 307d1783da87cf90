-- The schema and the table of applied migrations.

-- name: has_schema_table
-- Whether anything was ever applied here.
SELECT count(*) FROM pg_catalog.pg_tables WHERE schemaname = $1 AND tablename = 'schema_versions';

-- name: select_schema
-- What was applied here.
SELECT version, checksum, oldest_schema FROM {schema}.schema_versions ORDER BY version;

-- name: has_schema
-- Whether the schema is there; making it again would need a right on the database, even if it is.
SELECT count(*) FROM pg_catalog.pg_namespace WHERE nspname = $1;

-- name: create_schema_table
-- Remembers which migrations were applied; made under the migration lock.
CREATE TABLE IF NOT EXISTS {schema}.schema_versions (
    version integer NOT NULL PRIMARY KEY,
    name text NOT NULL,
    checksum text NOT NULL,
    oldest_schema integer NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- name: insert_schema
-- Notes a migration in the transaction that applied it.
INSERT INTO {schema}.schema_versions (version, name, checksum, oldest_schema)
VALUES ($1, $2, $3, $4);
