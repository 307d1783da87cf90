-- oldest schema that still works: 1

-- The views of before with what support people ask for: status, method, path and duration. An operation
-- over HTTP is named by its method and its route. The head of a stored response begins with its
-- status. Anything else is null, and never breaks a query.
CREATE FUNCTION {schema}.http_status(form text, head bytea) RETURNS smallint
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $status$
    SELECT CASE
        WHEN form LIKE 'http.%'
            AND pg_catalog.encode(pg_catalog.substring(head, 1, 3), 'escape') ~ '^[1-5][0-9][0-9]$'
        THEN pg_catalog.encode(pg_catalog.substring(head, 1, 3), 'escape')::smallint
    END
$status$;

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
    o.form, o.body, {schema}.body_json(o.form, o.body) AS body_json,
    to_timestamp(k.first_claimed_at_ms / 1000.0) AS first_claimed_at,
    CASE WHEN k.state IN (2, 3) THEN k.settled_at_ms - k.claimed_at_ms END AS duration_ms,
    {schema}.http_status(o.form, o.head) AS status,
    substring(k.operation FROM '^([A-Z]+) /') AS method,
    substring(k.operation FROM '^[A-Z]+ (/.*)$') AS path,
    k.digest
FROM {schema}.keys AS k
LEFT JOIN {schema}.outcomes AS o
    ON o.audit_ends_at_ms = k.audit_ends_at_ms AND o.digest = k.digest AND o.token = k.token
    AND o.attempt = k.attempt;

-- Caller, key and operation are those of the record, while there is one; the duration is known of its
-- last attempt.
CREATE OR REPLACE VIEW {schema}.audit AS
SELECT
    o.digest, o.token, o.attempt,
    CASE o.state WHEN 2 THEN 'succeeded' WHEN 3 THEN 'failed' ELSE 'released' END AS state,
    to_timestamp(o.settled_at_ms / 1000.0) AS settled_at,
    to_timestamp(o.audit_ends_at_ms / 1000.0) AS audit_ends_at,
    o.form, o.body, {schema}.body_json(o.form, o.body) AS body_json,
    k.caller, k.key, k.operation,
    CASE WHEN k.token = o.token THEN o.settled_at_ms - k.claimed_at_ms END AS duration_ms,
    {schema}.http_status(o.form, o.head) AS status,
    substring(k.operation FROM '^([A-Z]+) /') AS method,
    substring(k.operation FROM '^[A-Z]+ (/.*)$') AS path
FROM {schema}.outcomes AS o
LEFT JOIN {schema}.keys AS k ON k.digest = o.digest;

-- What operators did, with instants as timestamps.
CREATE VIEW {schema}.actions AS
SELECT
    a.caller, a.key, a.command, a.condition AS condition_before, a.attempt, a.operator, a.reason,
    to_timestamp(a.acted_at_ms / 1000.0) AS acted_at, a.digest
FROM {schema}.operator_actions AS a;
