-- oldest schema that still works: 1

-- What resumable operations were called with, until they have ended. Bound to one life of the key by
-- the instant of its first claim: a release that does not know this table may leave a row behind,
-- and nobody must resume a new life with the arguments of an old one.
CREATE TABLE retrysafe_arguments (
    digest BLOB NOT NULL PRIMARY KEY,
    first_claimed_at_ms INTEGER NOT NULL,
    form TEXT NOT NULL,
    head BLOB NOT NULL,
    body BLOB NOT NULL
) WITHOUT ROWID;
