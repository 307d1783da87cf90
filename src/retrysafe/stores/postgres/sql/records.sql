-- Records and their outcomes, as decisions and operators read them. They take no lock, and see what
-- is committed when they begin.

-- name: read_records
-- The records of several keys, the instant they were read at, and the payloads to replay whose
-- audits end between the two given instants. By these bounds the server knows when the statement
-- starts which partitions it needs not read, where it would otherwise look into all of them.
SELECT
    (SELECT {now_ms}),
    k.digest, k.caller, k.key, k.operation, k.rule, k.fingerprint, k.state, k.token, k.attempt,
    k.first_claimed_at_ms, k.claimed_at_ms, k.lease_ends_at_ms, k.settled_at_ms, k.expires_at_ms,
    k.owner, k.releases, k.is_uncertain, {nothing_happened}, k.corrected_at_ms,
    k.audit_ends_at_ms, o.form, o.head, o.body
FROM {schema}.keys AS k
LEFT JOIN {schema}.outcomes AS o
    ON k.state IN (2, 3)
    AND o.audit_ends_at_ms = k.audit_ends_at_ms AND o.digest = k.digest AND o.token = k.token
    AND o.attempt = k.attempt AND o.audit_ends_at_ms BETWEEN $2::bigint AND $3::bigint
WHERE k.digest = ANY ($1::bytea[]);

-- name: read_standing
-- The whole outcome that a replay gives, if the record is still that of the token.
SELECT
    o.token, o.attempt, o.state, o.form, o.head, o.body, o.settled_at_ms, o.audit_ends_at_ms
FROM {schema}.keys AS k
JOIN {schema}.outcomes AS o
    ON o.audit_ends_at_ms = k.audit_ends_at_ms AND o.digest = k.digest AND o.token = k.token
    AND o.attempt = k.attempt
WHERE k.digest = $1 AND k.token = $2 AND k.state IN (2, 3);

-- name: read_outcomes
-- The audit of a key, oldest first.
SELECT token, attempt, state, form, head, body, settled_at_ms, audit_ends_at_ms
FROM {schema}.outcomes WHERE digest = $1 ORDER BY settled_at_ms, attempt;

-- name: read_last_outcome
-- The newest ending of a key's present life, by the index of each partition.
SELECT
    o.token, o.attempt, o.state, o.form, o.head, o.body, o.settled_at_ms, o.audit_ends_at_ms
FROM {schema}.keys AS k
JOIN {schema}.outcomes AS o ON o.digest = k.digest AND o.settled_at_ms >= k.first_claimed_at_ms
WHERE k.digest = $1 AND k.caller = $2 AND k.key = $3
ORDER BY o.settled_at_ms DESC, o.attempt DESC
LIMIT 1;
