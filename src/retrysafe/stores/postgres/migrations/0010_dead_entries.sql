-- oldest schema that still works: 1

-- For counting: dead entries are few, and nobody should walk over the delivered ones to find them.
CREATE INDEX outbox_dead ON {schema}.outbox (id) WHERE state = 2;
