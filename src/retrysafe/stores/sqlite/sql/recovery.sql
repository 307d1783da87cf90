-- The statements of recovery. As everywhere, those that write rely on BEGIN IMMEDIATE.

-- name: keep_arguments
-- Stores what an operation is called with, in the transaction of its claim. Within one life of the
-- key the first ones stay; a row that an earlier life has left behind is replaced.
INSERT INTO retrysafe_arguments (digest, first_claimed_at_ms, form, head, body)
VALUES (?, ?, ?, ?, ?)
ON CONFLICT (digest) DO UPDATE SET
    first_claimed_at_ms = excluded.first_claimed_at_ms,
    form = excluded.form, head = excluded.head, body = excluded.body
WHERE retrysafe_arguments.first_claimed_at_ms <> excluded.first_claimed_at_ms;

-- name: select_arguments
-- What the operation of this life of the key was called with.
SELECT form, head, body FROM retrysafe_arguments WHERE digest = ? AND first_claimed_at_ms = ?;

-- name: delete_arguments
-- Removes the arguments of a key, in the transaction that ends its operation, removes the key or
-- starts its new life.
DELETE FROM retrysafe_arguments WHERE digest = ?;

-- name: select_abandoned
-- Pending records whose lease has ended. A scan on purpose, as for every other listing.
SELECT
    digest, caller, key, operation, rule, fingerprint, state, token, attempt,
    first_claimed_at_ms, claimed_at_ms, lease_ends_at_ms, settled_at_ms, expires_at_ms, owner,
    releases, is_uncertain, {nothing_happened}, corrected_at_ms
FROM retrysafe_keys AS k WHERE state = 1 AND lease_ends_at_ms <= ?
ORDER BY lease_ends_at_ms, digest LIMIT ?;

-- name: select_resumable
-- Those of some operations that have arguments, by their digests. The table of arguments is small:
-- it leads. The arguments of operations that are not asked for are not read.
SELECT
    k.digest, k.caller, k.key, k.operation, k.rule, k.fingerprint, k.state, k.token, k.attempt,
    k.first_claimed_at_ms, k.claimed_at_ms, k.lease_ends_at_ms, k.settled_at_ms, k.expires_at_ms,
    k.owner, k.releases, k.is_uncertain, {nothing_happened}, k.corrected_at_ms,
    a.form, a.head, a.body
FROM retrysafe_arguments AS a
CROSS JOIN retrysafe_keys AS k
WHERE a.digest > :after AND k.digest = a.digest AND k.first_claimed_at_ms = a.first_claimed_at_ms
  AND k.state = 1 AND k.lease_ends_at_ms <= :now_ms
  AND k.operation IN (SELECT value FROM json_each(:operations))
ORDER BY a.digest LIMIT :limit;

-- name: delete_needless_arguments
-- Removes a bounded number of arguments of operations that have ended for good, or whose life is
-- over. A released key keeps its own: the next attempt may be abandoned too.
DELETE FROM retrysafe_arguments WHERE digest IN (
    SELECT a.digest FROM retrysafe_arguments AS a
    LEFT JOIN retrysafe_keys AS k
        ON k.digest = a.digest AND k.first_claimed_at_ms = a.first_claimed_at_ms
    WHERE k.digest IS NULL OR k.state IN (2, 3)
    LIMIT ?
);
