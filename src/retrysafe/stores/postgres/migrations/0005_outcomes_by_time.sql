-- oldest schema that still works: 1

-- Outcomes are found by the end of their audit, which the key's row knows, and then by the digest. In
-- this order new entries go to the end of the index. By the digest alone each of them went to a page
-- of its own somewhere in the day, which after every checkpoint is written to the WAL as a whole.
CREATE INDEX outcomes_place ON {schema}.outcomes (audit_ends_at_ms, digest);
DROP INDEX {schema}.outcomes_default_audit;
DROP INDEX {schema}.outcomes_digest;

-- For the audit of a key whose row is gone: says of each few pages whether a digest may be in them.
-- An outcome costs it next to nothing, because pages are entered when a vacuum comes by; until then
-- they are read.
CREATE INDEX outcomes_digests ON {schema}.outcomes
USING brin (digest bytea_bloom_ops (n_distinct_per_range = 1000)) WITH (pages_per_range = 32);
