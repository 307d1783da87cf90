-- oldest schema that still works: 1

-- For lists by the last claim. It keeps one range of instants for 64 pages: a claim changes it once
-- for a batch, and no completion or renewal does, because neither changes the instant of the claim.
-- Building it keeps all writers out, renewals of leases too, for as long as the table is read: past a
-- lease, healthy owners would lose their keys. So a large table is left to doctor, which tells how to
-- build it beside the work; lists are only slower until then.
DO $index$
BEGIN
    IF pg_relation_size('{schema}.keys') < 67108864 THEN
        CREATE INDEX keys_claimed ON {schema}.keys USING brin (claimed_at_ms) WITH (pages_per_range = 64);
    ELSE
        RAISE WARNING 'the index keys_claimed is not built, because {schema}.keys is large: run retrysafe doctor';
    END IF;
END
$index$;

-- The last walk over all keys that looked for pending ones, and which it met: 16 bytes for each. Keys
-- that were claimed since then are found by the instant of their claim, so nobody has to walk again.
CREATE TABLE {schema}.pending_walk (
    is_only boolean NOT NULL PRIMARY KEY DEFAULT true CHECK (is_only),
    started_at_ms bigint NOT NULL,
    ended_at_ms bigint NOT NULL,
    -- Whether all that were met are listed.
    is_whole boolean NOT NULL,
    digests bytea NOT NULL
);

-- Who released or expired a key, and why. Kept for a year by the sweep, beyond the key's own record.
CREATE TABLE {schema}.operator_actions (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    digest bytea NOT NULL,
    caller text NOT NULL,
    key text NOT NULL,
    command text NOT NULL,
    condition text NOT NULL,
    attempt integer NOT NULL,
    operator text NOT NULL,
    reason text NOT NULL,
    acted_at_ms bigint NOT NULL
);

CREATE INDEX operator_actions_digest ON {schema}.operator_actions (digest);
CREATE INDEX operator_actions_time ON {schema}.operator_actions USING brin (acted_at_ms);
