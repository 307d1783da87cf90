-- The statements of the sweep. Looking relies on nothing and takes no lock; whatever removes relies on
-- BEGIN IMMEDIATE and decides anew. One row comes back for thousands: the binding gives up the
-- interpreter lock for every row that it fetches.

-- name: look_at_keys
-- How far a bounded number of rows reaches, and which of them have outlived their windows.
SELECT max(id), json_group_array(id) FILTER (WHERE expires_at_ms <= :now_ms)
FROM (
    SELECT id, expires_at_ms FROM retrysafe_keys WHERE id > :after ORDER BY id LIMIT :rows
);

-- name: look_at_outcomes
-- The same for outcomes, with how many rows there are and when the first of them ends.
SELECT
    max(id), count(*), min(audit_ends_at_ms),
    json_group_array(id) FILTER (WHERE audit_ends_at_ms <= :now_ms)
FROM (
    SELECT id, audit_ends_at_ms FROM retrysafe_outcomes
    WHERE id > :after AND id <= :upto ORDER BY id LIMIT :rows
);

-- name: look_at_others
-- Whether there are entries, arguments or operators' actions to remove.
SELECT
    EXISTS (SELECT 1 FROM retrysafe_outbox WHERE expires_at_ms <= :now_ms)
    OR EXISTS (
        SELECT 1 FROM (SELECT acted_at_ms FROM retrysafe_operator_actions ORDER BY id LIMIT 1)
        WHERE acted_at_ms <= :past_ms
    )
    OR EXISTS (
        SELECT 1 FROM retrysafe_arguments AS a
        LEFT JOIN retrysafe_keys AS k
            ON k.digest = a.digest AND k.first_claimed_at_ms = a.first_claimed_at_ms
        WHERE k.digest IS NULL OR k.state IN (2, 3)
    );

-- name: still_outlived
-- Which of the keys that were looked at may go. Under the write lock: since the look one of them may
-- have been claimed anew, or its row may be another key's. A pending record is never among them.
SELECT json_group_array(id) FROM retrysafe_keys
WHERE id IN (SELECT value FROM json_each(?)) AND expires_at_ms <= ? AND state <> 1;

-- name: delete_steps_of_keys
-- Removes the steps of keys, in the transaction that removes the keys.
DELETE FROM retrysafe_steps WHERE digest IN (
    SELECT digest FROM retrysafe_keys WHERE id IN (SELECT value FROM json_each(?))
);

-- name: delete_arguments_of_keys
-- Removes the arguments of keys, in the transaction that removes the keys.
DELETE FROM retrysafe_arguments WHERE digest IN (
    SELECT digest FROM retrysafe_keys WHERE id IN (SELECT value FROM json_each(?))
);

-- name: delete_keys
-- Removes keys whose steps and arguments were just removed.
DELETE FROM retrysafe_keys WHERE id IN (SELECT value FROM json_each(?));

-- name: delete_outcomes
-- Removes outcomes that were looked at, if they are past their audit window.
DELETE FROM retrysafe_outcomes
WHERE id IN (SELECT value FROM json_each(?)) AND audit_ends_at_ms <= ?;
