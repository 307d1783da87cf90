-- What the store asks about its server, and what `retrysafe doctor` looks at. They read only.

-- name: now_ms
-- The server's clock.
SELECT {now_ms};

-- name: read_settings
-- The settings that durability and cleanup rely on, as this session has them.
SELECT
    current_setting('server_version_num')::integer,
    current_setting('fsync'), current_setting('full_page_writes'),
    current_setting('synchronous_commit'), current_setting('autovacuum');

-- name: read_dead_host_settings
-- What ends the transaction of a host that died, as this session has it: in milliseconds, the
-- keepalives in seconds.
SELECT name, setting::bigint FROM pg_catalog.pg_settings
WHERE name IN (
    'idle_in_transaction_session_timeout', 'tcp_keepalives_idle', 'tcp_keepalives_interval',
    'tcp_keepalives_count', 'tcp_user_timeout', 'client_connection_check_interval'
);

-- name: read_replication
-- How many servers follow this one, and whether a commit waits for any of them. Who may not see what
-- a follower does is shown that it is there; backups are followers for as long as they take.
SELECT
    (SELECT count(*) FROM pg_catalog.pg_stat_replication
     WHERE coalesce(state, 'streaming') <> 'backup'),
    current_setting('synchronous_standby_names'), current_setting('synchronous_commit');

-- name: read_indexes
-- The indexes of the schema that statements can use.
SELECT c.relname::text
FROM pg_catalog.pg_index AS i
JOIN pg_catalog.pg_class AS c ON c.oid = i.indexrelid
JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
WHERE n.nspname = $1 AND i.indisvalid;

-- name: read_table_options
-- Which of the schema's tables would be emptied by a crash, or are never vacuumed.
SELECT
    n.nspname || '.' || c.relname,
    c.relpersistence = 'u',
    coalesce('autovacuum_enabled=false' = ANY (c.reloptions), false)
        OR coalesce('autovacuum_enabled=off' = ANY (c.reloptions), false)
FROM pg_catalog.pg_class AS c
JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
WHERE n.nspname = $1 AND c.relkind = 'r'
ORDER BY c.relname;
