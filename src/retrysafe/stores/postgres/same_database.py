"""Whether a user's connection leads to the database that the store is in.

Owns the comparison. A claim that lands in another database is seen by nobody who looks into the
store's, and the operation runs again there. Addresses and ports cannot be compared: a pooler, a
proxy and a second network card all change them. A server's system identifier is made once, and
every copy of it by replication has the same.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final
from weakref import WeakSet

from retrysafe.errors import InvalidInput, StoreError, StoreUnavailable
from retrysafe.stores.postgres.drivers.port import Conflict, Connector, Rows
from retrysafe.stores.postgres.user_connections import UserConnection

# The database's name, and the identifier of its server where the role may ask for it.
Identity = tuple[str, int | None]
# For an answer while a user's transaction is open: behind a full pooler the store's own statement
# waits for the very session that the transaction holds, and nobody else would end that.
_ASK_SECONDS: Final = 1.0
# Between two such questions while there is no answer: each may cost a block the time above.
_PAUSE_SECONDS: Final = 30.0


class SameDatabase:
    """Compares every connection with the store's once, and remembers those that are right."""

    def __init__(
        self,
        connector: Connector,
        *,
        statements: dict[str, str],
        location: str,
        doubt: Callable[[], None],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connector = connector
        self._sql = statements
        self._location = location
        # Has the store call `learn` at its next use.
        self._doubt = doubt
        self._identity: Identity | None = None
        self._monotonic = monotonic
        self._ask_again_at: float | None = None
        # Weakly: these are the users' connections, and it is not for us to keep them.
        self._known: WeakSet[Any] = WeakSet()

    async def learn(self) -> None:
        """Asks on the store's own connection where it is."""
        self._remember(await self._identity_of(self._connector.fetch))

    async def _learn_soon(self) -> None:
        """The same inside a user's transaction."""
        until = self._monotonic() + _ASK_SECONDS

        async def fetch(sql: str, _: Sequence[Any]) -> Rows:
            return await self._connector.fetch_within(max(0.0, until - self._monotonic()), sql)

        self._remember(await self._identity_of(fetch))

    def _remember(self, identity: Identity) -> None:
        if identity == self._identity:
            return
        # In this order, and a new set: a thread that has compared with what was before adds its
        # connection to the set of before.
        self._identity = identity
        self._known = WeakSet()

    async def require(self, connection: UserConnection) -> None:
        """Raises `InvalidInput` for another database, as soon as the store's is known."""
        lasting = await connection.lasting()
        known = self._known
        if lasting in known:
            return
        # A store of the other kind would stop this flow, or the event loop that it runs in.
        can_ask = connection.waits is self._connector.waits
        if self._identity is None and not (can_ask and await self._has_learned()):
            return
        theirs = await self._identity_of(connection.fetch)
        known = self._known
        if not self._is_ours(theirs):
            # The store's address may lead to another server since it was asked.
            if not can_ask:
                self._doubt()
                raise self._refusal(theirs)
            try:
                await self._learn_soon()
            except StoreError:
                # Its next use finds out.
                self._doubt()
                raise
            except Conflict as error:
                # A standby cancels whatever is in the way of what it replays.
                self._doubt()
                raise StoreUnavailable(f"{self._location} does not answer: {error}") from error
            known = self._known
            if not self._is_ours(theirs):
                raise self._refusal(theirs)
        try:
            known.add(lasting)
        except TypeError:
            # No weak reference to such a connection: it is asked every time.
            return

    async def _has_learned(self) -> bool:
        """Asks the store inside a user's transaction: one does, the others go on without.

        Behind a pooler each of them holds a session that the store's own statement may be waiting
        for. A store that does not answer refuses nobody; it is asked again after a pause, and its
        first use tells too where it is.
        """
        now = self._monotonic()
        if self._ask_again_at is not None and now < self._ask_again_at:
            return False
        self._ask_again_at = now + _PAUSE_SECONDS
        try:
            await self._learn_soon()
        except (StoreError, Conflict):
            return False
        return True

    def _is_ours(self, theirs: Identity) -> bool:
        assert self._identity is not None  # Asked for before anything is compared.
        ours = self._identity
        # Without the right to ask for a server's identifier, its databases' names must do.
        return ours[0] == theirs[0] and (None in (ours[1], theirs[1]) or ours[1] == theirs[1])

    def _refusal(self, theirs: Identity) -> InvalidInput:
        assert self._identity is not None
        ours, (name, _) = self._identity[0], theirs
        where = f"database {name!r}" if name != ours else f"database {name!r} of another server"
        return InvalidInput(
            f"this connection is to {where}, and the store is {self._location}: outcome and "
            "business write must be in one database"
        )

    async def _identity_of(
        self, fetch: Callable[[str, Sequence[Any]], Awaitable[Rows]]
    ) -> Identity:
        ((name, may_ask),) = await fetch(self._sql["database"], ())
        if not may_ask:
            return str(name), None
        ((identifier,),) = await fetch(self._sql["system_identifier"], ())
        return str(name), int(identifier)
