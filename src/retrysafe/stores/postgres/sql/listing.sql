-- Lists for operators. They take no lock, and see what is committed when they begin. The instant is
-- given, so that all statements of one list agree; and only what was found is looked at closely.

-- name: list_claimed
-- Records whose last claim is between two instants, the newest first, behind a digest at the later
-- one. The index of claims says which pages to read.
SELECT
    $9::bigint, k.digest, k.caller, k.key, k.operation, k.rule, k.fingerprint, k.state, k.token,
    k.attempt, k.first_claimed_at_ms, k.claimed_at_ms, {lease_ends_at_ms}, k.settled_at_ms,
    k.expires_at_ms, k.owner, k.releases, k.is_uncertain, {nothing_happened}, k.corrected_at_ms
FROM (
    SELECT * FROM {schema}.keys AS k
    WHERE k.claimed_at_ms BETWEEN $6::bigint AND $7::bigint
      AND (k.claimed_at_ms < $7::bigint OR k.digest > $8::bytea)
      AND ($1::text IS NULL OR k.caller = $1)
      AND starts_with(k.key, $2)
      AND ($5::text IS NULL OR k.operation = $5)
      AND (cardinality($3::text[]) = 0 OR CASE
            WHEN k.state = 1 AND {lease_ends_at_ms} > $9::bigint THEN 'running'
            WHEN k.state = 1 THEN 'abandoned'
            WHEN k.expires_at_ms <= $9::bigint THEN 'outlived'
            WHEN k.state = 2 THEN 'succeeded'
            WHEN k.state = 3 THEN 'failed'
            ELSE 'released'
        END = ANY ($3::text[]))
    ORDER BY k.claimed_at_ms DESC, k.digest
    LIMIT $4
) AS k
ORDER BY k.claimed_at_ms DESC, k.digest;

-- name: table_pages
-- How many pages a walk goes over.
SELECT (pg_relation_size('{schema}.keys') / current_setting('block_size')::bigint)::bigint;

-- name: pending_in_pages
-- Pending records in a range of pages. An index on the state or the lease would turn every completion
-- and every renewal into a non-HOT update.
SELECT
    {now_ms}, k.digest, k.caller, k.key, k.operation, k.rule, k.fingerprint, k.state, k.token,
    k.attempt, k.first_claimed_at_ms, k.claimed_at_ms, {lease_ends_at_ms}, k.settled_at_ms,
    k.expires_at_ms, k.owner, k.releases, k.is_uncertain, {nothing_happened}, k.corrected_at_ms
FROM {schema}.keys AS k
WHERE k.ctid >= $1::text::tid AND k.ctid < $2::text::tid AND k.state = 1
LIMIT $3;

-- name: pending_since
-- Pending records that were claimed since an instant.
SELECT
    {now_ms}, k.digest, k.caller, k.key, k.operation, k.rule, k.fingerprint, k.state, k.token,
    k.attempt, k.first_claimed_at_ms, k.claimed_at_ms, {lease_ends_at_ms}, k.settled_at_ms,
    k.expires_at_ms, k.owner, k.releases, k.is_uncertain, {nothing_happened}, k.corrected_at_ms
FROM {schema}.keys AS k
WHERE k.claimed_at_ms >= $1::bigint AND k.state = 1
LIMIT $2;

-- name: pending_of
-- Those of some digests that are pending still.
SELECT
    {now_ms}, k.digest, k.caller, k.key, k.operation, k.rule, k.fingerprint, k.state, k.token,
    k.attempt, k.first_claimed_at_ms, k.claimed_at_ms, {lease_ends_at_ms}, k.settled_at_ms,
    k.expires_at_ms, k.owner, k.releases, k.is_uncertain, {nothing_happened}, k.corrected_at_ms
FROM {schema}.keys AS k
WHERE k.digest = ANY ($1::bytea[]) AND k.state = 1;

-- name: read_walk
-- The last walk over all keys that looked for pending ones.
SELECT started_at_ms, ended_at_ms, is_whole, digests FROM {schema}.pending_walk;

-- name: note_walk
-- Keeps what a walk has met; a rival that began later stays.
INSERT INTO {schema}.pending_walk AS w (started_at_ms, ended_at_ms, is_whole, digests)
VALUES ($1, {now_ms}, $2, $3)
ON CONFLICT (is_only) DO UPDATE SET
    started_at_ms = excluded.started_at_ms, ended_at_ms = excluded.ended_at_ms,
    is_whole = excluded.is_whole, digests = excluded.digests
WHERE w.started_at_ms <= excluded.started_at_ms;

-- name: sample_records
-- The records of some pages, chosen at random: a share of all pages, in percent.
SELECT
    {now_ms}, k.digest, k.caller, k.key, k.operation, k.rule, k.fingerprint, k.state, k.token,
    k.attempt, k.first_claimed_at_ms, k.claimed_at_ms, {lease_ends_at_ms}, k.settled_at_ms,
    k.expires_at_ms, k.owner, k.releases, k.is_uncertain, {nothing_happened}, k.corrected_at_ms
FROM {schema}.keys AS k TABLESAMPLE SYSTEM ($1::real)
LIMIT $2;
