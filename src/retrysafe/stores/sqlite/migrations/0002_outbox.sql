-- oldest schema that still works: 1

-- What is to be delivered, written in the transaction of the outcome or of the business write that
-- it belongs to. Numbers are never used again, so an operator's command cannot meet another entry.
-- State 1 is waiting, 2 dead, 3 delivered, 4 discarded; the first two hold their aggregate back.
-- An entry may be claimed when due_at_ms is past: its time, the end of a back-off or of a lease.
CREATE TABLE retrysafe_outbox (
    id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    entry_key TEXT NOT NULL,
    topic TEXT NOT NULL,
    aggregate TEXT,
    content_type TEXT NOT NULL,
    body BLOB NOT NULL,
    caller TEXT,
    origin TEXT,
    state INTEGER NOT NULL DEFAULT 1 CHECK (state BETWEEN 1 AND 4),
    token BLOB,
    attempts INTEGER NOT NULL DEFAULT 0,
    due_at_ms INTEGER NOT NULL,
    staged_at_ms INTEGER NOT NULL,
    settled_at_ms INTEGER,
    expires_at_ms INTEGER,
    last_error TEXT
);

-- For claiming: free entries by their time, and the first entry of every aggregate without a look
-- at the entries behind it. What is over is in neither, so a long history costs a relay nothing.
CREATE INDEX retrysafe_outbox_free ON retrysafe_outbox (due_at_ms, id)
WHERE aggregate IS NULL AND state = 1;
CREATE INDEX retrysafe_outbox_aggregates ON retrysafe_outbox (aggregate, id)
WHERE aggregate IS NOT NULL AND state <= 2;

-- For the sweep: only what is over expires.
CREATE INDEX retrysafe_outbox_expiry ON retrysafe_outbox (expires_at_ms)
WHERE expires_at_ms IS NOT NULL;
