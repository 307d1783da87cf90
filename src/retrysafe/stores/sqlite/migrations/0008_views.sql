-- oldest schema that still works: 1

-- The view of before with what support people ask for: status, method, path and duration. An operation
-- over HTTP is named by its method and its route. The head of a stored response begins with its
-- status. Anything else is null, and never breaks a query.
DROP VIEW retrysafe_records;
CREATE VIEW retrysafe_records AS
SELECT
    k.caller, k.key, k.operation, k.attempt, k.owner,
    CASE k.state WHEN 1 THEN 'pending' WHEN 2 THEN 'succeeded' WHEN 3 THEN 'failed' ELSE 'released' END AS state,
    k.claimed_at_ms, k.lease_ends_at_ms, k.settled_at_ms, k.expires_at_ms,
    o.form, o.body,
    CASE WHEN o.form <> 'bytes.1' AND json_valid(CAST(o.body AS TEXT)) THEN json(CAST(o.body AS TEXT)) END AS body_json,
    k.first_claimed_at_ms,
    CASE WHEN k.state IN (2, 3) THEN k.settled_at_ms - k.claimed_at_ms END AS duration_ms,
    CASE WHEN o.form LIKE 'http.%' AND CAST(o.head AS TEXT) GLOB '[1-5][0-9][0-9]*'
        THEN CAST(substr(CAST(o.head AS TEXT), 1, 3) AS INTEGER) END AS status,
    CASE WHEN instr(k.operation, ' /') > 1 AND substr(k.operation, 1, instr(k.operation, ' /') - 1) NOT GLOB '*[^A-Z]*'
        THEN substr(k.operation, 1, instr(k.operation, ' /') - 1) END AS method,
    CASE WHEN instr(k.operation, ' /') > 1 AND substr(k.operation, 1, instr(k.operation, ' /') - 1) NOT GLOB '*[^A-Z]*'
        THEN substr(k.operation, instr(k.operation, ' /') + 1) END AS path,
    k.digest
FROM retrysafe_keys AS k
LEFT JOIN retrysafe_outcomes AS o ON o.id = k.outcome_id AND o.token = k.token;

-- Every ending of every attempt until its audit window ends, also of keys that are gone. Caller, key and
-- operation are those of the record, while there is one; the duration is known of its last attempt.
CREATE VIEW retrysafe_audit AS
SELECT
    o.digest, o.token, o.attempt,
    CASE o.state WHEN 2 THEN 'succeeded' WHEN 3 THEN 'failed' ELSE 'released' END AS state,
    o.settled_at_ms, o.audit_ends_at_ms, o.form, o.body,
    CASE WHEN o.form <> 'bytes.1' AND json_valid(CAST(o.body AS TEXT)) THEN json(CAST(o.body AS TEXT)) END AS body_json,
    k.caller, k.key, k.operation,
    CASE WHEN k.token = o.token THEN o.settled_at_ms - k.claimed_at_ms END AS duration_ms,
    CASE WHEN o.form LIKE 'http.%' AND CAST(o.head AS TEXT) GLOB '[1-5][0-9][0-9]*'
        THEN CAST(substr(CAST(o.head AS TEXT), 1, 3) AS INTEGER) END AS status,
    CASE WHEN instr(k.operation, ' /') > 1 AND substr(k.operation, 1, instr(k.operation, ' /') - 1) NOT GLOB '*[^A-Z]*'
        THEN substr(k.operation, 1, instr(k.operation, ' /') - 1) END AS method,
    CASE WHEN instr(k.operation, ' /') > 1 AND substr(k.operation, 1, instr(k.operation, ' /') - 1) NOT GLOB '*[^A-Z]*'
        THEN substr(k.operation, instr(k.operation, ' /') + 1) END AS path
FROM retrysafe_outcomes AS o
LEFT JOIN retrysafe_keys AS k ON k.digest = o.digest;
