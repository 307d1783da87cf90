-- oldest schema that still works: 1

-- Renewals of leases whose operation writes in its user's own transaction. Such a transaction locks
-- the key's row for as long as it lasts, so its owner renews here instead; a lease ends when both
-- places say so. A row counts for the claim of its token alone, whatever became of the key since, and
-- says nothing any more once its instant is past: that is when the sweep removes it. Whoever takes a
-- pending key over writes its row here too, without a renewal: two that write the same row cannot
-- miss each other.
CREATE TABLE {schema}.renewals (
    digest bytea NOT NULL PRIMARY KEY,
    token bytea NOT NULL,
    lease_ends_at_ms bigint NOT NULL
) WITH (
    -- Each renewal is a new version of its row, and they stay in its page.
    fillfactor = 50,
    autovacuum_vacuum_scale_factor = 0.0,
    autovacuum_vacuum_threshold = 10000
);

-- The view of the first migration, with the end of the lease from both places.
CREATE OR REPLACE VIEW {schema}.records AS
SELECT
    k.caller, k.key, k.operation, k.attempt, k.owner,
    CASE k.state WHEN 1 THEN 'pending' WHEN 2 THEN 'succeeded' WHEN 3 THEN 'failed' ELSE 'released' END AS state,
    to_timestamp(k.claimed_at_ms / 1000.0) AS claimed_at,
    to_timestamp(greatest(
        k.lease_ends_at_ms,
        CASE WHEN k.state = 1 THEN (
            SELECT r.lease_ends_at_ms FROM {schema}.renewals AS r
            WHERE r.digest = k.digest AND r.token = k.token
        ) END
    ) / 1000.0) AS lease_ends_at,
    to_timestamp(k.settled_at_ms / 1000.0) AS settled_at,
    to_timestamp(k.expires_at_ms / 1000.0) AS expires_at,
    o.form, o.body, {schema}.body_json(o.form, o.body) AS body_json
FROM {schema}.keys AS k
LEFT JOIN {schema}.outcomes AS o
    ON o.audit_ends_at_ms = k.audit_ends_at_ms AND o.digest = k.digest AND o.token = k.token
    AND o.attempt = k.attempt;
