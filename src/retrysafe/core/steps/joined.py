"""Steps in the user's transaction: each is recorded there, and counts once that has committed.

Owns the savepoint around every try of such a step, and the question what became of its transaction.
It must not know stores, threads or loops.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from retrysafe.core.atomic.block import storable_payload
from retrysafe.core.atomic.complete_in import undo_quietly
from retrysafe.core.call import Call
from retrysafe.core.lease import Lease
from retrysafe.core.model import Decision, Step, StepWrite
from retrysafe.core.one_call import OneCall
from retrysafe.core.ports import Executor, Fate, Transaction
from retrysafe.core.steps.history import StepHistory
from retrysafe.core.steps.taken import TakenStep
from retrysafe.core.steps.writer import StepWriter
from retrysafe.errors import InvalidInput


class _JoinedStep:
    """A step that was recorded in the user's transaction, until that has ended."""

    __slots__ = ("connection", "transaction", "write")

    def __init__(self, connection: object, transaction: Transaction, write: StepWrite) -> None:
        self.connection = connection
        self.transaction = transaction
        self.write = write


class JoinedSteps:
    """The steps of one attempt that were recorded in transactions of the user."""

    __slots__ = ("_book", "_by_name", "_call", "_executor", "_finish", "_leases", "_writer")

    def __init__(
        self,
        executor: Executor,
        call: Call,
        leases: tuple[Lease, ...],
        book: StepHistory,
        writer: StepWriter,
        finish: Callable[[TakenStep], None],
    ) -> None:
        self._executor = executor
        self._call = call
        self._leases = leases
        self._book = book
        self._writer = writer
        # Takes note that a step has run.
        self._finish = finish
        self._by_name: dict[str, _JoinedStep] = {}

    def making(self, taken: TakenStep) -> Callable[[OneCall], Awaitable[Any]]:
        """What makes one try of a step in the user's transaction, and records it there.

        Each try has a savepoint of its own, so that nothing of a failed one stays behind.
        """
        connection, outcome_codec = taken.options.connection, taken.outcome_codec
        assert outcome_codec is not None  # It is known before the call is made.
        transaction = self._executor.join_step(connection)
        # Before the record is written: the next renewal comes at any moment.
        for lease in self._leases:
            lease.is_joined = True

        async def run_once(made: OneCall) -> Any:
            await transaction.begin()
            try:
                value = await self._executor.perform_step(taken.call, made)
                payload = storable_payload(self._call, outcome_codec, value)
                write = self._writer.write_of(Step(taken.name, taken.position, payload))
                for each in (*self._writer.writes_around(write.step), write):
                    if await transaction.record_step(each) is Decision.LOST:
                        raise self._writer.lost()
            except BaseException:
                await undo_quietly(transaction)
                raise
            # Before it is kept: a signal's handler may raise right after that, and whoever asks for
            # the step again must not run it a second time in the same transaction.
            self._by_name[taken.name] = _JoinedStep(connection, transaction, write)
            with self._executor.step_lock:
                self._finish(taken)
            await transaction.keep()
            # From now on the transaction itself keeps renewals off the record, for as long as it is
            # open; then they go there again, where the previous release looks. Not after a failed
            # try: the next one would meet a record that was renewed since its snapshot.
            for lease in self._leases:
                lease.is_joined = lease.may_be_settled
            return value

        return run_once

    async def look_after(self, connection: object = None) -> None:
        """Finds out what became of the transactions.

        Raises `InvalidInput` while one is open on another connection than the given one: it has
        locked the record, so whatever is to be written now would wait for it for ever.
        """
        for name, joined in list(self._by_name.items()):
            fate = await joined.transaction.step_fate(joined.write)
            if fate is Fate.OPEN:
                if joined.connection is connection:
                    continue
                text = self._call.key.text
                raise InvalidInput(
                    f"the transaction of step {name!r} of {text!r} is still open: commit it "
                    "before the next step outside it, and before the operation ends",
                    key=text,
                )
            del self._by_name[name]
            with self._executor.step_lock:
                if fate is Fate.UNDONE:
                    self._book.take_back(name)
                else:
                    self._book.committed.add(name)
