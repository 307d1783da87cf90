-- What is printed for people and tools that run the migrations themselves.

-- name: migration
-- One migration as one statement: it takes the lock, looks whether it is noted already, and then does
-- everything or nothing. One statement is what every driver and every tool can send. The text inside
-- is run only when it is due, so what it names need not exist before.
DO $retrysafe$
DECLARE
    noted text;
    earlier bigint := 0;
BEGIN
    PERFORM pg_advisory_xact_lock({lock});
    IF to_regclass('{schema}.schema_versions') IS NOT NULL THEN
        SELECT max(checksum) FILTER (WHERE version = {version}), count(*) FILTER (WHERE version < {version})
        INTO noted, earlier FROM {schema}.schema_versions;
    END IF;
    IF noted = '{checksum}' THEN
        RAISE NOTICE 'migration {version} of {schema} is applied already: left alone';
        RETURN;
    ELSIF noted IS NOT NULL THEN
        RAISE EXCEPTION 'migration {version} of {schema} was applied with other content than this release has';
    ELSIF earlier < {version} - 1 THEN
        RAISE EXCEPTION 'an earlier migration of {schema} is missing: apply all before {version} first';
    END IF;
    {preparation}
    EXECUTE $migration$
{statements}
$migration$;
    INSERT INTO {schema}.schema_versions (version, name, checksum, oldest_schema)
    VALUES ({version}, '{name}', '{checksum}', {oldest_schema});
    {conclusion}
END
$retrysafe$;

-- name: preparation
-- What the first migration finds. An administrator may have made the schema: making it again would
-- need a right on the database.
IF to_regnamespace('{schema}') IS NULL THEN
        CREATE SCHEMA {schema};
    END IF;
    {create_schema_table};
