-- oldest schema that still works: 1

-- For counting: dead entries are few, and nobody should walk over the delivered ones to find them.
CREATE INDEX retrysafe_outbox_dead ON retrysafe_outbox (id) WHERE state = 2;
