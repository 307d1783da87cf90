-- oldest schema that still works: 1

-- Who released or expired a key, and why. Kept for a year by the sweep, beyond the key's own record.
CREATE TABLE retrysafe_operator_actions (
    id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    digest BLOB NOT NULL,
    caller TEXT NOT NULL,
    key TEXT NOT NULL,
    command TEXT NOT NULL,
    condition TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    operator TEXT NOT NULL,
    reason TEXT NOT NULL,
    acted_at_ms INTEGER NOT NULL
);

CREATE INDEX retrysafe_operator_actions_digest ON retrysafe_operator_actions (digest);
