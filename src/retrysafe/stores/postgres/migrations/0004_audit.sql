-- oldest schema that still works: 1

-- The audit as people query it: every ending of every attempt, also of keys that are gone. What is
-- not JSON is null in body_json and never breaks a query. By the digest, rows are found through an
-- index; a look by anything else reads the whole audit.
CREATE VIEW {schema}.audit AS
SELECT
    o.digest, o.token, o.attempt,
    CASE o.state WHEN 2 THEN 'succeeded' WHEN 3 THEN 'failed' ELSE 'released' END AS state,
    to_timestamp(o.settled_at_ms / 1000.0) AS settled_at,
    to_timestamp(o.audit_ends_at_ms / 1000.0) AS audit_ends_at,
    o.form, o.body, {schema}.body_json(o.form, o.body) AS body_json
FROM {schema}.outcomes AS o;
