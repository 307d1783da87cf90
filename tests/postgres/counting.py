"""Counts what a store asks its server."""

from __future__ import annotations

from retrysafe.stores.postgres.drivers.port import Locked


class Counted:
    """Counts what goes through the port to the server, and the locks that it waited for in vain."""

    def __init__(self, store):
        self.statements = 0
        self.locked = 0
        fetch, fetch_renewal = store._connector.fetch, store._connector.fetch_renewal

        async def counting(sql, params=()):
            self.statements += 1
            try:
                return await fetch(sql, params)
            except Locked:
                self.locked += 1
                raise

        async def counting_renewals(seconds, sql, params=()):
            self.statements += 1
            return await fetch_renewal(seconds, sql, params)

        store._connector.fetch = counting
        store._connector.fetch_renewal = counting_renewals
