"""Group commit: rows that arrive while a commit is under way leave together in the next one."""
