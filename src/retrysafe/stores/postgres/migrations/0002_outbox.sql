-- oldest schema that still works: 1

-- What is to be delivered, written in the transaction of the outcome or of the business write that
-- it belongs to. State 1 is waiting, 2 dead, 3 delivered, 4 discarded; the first two hold their
-- aggregate back. An entry may be claimed when due_at_ms is past: its time, the end of a back-off or
-- of a lease. Aggregates are compared byte by byte, which every database does alike and quickly.
CREATE TABLE {schema}.outbox (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    entry_key text NOT NULL,
    topic text NOT NULL,
    aggregate text COLLATE "C",
    content_type text NOT NULL,
    body bytea NOT NULL,
    caller text,
    origin text,
    state smallint NOT NULL DEFAULT 1 CHECK (state BETWEEN 1 AND 4),
    token bytea,
    attempts integer NOT NULL DEFAULT 0,
    due_at_ms bigint NOT NULL,
    staged_at_ms bigint NOT NULL,
    settled_at_ms bigint,
    expires_at_ms bigint,
    last_error text
) WITH (
    -- Every entry leaves two dead versions behind, and the claims walk over them until a vacuum.
    autovacuum_vacuum_scale_factor = 0.0,
    autovacuum_vacuum_threshold = 10000
);

-- For claiming: free entries by their time, and the first entry of every aggregate without a look
-- at the entries behind it. What is over is in neither, so a long history costs a relay nothing.
CREATE INDEX outbox_free ON {schema}.outbox (due_at_ms, id)
WHERE aggregate IS NULL AND state = 1;
CREATE INDEX outbox_aggregates ON {schema}.outbox (aggregate, id)
WHERE aggregate IS NOT NULL AND state <= 2;

-- For the sweep: only what is over expires.
CREATE INDEX outbox_expiry ON {schema}.outbox (expires_at_ms) WHERE expires_at_ms IS NOT NULL;
