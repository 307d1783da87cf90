-- oldest schema that still works: 1

-- What resumable operations were called with, until they have ended. Bound to one life of the key by
-- the instant of its first claim: a release that does not know this table may leave a row behind,
-- and nobody must resume a new life with the arguments of an old one.
CREATE TABLE {schema}.arguments (
    digest bytea NOT NULL PRIMARY KEY,
    first_claimed_at_ms bigint NOT NULL,
    form text NOT NULL,
    head bytea NOT NULL,
    body bytea NOT NULL
) WITH (
    -- Every row is soon dead, and workers walk over the table until a vacuum.
    autovacuum_vacuum_scale_factor = 0.0,
    autovacuum_vacuum_threshold = 10000
);
