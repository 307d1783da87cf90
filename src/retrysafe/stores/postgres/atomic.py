"""Atomic mode on PostgreSQL: retrysafe's part of a user's transaction.

Owns the order of the statements on the user's connection, and the lock that stands for a running
atomic block. Decisions are the core's, made with the server's clock. The driver's errors pass
through as they are: they say what became of the user's transaction.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any, Final

from retrysafe.core import transitions
from retrysafe.core.atomic.complete_in import undo_quietly
from retrysafe.core.keys.key import Key
from retrysafe.core.model import (
    ClaimAnswer,
    ClaimRequest,
    Decision,
    Payload,
    Record,
    Settlement,
    StagedEntry,
    State,
    StepWrite,
)
from retrysafe.core.ports import Fate, Waits
from retrysafe.errors import (
    SchemaMissing,
    StoreNotWritable,
    StoreUnavailable,
    TransactionMissing,
)
from retrysafe.stores.postgres import rows
from retrysafe.stores.postgres.drivers.port import (
    MISSING_CODES,
    READ_ONLY_CODE,
    Conflict,
    Connector,
    RowRefused,
)
from retrysafe.stores.postgres.naming import migrate_command
from retrysafe.stores.postgres.outbox import stage_parameters
from retrysafe.stores.postgres.reading import look_before_takeovers
from retrysafe.stores.postgres.same_database import SameDatabase
from retrysafe.stores.postgres.user_connections import UserConnection
from retrysafe.transactions import sqlstate_of

_LOCK_NOT_AVAILABLE: Final = "55P03"
_NO_TRANSACTION_CODES: Final = ("25P01", "3B001")
# What `pg_xact_status` says to the id of a transaction that is yet to come.
_UNKNOWN_TRANSACTION: Final = "22023"
# Only a leased claim or an operator can change a record under our lock, so a few rounds suffice.
_ROUNDS_LIMIT: Final = 20


def lock_number(schema: str, digest: bytes) -> int:
    """The advisory lock of a key: its digest folded to 64 bits, apart for each schema.

    Two keys that share a number only wait for each other; what is replayed is decided by the full
    digest and the stored text.
    """
    folded = hashlib.blake2b(digest, digest_size=8, key=schema.encode(), person=b"retrysafe lock")
    return int.from_bytes(folded.digest(), "big", signed=True)


class PostgresTransaction:
    """A user's transaction on PostgreSQL."""

    def __init__(
        self,
        connection: UserConnection,
        *,
        connector: Connector,
        same_database: SameDatabase,
        statements: dict[str, str],
        schema_name: str,
        location: str,
    ) -> None:
        self._connection = connection
        self._connector = connector
        self._same_database = same_database
        self._sql = statements
        self._schema_name = schema_name
        self._location = location
        self._transaction_id: str | None = None

    @property
    def waits(self) -> Waits:
        """As the user's connection does."""
        return self._connection.waits

    # The frame around everything that is written.

    async def begin(self) -> None:
        """Sets a savepoint; without a transaction there can be none.

        Raises `InvalidInput` on a connection to another database, and leaves it as it was.
        """
        await self._connection.catch_up()
        try:
            await self._connection.begin_savepoint()
        except Exception as error:
            if sqlstate_of(error) in _NO_TRANSACTION_CODES:
                raise TransactionMissing(
                    "this connection has no open transaction, so nothing could commit together "
                    "with your writes: open one around the block"
                ) from error
            raise
        try:
            await self._same_database.require(self._connection)
        except BaseException:
            await undo_quietly(self)
            raise

    async def keep(self) -> None:
        """Releases the savepoint."""
        await self._connection.catch_up()
        try:
            await self._connection.release_savepoint()
        except Exception as error:
            if sqlstate_of(error) in _NO_TRANSACTION_CODES:
                raise TransactionMissing(
                    "the transaction ended inside the block: commit or roll back after it"
                ) from error
            raise

    async def undo(self) -> None:
        """Rolls back to the savepoint, which also gives the lock back."""
        await self._connection.roll_back_savepoint()

    # The claim.

    async def lock(self, key: Key, wait_seconds: float | None) -> bool:
        """Takes the key's lock, at once or within the time."""
        number = self._lock_number(key)
        if wait_seconds is None:
            ((is_ours,),) = await self._fetch("try_lock", number)
            return bool(is_ours)
        # Zero would mean no limit.
        limit_ms = max(1, math.ceil(wait_seconds * 1000))
        ((earlier, _),) = await self._fetch("limit_lock_wait", f"{limit_ms}ms")
        try:
            await self._fetch("wait_for_lock", number)
        except Exception as error:
            if sqlstate_of(error) == _LOCK_NOT_AVAILABLE:
                # The transaction takes no statement now; rolling back to the savepoint mends it,
                # and restores the bound as well.
                return False
            raise
        await self._fetch("restore_lock_wait", earlier)
        return True

    def _lock_number(self, key: Key) -> int:
        return lock_number(self._schema_name, key.digest)

    async def look(self, request: ClaimRequest) -> ClaimAnswer:
        """The table's answer to a claim, without making it."""
        found = await self._read(request.key)
        record, payload, now_ms = (None, None, 0) if found is None else found
        return _decided(record, payload, request, now_ms)[1]

    async def claim(self, request: ClaimRequest) -> ClaimAnswer:
        """Claims a key: a new row, or the one that is there by comparing what is replaced."""
        key = request.key
        for _ in range(_ROUNDS_LIMIT):
            inserted = await self._fetch("insert_record", *rows.claim_row(request))
            if inserted:
                return transitions.admitted(request, inserted[0][0])
            found = await self._read(key)
            if found is None:
                continue  # Swept away in between, so the key is free again.
            record, payload, now_ms = found
            changed, answer = _decided(record, payload, request, now_ms)
            if changed is None:
                return answer
            if record.state is State.PENDING and not await self._fetch("lock_record", key.digest):
                # Its owner may be completing it in an open transaction, whatever its lease says.
                return rows.in_flight()
            is_new = transitions.is_new_request(record, changed, answer.decision)
            ((count,),) = await self._fetch(
                "replace_record", *rows.replacement(record, changed, is_new_request=is_new)
            )
            if count:
                return answer
        raise StoreUnavailable("the record changed under us again and again", key=key.text)

    async def sees_changes(self) -> bool:
        """Only READ COMMITTED reads with a new snapshot every time."""
        ((isolation,),) = await self._fetch("isolation")
        return str(isolation) in ("read committed", "read uncommitted")

    async def _read(self, key: Key) -> tuple[Record, Payload | None, int] | None:
        found = await self._fetch("read_records", [key.digest], *rows.EVERY_DAY)
        if not found:
            return None
        read = rows.found_row(found[0])
        await look_before_takeovers(self._fetch, [read])
        return read

    # The outcome.

    async def settle(self, settlement: Settlement) -> Decision:
        """Writes the ending, if the token holds the key."""
        payload = settlement.payload
        assert payload is not None  # Only endings are written in a user's transaction.
        settled = await self._fetch(
            "settle_record",
            settlement.key.digest,
            settlement.token,
            settlement.kind.value,
            settlement.active_ms,
            settlement.audit_ms,
            payload.form,
            payload.head,
            payload.body,
            self._lock_number(settlement.key),
            settlement.nothing_happened,
            settlement.drops_arguments,
        )
        if settled:
            self._transaction_id = str(settled[0][0])
            if settlement.entries:
                await self._stage(settlement.entries, settlement.key)
            return Decision.APPLY
        found = await self._read(settlement.key)
        record, now_ms = (None, 0) if found is None else (found[0], found[2])
        _, answer = transitions.settle(record, settlement, now_ms)
        # Not held a moment ago, so not ours now: a token never comes back.
        return Decision.CONFIRM if answer.decision is Decision.CONFIRM else Decision.LOST

    async def stage(self, entries: Sequence[StagedEntry]) -> None:
        """Writes outbox entries; the user's commit makes them deliverable."""
        await self._stage(entries, None)

    async def _stage(self, entries: Sequence[StagedEntry], key: Key | None) -> None:
        await self._fetch("stage_entries", *stage_parameters(entries, key))

    async def fate(self, settlement: Settlement) -> Fate:
        """Asks on the store's own connection; neither question waits for a lock."""
        return await self._fate(
            "count_outcomes", settlement.key.digest, settlement.token, settlement.kind.value
        )

    # Steps.

    async def record_step(self, write: StepWrite) -> Decision:
        """Records the step, if the token holds the key."""
        step, payload = write.step, write.step.payload
        held = await self._fetch(
            "record_step_joined",
            write.key.digest,
            write.token,
            step.name,
            step.position,
            payload.form,
            payload.head,
            payload.body,
            self._lock_number(write.key),
        )
        if not held:
            return Decision.LOST
        self._transaction_id = str(held[0][0])
        return Decision.APPLY

    async def step_fate(self, write: StepWrite) -> Fate:
        """Asks on the store's own connection, as `fate` does."""
        return await self._fate("count_steps", write.key.digest, write.step.name)

    async def _fate(self, counting: str, *params: Any) -> Fate:
        try:
            # In this order: what has ended before the rows are counted is seen by that count.
            if await self._is_open():
                return Fate.OPEN
            ((count, is_standby),) = await self._connector.fetch(self._sql[counting], params)
        except (RowRefused, Conflict) as error:
            raise StoreUnavailable(
                f"{self._location} does not tell what became of the transaction: {error}"
            ) from error
        if not count and is_standby:
            raise StoreNotWritable(
                f"{self._location} leads to a standby, which does not know yet what became of the "
                "transaction"
            )
        # A committed transaction may still have rolled back the savepoint that it was written in.
        return Fate.STANDS if count else Fate.UNDONE

    async def _is_open(self) -> bool:
        try:
            ((status,),) = await self._connector.fetch(
                self._sql["transaction_status"], (self._transaction_id,)
            )
        except RowRefused as error:
            if sqlstate_of(error) != _UNKNOWN_TRANSACTION:
                raise
            # The server crashed before it wrote anything down of it. A commit would have been.
            return False
        return bool(status == "in progress")

    async def _fetch(self, name: str, *params: Any) -> Sequence[Sequence[Any]]:
        # Apart: the failure of a statement that the user has queued is the user's to know.
        await self._connection.catch_up()
        try:
            return await self._connection.fetch(self._sql[name], params)
        except Exception as error:
            code = sqlstate_of(error)
            if code in MISSING_CODES:
                command = migrate_command(self._location, self._schema_name)
                raise SchemaMissing(
                    f"the connection's database has no current retrysafe schema "
                    f"{self._schema_name!r}: run {command}"
                ) from error
            if code == READ_ONLY_CODE:
                # Its pool is the user's, who alone can keep it from being used again.
                raise StoreNotWritable(
                    "your transaction takes no writes: it is read-only, or its server is a standby "
                    "or was demoted. After a failover, close this connection instead of giving it "
                    "back to its pool, and connect with target_session_attrs=read-write"
                ) from error
            raise


def _decided(
    record: Record | None, payload: Payload | None, request: ClaimRequest, now_ms: int
) -> tuple[Record | None, ClaimAnswer]:
    changed, answer = transitions.claim(record, request, now_ms)
    if answer.decision is Decision.REPLAY:
        answer.payload = payload
    return changed, answer
