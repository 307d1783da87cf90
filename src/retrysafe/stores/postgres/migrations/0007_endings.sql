-- oldest schema that still works: 1

-- How the attempts of a key's life ended. A release that does not know these columns leaves them as
-- they are, so each says itself whether it still holds: `releases`, the attempts before this one that
-- ended with a word, is never more than there were; the mark that nothing happened is the token of
-- the claim that ended so; and a request was corrected in this life only after its first claim.
-- Constant defaults: no row is rewritten.
ALTER TABLE {schema}.keys
    ADD COLUMN releases integer NOT NULL DEFAULT 0,
    ADD COLUMN nothing_happened_token bytea,
    ADD COLUMN corrected_at_ms bigint;
