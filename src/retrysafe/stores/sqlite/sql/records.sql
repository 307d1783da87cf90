-- Records and their outcomes, as decisions and operators read them. `update_key` relies on the
-- write lock of BEGIN IMMEDIATE; the others see one state of the file, in any transaction.

-- name: select_key
-- One record, for a decision under the write lock or for an operator.
SELECT
    digest, caller, key, operation, rule, fingerprint, state, token, attempt,
    first_claimed_at_ms, claimed_at_ms, lease_ends_at_ms, settled_at_ms, expires_at_ms, owner,
    releases, is_uncertain, {nothing_happened}, corrected_at_ms
FROM retrysafe_keys AS k WHERE digest = ?;

-- name: update_key
-- Writes a decided transition; the write lock has kept the row as it was read.
UPDATE retrysafe_keys SET
    operation = ?, rule = ?, fingerprint = ?, state = ?, token = ?, attempt = ?,
    first_claimed_at_ms = ?, claimed_at_ms = ?, lease_ends_at_ms = ?,
    settled_at_ms = ?, expires_at_ms = ?, owner = ?, releases = ?, is_uncertain = ?,
    nothing_happened_token = ?, corrected_at_ms = ?
WHERE digest = ?;

-- name: select_keys
-- Records for an operator. A scan on purpose: an index for it would cost every claim.
SELECT
    digest, caller, key, operation, rule, fingerprint, state, token, attempt,
    first_claimed_at_ms, claimed_at_ms, lease_ends_at_ms, settled_at_ms, expires_at_ms, owner,
    releases, is_uncertain, {nothing_happened}, corrected_at_ms
FROM retrysafe_keys AS k
WHERE (:caller IS NULL OR caller = :caller)
  AND substr(key, 1, length(:prefix)) = :prefix
  AND (:operation IS NULL OR operation = :operation)
  AND claimed_at_ms BETWEEN :first_ms AND :last_ms
  AND (claimed_at_ms < :after_ms OR claimed_at_ms = :after_ms AND digest > :after_digest)
  AND (:any_condition OR (
    CASE
        WHEN state = 1 AND lease_ends_at_ms > :now_ms THEN 'running'
        WHEN state = 1 THEN 'abandoned'
        WHEN expires_at_ms <= :now_ms THEN 'outlived'
        WHEN state = 2 THEN 'succeeded'
        WHEN state = 3 THEN 'failed'
        ELSE 'released'
    END IN (SELECT value FROM json_each(:conditions))))
ORDER BY claimed_at_ms DESC, digest
LIMIT :limit;

-- name: bounds_of_keys
-- The first and the last id.
SELECT (SELECT min(id) FROM retrysafe_keys), (SELECT max(id) FROM retrysafe_keys);

-- name: select_key_from
-- The record at an id, or the next one.
SELECT
    digest, caller, key, operation, rule, fingerprint, state, token, attempt,
    first_claimed_at_ms, claimed_at_ms, lease_ends_at_ms, settled_at_ms, expires_at_ms, owner,
    releases, is_uncertain, {nothing_happened}, corrected_at_ms
FROM retrysafe_keys AS k WHERE id >= ? ORDER BY id LIMIT 1;

-- name: select_standing
-- The whole outcome that a replay gives, found by its id.
SELECT
    o.token, o.attempt, o.state, o.form, o.head, o.body, o.settled_at_ms, o.audit_ends_at_ms
FROM retrysafe_keys AS k
JOIN retrysafe_outcomes AS o ON o.id = k.outcome_id AND o.token = k.token
WHERE k.digest = ? AND k.state IN (2, 3);

-- name: select_outcomes
-- The audit of a key, oldest first. A scan on purpose: an index for it would cost every operation.
SELECT token, attempt, state, form, head, body, settled_at_ms, audit_ends_at_ms
FROM retrysafe_outcomes WHERE digest = ? ORDER BY id;

-- name: first_outcome_before
-- Where a bounded number of outcomes before an id begins.
SELECT min(id) FROM (
    SELECT id FROM retrysafe_outcomes WHERE id < :before ORDER BY id DESC LIMIT :rows
);

-- name: select_outcomes_between
-- Those of a key in a stretch of ids.
SELECT id, token, attempt, state, form, head, body, settled_at_ms, audit_ends_at_ms
FROM retrysafe_outcomes WHERE id >= :first AND id < :before AND digest = :digest;

-- name: last_outcome_after
-- Where a bounded number of outcomes behind an id ends, and the last of all.
SELECT max(id), (SELECT max(id) FROM retrysafe_outcomes) FROM (
    SELECT id FROM retrysafe_outcomes WHERE id > :after ORDER BY id LIMIT :rows
);

-- name: select_audit_between
-- The outcomes of a stretch of ids that were settled between two instants, with what is known of
-- their keys.
SELECT
    o.digest, k.caller, k.key, k.operation,
    o.token, o.attempt, o.state, o.form, o.head, o.body, o.settled_at_ms, o.audit_ends_at_ms
FROM retrysafe_outcomes AS o LEFT JOIN retrysafe_keys AS k ON k.digest = o.digest
WHERE o.id > :after AND o.id <= :last AND o.settled_at_ms >= :first_ms AND o.settled_at_ms < :past_ms
ORDER BY o.id;

-- name: select_last_outcome
-- The newest ending of a key's present life. A claim leaves the id of the last one where it was, so
-- nothing is scanned; the sweep may have removed it, and its id may be of another key since.
SELECT
    o.token, o.attempt, o.state, o.form, o.head, o.body, o.settled_at_ms, o.audit_ends_at_ms
FROM retrysafe_keys AS k
JOIN retrysafe_outcomes AS o ON o.id = k.outcome_id AND o.digest = k.digest
WHERE k.digest = ? AND k.caller = ? AND k.key = ? AND o.settled_at_ms >= k.first_claimed_at_ms;
