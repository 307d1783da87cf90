-- oldest schema that still works: 1

-- For counting: dead entries are few, and nobody should walk over the delivered ones to find them. As
-- with keys_claimed, a large table is not locked for as long as it is read.
DO $index$
BEGIN
    IF pg_relation_size('{schema}.outbox') < 67108864 THEN
        CREATE INDEX outbox_dead ON {schema}.outbox (id) WHERE state = 2;
    ELSE
        RAISE WARNING 'the index outbox_dead is not built, because {schema}.outbox is large: run retrysafe doctor';
    END IF;
END
$index$;
