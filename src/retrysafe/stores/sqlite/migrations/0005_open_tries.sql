-- oldest schema that still works: 1

-- A try counts when its delivery begins. 1 and 2 mark one whose end nobody has told yet, begun beside
-- others or alone: what ended its relay may be this entry, and it is delivered alone. A release that
-- does not know this counts at the claim and leaves the mark as it is.
ALTER TABLE retrysafe_outbox ADD COLUMN open_try INTEGER NOT NULL DEFAULT 0;
