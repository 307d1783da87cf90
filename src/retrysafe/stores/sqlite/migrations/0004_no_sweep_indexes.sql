-- oldest schema that still works: 1

-- Every operation paid for these two, and only the sweep used them. It walks over the rows by their
-- ids now. A release that does not know this still sweeps, but reads the tables under the write lock.
DROP INDEX IF EXISTS retrysafe_keys_expiry;
DROP INDEX IF EXISTS retrysafe_outcomes_audit;
