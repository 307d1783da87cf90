-- oldest schema that still works: 1

-- One small row per (caller, key), and no payload. The digest identifies the pair; the texts are
-- kept so that a collision of digests is found and never served. Rows are appended, and only the
-- small index of digests is random: a batch that settles recent claims touches few pages.
CREATE TABLE retrysafe_keys (
    id INTEGER NOT NULL PRIMARY KEY,
    digest BLOB NOT NULL UNIQUE,
    caller TEXT NOT NULL,
    key TEXT NOT NULL,
    operation TEXT NOT NULL,
    rule INTEGER NOT NULL,
    fingerprint BLOB NOT NULL,
    state INTEGER NOT NULL CHECK (state BETWEEN 1 AND 4),
    token BLOB NOT NULL,
    attempt INTEGER NOT NULL,
    first_claimed_at_ms INTEGER NOT NULL,
    claimed_at_ms INTEGER NOT NULL,
    lease_ends_at_ms INTEGER NOT NULL,
    settled_at_ms INTEGER,
    expires_at_ms INTEGER,
    outcome_id INTEGER,
    owner TEXT NOT NULL
);

-- For the sweep. A pending record has no expiry, so it is not even in the index.
CREATE INDEX retrysafe_keys_expiry ON retrysafe_keys (expires_at_ms) WHERE expires_at_ms IS NOT NULL;

-- Every ending of every attempt, until its audit window ends. A key that starts a new life keeps
-- the audit of its past, because the token tells the lives apart. There is no index on the digest:
-- only operators look for a key's audit, and every operation would pay for it.
CREATE TABLE retrysafe_outcomes (
    id INTEGER NOT NULL PRIMARY KEY,
    digest BLOB NOT NULL,
    token BLOB NOT NULL,
    attempt INTEGER NOT NULL,
    state INTEGER NOT NULL,
    form TEXT NOT NULL,
    head BLOB NOT NULL,
    body BLOB NOT NULL,
    settled_at_ms INTEGER NOT NULL,
    audit_ends_at_ms INTEGER NOT NULL
);

CREATE INDEX retrysafe_outcomes_audit ON retrysafe_outcomes (audit_ends_at_ms);

-- The results of finished steps, removed together with their key.
CREATE TABLE retrysafe_steps (
    digest BLOB NOT NULL,
    name TEXT NOT NULL,
    position INTEGER NOT NULL,
    form TEXT NOT NULL,
    head BLOB NOT NULL,
    body BLOB NOT NULL,
    recorded_at_ms INTEGER NOT NULL,
    PRIMARY KEY (digest, name)
) WITHOUT ROWID;

-- What people query: readable states, and JSON bodies as JSON.
CREATE VIEW retrysafe_records AS
SELECT
    k.caller, k.key, k.operation, k.attempt, k.owner,
    CASE k.state WHEN 1 THEN 'pending' WHEN 2 THEN 'succeeded' WHEN 3 THEN 'failed' ELSE 'released' END AS state,
    k.claimed_at_ms, k.lease_ends_at_ms, k.settled_at_ms, k.expires_at_ms,
    o.form, o.body,
    CASE WHEN o.form <> 'bytes.1' AND json_valid(CAST(o.body AS TEXT)) THEN json(CAST(o.body AS TEXT)) END AS body_json
FROM retrysafe_keys AS k
LEFT JOIN retrysafe_outcomes AS o ON o.id = k.outcome_id AND o.token = k.token;
