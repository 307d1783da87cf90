-- oldest schema that still works: 1

-- One small row per (caller, key), and no payload. The digest identifies the pair; the texts are
-- kept so that a collision of digests is found and never served. There is no index on the lease,
-- the state or the expiry: any of them would turn every completion into a non-HOT update. The free
-- space in each page is for exactly that update: a batch completes all rows of a page in one
-- transaction, so their new versions, each a little longer, must fit beside the old ones.
CREATE TABLE {schema}.keys (
    digest bytea NOT NULL PRIMARY KEY,
    caller text NOT NULL,
    key text NOT NULL,
    operation text NOT NULL,
    rule smallint NOT NULL,
    fingerprint bytea NOT NULL,
    state smallint NOT NULL CHECK (state BETWEEN 1 AND 4),
    token bytea NOT NULL,
    attempt integer NOT NULL,
    first_claimed_at_ms bigint NOT NULL,
    claimed_at_ms bigint NOT NULL,
    lease_ends_at_ms bigint NOT NULL,
    settled_at_ms bigint,
    expires_at_ms bigint,
    audit_ends_at_ms bigint,
    owner text NOT NULL
) WITH (
    fillfactor = 45,
    -- Vacuum by a fixed number of dead rows: a share of a large table would come too late.
    autovacuum_vacuum_scale_factor = 0.0,
    autovacuum_vacuum_threshold = 50000,
    autovacuum_vacuum_insert_scale_factor = 0.0,
    autovacuum_vacuum_insert_threshold = 200000
);

-- Every ending of every attempt, partitioned by the day on which its audit window ends, so that a
-- day whose audit is over is dropped as a whole. What has no partition of its own goes to the
-- default one and is removed by bounded deletes.
CREATE TABLE {schema}.outcomes (
    digest bytea NOT NULL,
    token bytea NOT NULL,
    attempt integer NOT NULL,
    state smallint NOT NULL,
    form text NOT NULL,
    head bytea NOT NULL,
    body bytea NOT NULL,
    settled_at_ms bigint NOT NULL,
    audit_ends_at_ms bigint NOT NULL
) PARTITION BY RANGE (audit_ends_at_ms);

CREATE INDEX outcomes_digest ON {schema}.outcomes (digest);

CREATE TABLE {schema}.outcomes_default PARTITION OF {schema}.outcomes DEFAULT;

-- Lets the sweep find what is over, and the days that cannot have a partition yet, without a scan.
CREATE INDEX outcomes_default_audit ON {schema}.outcomes_default (audit_ends_at_ms);

-- The results of finished steps, removed together with their key.
CREATE TABLE {schema}.steps (
    digest bytea NOT NULL,
    name text NOT NULL,
    position integer NOT NULL,
    form text NOT NULL,
    head bytea NOT NULL,
    body bytea NOT NULL,
    recorded_at_ms bigint NOT NULL,
    PRIMARY KEY (digest, name)
);

-- JSON bodies as jsonb, and nothing for bodies that are not JSON, are nested too deep or are too
-- large for jsonb: one bad body must not break a query over all of them. Not safe in parallel plans:
-- catching an error starts a subtransaction, which PostgreSQL before 17 refuses there.
CREATE FUNCTION {schema}.body_json(form text, body bytea) RETURNS jsonb
LANGUAGE plpgsql IMMUTABLE PARALLEL UNSAFE AS $body$
BEGIN
    IF form = 'bytes.1' THEN
        RETURN NULL;
    END IF;
    RETURN pg_catalog.convert_from(body, 'UTF8')::pg_catalog.jsonb;
EXCEPTION WHEN data_exception OR program_limit_exceeded THEN
    RETURN NULL;
END;
$body$;

-- What people query: readable states, instants as timestamps, and JSON bodies as JSON.
CREATE VIEW {schema}.records AS
SELECT
    k.caller, k.key, k.operation, k.attempt, k.owner,
    CASE k.state WHEN 1 THEN 'pending' WHEN 2 THEN 'succeeded' WHEN 3 THEN 'failed' ELSE 'released' END AS state,
    to_timestamp(k.claimed_at_ms / 1000.0) AS claimed_at,
    to_timestamp(k.lease_ends_at_ms / 1000.0) AS lease_ends_at,
    to_timestamp(k.settled_at_ms / 1000.0) AS settled_at,
    to_timestamp(k.expires_at_ms / 1000.0) AS expires_at,
    o.form, o.body, {schema}.body_json(o.form, o.body) AS body_json
FROM {schema}.keys AS k
LEFT JOIN {schema}.outcomes AS o
    ON o.audit_ends_at_ms = k.audit_ends_at_ms AND o.digest = k.digest AND o.token = k.token
    AND o.attempt = k.attempt;
