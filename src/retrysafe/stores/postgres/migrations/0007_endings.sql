-- oldest schema that still works: 1

-- How the attempts of a key's life ended. A release that does not know these columns leaves them as
-- they are, so none is believed further than that allows: `releases`, the attempts before this one
-- that ended with a word, is never more than there were; the mark that nothing happened is the token
-- of the claim that ended so; whether an earlier attempt may have left effects is told by the claim
-- that follows it; and a request was corrected in this life only after its first claim.
-- Constant defaults: no row is rewritten.
ALTER TABLE {schema}.keys
    ADD COLUMN releases integer NOT NULL DEFAULT 0,
    ADD COLUMN is_uncertain boolean NOT NULL DEFAULT false,
    ADD COLUMN nothing_happened_token bytea,
    ADD COLUMN corrected_at_ms bigint;
