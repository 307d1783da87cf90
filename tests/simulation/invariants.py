"""What must hold in every interleaving, judged from what the simulated world itself saw.

Owns a ledger of every claim, run, write and answer. It shares no code with the state machine on
purpose: it states again, in the plainest words, what the store and the engine may do, and a bug
or a removed guard on their side makes the two disagree.
"""

from __future__ import annotations

from enum import Enum, StrEnum
from typing import Any

from retrysafe.core.model import (
    ClaimAnswer,
    ClaimRequest,
    Decision,
    ExtendAnswer,
    Extension,
    OperatorCommand,
    Payload,
    SettleAnswer,
    SettleKind,
    Settlement,
    StepWrite,
)
from retrysafe.core.values import codec


class Invariant(StrEnum):
    """The promises that the simulation checks."""

    ONE_OWNER = "a key has at most one live owner"
    NO_EARLY_RERUN = "nothing runs again before the lease ends, unless after a clean failure"
    RUNS_UNDER_CLAIM = "every run has a claim of its own"
    OUTCOME_STANDS = "a stored outcome ends the key and never changes within its active window"
    SAME_REQUEST = "another request under the same key is refused, and an honest retry is not"
    OWN_OUTCOME = "nobody gets the outcome of another request"
    REPLAY_EXACT = "a replay is the stored outcome"
    STORED_FIRST = "an outcome is stored before it is shown"
    NOT_LOST = "a finished operation's ending is written even when its caller is cancelled"
    ATTEMPT_LIMIT = "no more attempts start than the limit allows"
    ZOMBIE = "the write of an owner that lost its claim is refused, and it is told so"
    OWN_CLAIM = "a claim that is asked for again finds its own claim"
    LEASE_KEPT = "an extend never shortens a lease"
    STEP_ONCE = "a recorded step never runs again"
    STEP_EXACT = "a step gives what was recorded, and is recorded before the operation goes on"
    HONEST_ANSWER = "every caller gets an answer that fits what happened"
    NO_HANG = "no caller waits for ever"


class Status(Enum):
    """How far the life of a key has got."""

    PENDING = "pending"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    RELEASED = "released"


class Close(Enum):
    """How a run ended, seen from inside the operation."""

    RETURNED = "returned"
    TERMINAL = "raised a terminal error"
    RETRYABLE = "raised a retryable error"
    CUT = "was cut off"


SETTLED_STATUS = {
    SettleKind.COMPLETE: Status.SUCCEEDED,
    SettleKind.FAIL: Status.FAILED,
    SettleKind.RELEASE: Status.RELEASED,
}
FITTING_CLOSE = {
    SettleKind.COMPLETE: Close.RETURNED,
    SettleKind.FAIL: Close.TERMINAL,
    SettleKind.RELEASE: Close.RETRYABLE,
}


class Life:
    """One life of a key, from its admission to its expiry or an operator's release."""

    __slots__ = ("granted", "is_uncertain", "released", "started")

    def __init__(self, *, is_uncertain: bool = False) -> None:
        # Whether an attempt of it ended in any way but with nothing done.
        self.is_uncertain = is_uncertain
        self.granted = 0
        self.started = 0
        # How many of its attempts freed the key; the others crashed, or have not ended.
        self.released = 0


class Grant:
    """One token's hold on a key."""

    __slots__ = (
        "claimed_at_ms",
        "execution",
        "lease_ends_at_ms",
        "life",
        "moment",
        "number",
        "released",
        "request",
        "taken_over_at_ms",
    )

    def __init__(self, life: Life, request: int, claimed_at_ms: int, lease_ends_at_ms: int) -> None:
        life.granted += 1
        self.life = life
        self.number = life.granted
        # How many attempts before this one freed the key.
        self.released = life.released
        self.request = request
        self.claimed_at_ms = claimed_at_ms
        self.lease_ends_at_ms = lease_ends_at_ms
        self.execution: Execution | None = None
        # When the next token of this life came; the lease cannot come back after that.
        self.taken_over_at_ms: int | None = None
        # Which of all grants and step records this was; clocks of the store may jump back.
        self.moment = 0


class Execution:
    """One run of an operation."""

    __slots__ = (
        "caller",
        "close",
        "grant",
        "is_unstorable",
        "key",
        "number",
        "process",
        "text",
        "token",
    )

    def __init__(
        self,
        key: str,
        token: bytes,
        number: int,
        caller: object,
        process: Any,
        grant: Grant,
        text: str,
    ) -> None:
        self.key = key
        self.token = token
        # The attempt as the engine counts it; a late copy of the claim may move the grant's own.
        self.number = number
        self.caller = caller
        self.process = process
        self.grant = grant
        # Unique, and tells whose it is: what the operation returns or raises.
        self.text = text
        self.close: Close | None = None
        self.is_unstorable = False


class Truth:
    """What is true of a key now."""

    __slots__ = ("expires_at_ms", "grant", "is_harmless", "payload", "request", "status", "token")

    def __init__(self, token: bytes, grant: Grant) -> None:
        self.request = grant.request
        self.token = token
        self.grant = grant
        self.status = Status.PENDING
        self.expires_at_ms = 0
        # Whether it ended, and nothing was done in its whole life.
        self.is_harmless = False
        self.payload: Payload | None = None


class Stored:
    """An outcome that was stored once, in any life of its key."""

    __slots__ = ("key", "kind", "payload", "request")

    def __init__(self, key: str, request: int, kind: SettleKind, payload: Payload) -> None:
        self.key = key
        self.request = request
        self.kind = kind
        self.payload = payload


class Ledger:
    """Everything that happened, and the first thing that must not have."""

    def __init__(
        self,
        attempt_limits: dict[str, int],
        release_limits: dict[str, int | None],
        request_of: dict[bytes, int],
        derived: set[str],
    ) -> None:
        # The keys that are made from requests.
        self._derived = derived
        self._attempt_limits = attempt_limits
        self._release_limits = release_limits
        self._request_of = request_of
        self.truths: dict[str, Truth] = {}
        # Which requests a key was ever admitted for, over all its lives.
        self.admitted: dict[str, set[int]] = {key: set() for key in attempt_limits}
        self.grants: dict[bytes, Grant] = {}
        self.executions: list[Execution] = []
        self.by_text: dict[str, Execution] = {}
        self.stored: dict[bytes, Stored] = {}
        self.answered_tokens: set[bytes] = set()
        self.lost_tokens: set[bytes] = set()
        # Of renewals that were refused: an owner that knows of it begins no further step.
        self.lost_renewals: set[bytes] = set()
        self.spent_tokens: set[bytes] = set()
        self.given_up: set[tuple[str, int]] = set()
        self.refused_by_store: set[bytes] = set()
        # What is recorded of each key's present life: by whose token, when, and what.
        self.steps: dict[str, dict[str, tuple[bytes, int, Payload]]] = {}
        self._moments = 0
        self.violation: str | None = None

    def violated(self, invariant: Invariant, detail: str) -> None:
        """Notes the first violation; the world stops at its next step."""
        if self.violation is None:
            self.violation = f"{invariant.name}: {invariant.value} ({detail})"

    # Claims.

    def claimed(self, row: ClaimRequest, answer: ClaimAnswer, now_ms: int) -> bool:
        """Judges the store's answer to a claim, and takes note of it.

        Says whether the request has taken the place of another one.
        """
        request = self._request_of[row.fingerprints[0].digest]
        truth = self.truths.get(row.key.text)
        expected = self._expected(truth, request, row.token, now_ms)
        is_other = truth is not None and truth.request != request
        if expected is Decision.MISMATCH and truth is not None and truth.is_harmless:
            expected = Decision.TAKE_OVER
        self._judge_claim(row, answer, now_ms, expected)
        return is_other and answer.decision is Decision.TAKE_OVER

    def taken_over(self, row: ClaimRequest, held: bytes, answer: ClaimAnswer, now_ms: int) -> None:
        """Judges the store's answer to a worker: what it saw abandoned, or nothing."""
        truth = self.truths.get(row.key.text)
        expected = Decision.LOST
        if truth is not None and truth.status is Status.PENDING:
            is_live = now_ms < truth.grant.lease_ends_at_ms
            if truth.token == row.token:
                expected = Decision.CONFIRM if is_live else Decision.TAKE_OVER
            elif truth.token == held:
                expected = Decision.IN_FLIGHT if is_live else Decision.TAKE_OVER
        self._judge_claim(row, answer, now_ms, expected)

    def _judge_claim(
        self, row: ClaimRequest, answer: ClaimAnswer, now_ms: int, expected: Decision
    ) -> None:
        key, token = row.key.text, row.token
        request = self._request_of[row.fingerprints[0].digest]
        truth = self.truths.get(key)
        decision = answer.decision
        if decision is not expected:
            self.violated(
                _broken_by_claim(expected, decision, truth),
                f"{key}: claim answered {decision.value}, should be {expected.value}",
            )
            return
        if decision is Decision.ADMIT or decision is Decision.TAKE_OVER:
            life = Life() if truth is None or decision is Decision.ADMIT else truth.grant.life
            is_own = truth is not None and truth.token == token
            if truth is not None and not (is_own and truth.status is Status.PENDING):
                life.is_uncertain |= decision is Decision.TAKE_OVER and not truth.is_harmless
            if truth is not None and truth.status is Status.FAILED and truth.grant.life is life:
                # Corrected: the failure has freed the key after all.
                life.released += 1
            grant = Grant(life, request, now_ms, now_ms + row.lease_ms)
            grant.moment = self._next_moment()
            if truth is not None and truth.grant.life is life and truth.token != token:
                truth.grant.taken_over_at_ms = now_ms
            if decision is Decision.ADMIT:
                self.steps.pop(key, None)
            if (
                decision is Decision.TAKE_OVER
                and truth is not None
                and truth.token == token
                and truth.status is Status.PENDING
            ):
                # Its own claim again, which never started: the attempt keeps its number.
                life.granted -= 1
                grant.number = truth.grant.number
            self.admitted[key].add(request)
            earlier = self.grants.get(token)
            if earlier is not None:
                grant.execution = earlier.execution
            self.grants[token] = grant
            self.truths[key] = Truth(token, grant)
            if self._is_over(key, grant.number - grant.released, grant.released):
                self.spent_tokens.add(token)
            counted, should_be = (answer.attempt, answer.releases), (grant.number, grant.released)
            if counted != should_be:
                self.violated(
                    Invariant.ATTEMPT_LIMIT,
                    f"{key}: attempt and releases {counted}, should be {should_be}",
                )
        elif decision is Decision.REPLAY:
            assert truth is not None
            if answer.payload != truth.payload:
                self.violated(Invariant.REPLAY_EXACT, f"{key}: the store replays another payload")

    def _is_over(self, key: str, unreleased: int, released: int) -> bool:
        """Whether a limit forbids the last of so many attempts that have not freed the key."""
        limit = self._release_limits[key]
        return unreleased > self._attempt_limits[key] or (limit is not None and released >= limit)

    @staticmethod
    def _expected(truth: Truth | None, request: int, token: bytes, now_ms: int) -> Decision:
        if truth is None:
            return Decision.ADMIT
        if truth.status is Status.PENDING:
            if truth.request != request:
                return Decision.MISMATCH
            if now_ms >= truth.grant.lease_ends_at_ms:
                return Decision.TAKE_OVER
            return Decision.CONFIRM if truth.token == token else Decision.IN_FLIGHT
        if now_ms >= truth.expires_at_ms:
            return Decision.ADMIT
        if truth.request != request:
            return Decision.MISMATCH
        return Decision.TAKE_OVER if truth.status is Status.RELEASED else Decision.REPLAY

    # Runs.

    def start(
        self,
        key: str,
        token: bytes,
        *,
        number: int,
        caller: object,
        process: Any,
        request: int,
    ) -> Execution:
        """Judges the start of a run, and takes note of it."""
        grant = self.grants.get(token)
        if grant is None or grant.execution is not None:
            self.violated(Invariant.RUNS_UNDER_CLAIM, f"{key}: a run without a claim of its own")
            grant = grant or Grant(Life(), request, 0, 0)
        text = f"{key}/{request}/{len(self.executions)}"
        execution = Execution(key, token, number, caller, process, grant, text)
        grant.execution = execution
        grant.life.started += 1
        life = grant.life
        # Runs are counted, not claims: a late copy of a claim may use up a number without a run.
        if self._is_over(key, life.started - grant.released, grant.released):
            self.violated(
                Invariant.ATTEMPT_LIMIT,
                f"{key}: run {life.started} started, {grant.released} have freed the key",
            )
        if grant.request != request:
            self.violated(Invariant.SAME_REQUEST, f"{key}: ran under another request's claim")
        self._check_alone(execution)
        self.executions.append(execution)
        self.by_text[text] = execution
        return execution

    def _check_alone(self, execution: Execution) -> None:
        """Two runs of a key overlap only when the next claim came after the earlier lease.

        The next one, not any later one: a clock that has jumped back revives no lease.
        """
        mine = execution.grant
        for other in self.executions:
            if other.key != execution.key or other.close is not None:
                continue
            theirs = other.grant
            if mine.life is not theirs.life:
                continue  # An operator's force, or an expiry, lies between; `claimed` judges it.
            first, second = (mine, theirs) if mine.number < theirs.number else (theirs, mine)
            claimed_at_ms = first.taken_over_at_ms
            if claimed_at_ms is None:
                claimed_at_ms = second.claimed_at_ms
            if claimed_at_ms < first.lease_ends_at_ms:
                self.violated(Invariant.ONE_OWNER, f"{execution.key}: two runs under one lease")

    # Writes.

    def settled(self, row: Settlement, answer: SettleAnswer, now_ms: int) -> None:
        """Judges the store's answer to an owner's ending, and takes note of it."""
        key, token = row.key.text, row.token
        truth = self.truths.get(key)
        self.answered_tokens.add(token)
        self._check_fits(row)
        expected = Decision.LOST
        if truth is not None and truth.token == token:
            if truth.status is Status.PENDING:
                expected = Decision.APPLY
            elif truth.status is SETTLED_STATUS[row.kind]:
                expected = Decision.CONFIRM if now_ms < truth.expires_at_ms else Decision.LOST
        if answer.decision is not expected:
            self.violated(
                Invariant.ZOMBIE if expected is Decision.LOST else Invariant.OUTCOME_STANDS,
                f"{key}: {row.kind.name.lower()} answered {answer.decision.value}, "
                f"should be {expected.value}",
            )
            return
        if expected is Decision.APPLY:
            assert truth is not None
            truth.status = SETTLED_STATUS[row.kind]
            truth.grant.life.released += truth.status is Status.RELEASED
            truth.expires_at_ms = now_ms + row.active_ms
            truth.payload = row.payload
            truth.is_harmless = (
                row.nothing_happened
                and not truth.grant.life.is_uncertain
                and not self.steps.get(key)
            )
            assert row.payload is not None
            self.stored[token] = Stored(key, truth.request, row.kind, row.payload)

    def told(self, row: Any, answer: Any) -> None:
        """Takes note of an answer that reached its process; not every one does."""
        if isinstance(row, StepWrite):
            if answer is Decision.LOST:
                self.learned_of_loss(row.token)
        elif isinstance(answer, ClaimAnswer):
            return  # A claim that is lost has nothing to lose.
        elif answer.decision is Decision.LOST and isinstance(row, Settlement):
            self.lost_tokens.add(row.token)

    def extended(self, row: Extension, answer: ExtendAnswer, now_ms: int) -> None:
        """Judges the store's answer to a renewal, and takes note of it."""
        truth = self.truths.get(row.key.text)
        is_held = truth is not None and truth.token == row.token and truth.status is Status.PENDING
        expected = Decision.APPLY if is_held else Decision.LOST
        if answer.decision is Decision.LOST:
            self.lost_renewals.add(row.token)
        if answer.decision is not expected:
            self.violated(
                Invariant.OUTCOME_STANDS if is_held else Invariant.ZOMBIE,
                f"{row.key.text}: extend answered {answer.decision.value}, "
                f"should be {expected.value}",
            )
            return
        if truth is None or not is_held:
            return
        grant = truth.grant
        if answer.lease_ends_at_ms < grant.lease_ends_at_ms:
            self.violated(Invariant.LEASE_KEPT, f"{row.key.text}: an extend cut the lease")
        grant.lease_ends_at_ms = max(grant.lease_ends_at_ms, now_ms + row.lease_ms)

    def _check_fits(self, row: Settlement) -> None:
        """An ending is written as it happened: only a clean failure may free the key."""
        key, payload = row.key.text, row.payload
        execution = self.grants[row.token].execution
        assert payload is not None
        if execution is None:
            is_spent = row.token in self.spent_tokens
            is_told = payload.form == codec.EXHAUSTED or row.token in self.refused_by_store
            if not (is_spent and row.kind is SettleKind.FAIL and is_told):
                self.violated(Invariant.HONEST_ANSWER, f"{key}: an ending without a run")
            return
        if row.nothing_happened and not (
            key in self._derived and execution.close is Close.TERMINAL
        ):
            self.violated(Invariant.SAME_REQUEST, f"{key}: an ending was marked as harmless")
        if execution.close is not FITTING_CLOSE[row.kind]:
            self.violated(
                Invariant.NO_EARLY_RERUN,
                f"{key}: {row.kind.name.lower()} of a run that "
                f"{'goes on' if execution.close is None else execution.close.value}",
            )
        if payload.form == codec.WITHHELD:
            if not execution.is_unstorable and row.token not in self.refused_by_store:
                self.violated(Invariant.REPLAY_EXACT, f"{key}: withheld a storable outcome")
        elif execution.text.encode() not in payload.body:
            self.violated(Invariant.OWN_OUTCOME, f"{key}: another run's payload was written")

    # Steps.

    def _next_moment(self) -> int:
        self._moments += 1
        return self._moments

    def step_started(self, key: str, token: bytes, name: str) -> None:
        """Judges the start of a step's call."""
        recorded = self.steps.get(key, {}).get(name)
        if recorded is None:
            return
        by_token, moment, _ = recorded
        # A zombie may repeat what its successor has recorded since; only the fence stops it.
        if by_token == token or moment < self.grants[token].moment:
            self.violated(Invariant.STEP_ONCE, f"{key}: {name} ran again after it was recorded")

    def step_recorded(self, write: StepWrite, decision: Decision) -> None:
        """Judges the store's answer to a step's write, and takes note of it."""
        key, token, step = write.key.text, write.token, write.step
        # The first result stands. A late copy of its claim may bring an owner back that has another
        # one: to it the step is lost, although it holds the key again.
        known = self.steps.get(key, {}).get(step.name)
        is_first = known is None or known[2] == step.payload
        if decision is not (
            Decision.APPLY if is_first and self._holds(key, token) else Decision.LOST
        ):
            self.violated(Invariant.ZOMBIE, f"{key}: a step was answered {decision.value}")
        if decision is Decision.APPLY:
            recorded = (token, self._next_moment(), step.payload)
            self.steps.setdefault(key, {}).setdefault(step.name, recorded)

    def step_given(self, key: str, token: bytes, name: str, value: str) -> None:
        """Judges what a step gave to the operation."""
        if not self._holds(key, token):
            return  # Whatever a zombie believes, it cannot write it down.
        recorded = self.steps.get(key, {}).get(name)
        if recorded is None or value.encode() not in recorded[2].body:
            self.violated(Invariant.STEP_EXACT, f"{key}: {name} gave {value}")

    def learned_of_loss(self, token: bytes) -> None:
        """Takes note that an owner knows that it has lost its key: it has nothing left to write."""
        self.lost_tokens.add(token)
        self.answered_tokens.add(token)

    def _holds(self, key: str, token: bytes) -> bool:
        truth = self.truths.get(key)
        return truth is not None and truth.token == token and truth.status is Status.PENDING

    # Others who change records.

    def operated(self, key: str, command: OperatorCommand, decision: Decision, now_ms: int) -> None:
        """Takes note of an operator's command."""
        truth = self.truths.get(key)
        if decision is not Decision.APPLY or truth is None:
            return
        if command is OperatorCommand.EXPIRE:
            if truth.status is Status.PENDING:
                self.violated(Invariant.ONE_OWNER, f"{key}: a pending record was expired")
            truth.expires_at_ms = now_ms
            return
        is_live = truth.status is Status.PENDING and now_ms < truth.grant.lease_ends_at_ms
        if is_live and command is not OperatorCommand.FORCE_RELEASE:
            self.violated(Invariant.ONE_OWNER, f"{key}: released under a live owner unforced")
        if truth.status is Status.SUCCEEDED:
            self.violated(Invariant.OUTCOME_STANDS, f"{key}: a success was released")
        # The token stays, so that the old owner is refused by the state; a new life begins.
        released = Truth(truth.token, truth.grant)
        life = Life(is_uncertain=truth.grant.life.is_uncertain)
        released.grant = Grant(life, truth.request, now_ms, now_ms)
        released.is_harmless = truth.is_harmless
        released.grant.life.granted = 0
        released.status = Status.RELEASED
        released.expires_at_ms = max(truth.expires_at_ms, now_ms + 24 * 60 * 60 * 1000)
        self.truths[key] = released

    def swept(self, now_ms: int) -> None:
        """Takes note of a sweep that had room for everything."""
        for key, truth in list(self.truths.items()):
            if truth.status is not Status.PENDING and now_ms >= truth.expires_at_ms:
                del self.truths[key]

    def has_live_run(self, key: str) -> bool:
        """Whether an operation of this key is at work now."""
        return any(run.key == key and run.close is None for run in self.executions)

    def check_nothing_lost(self) -> None:
        """At the end: every clean ending in a living process reached the store or gave up."""
        for run in self.executions:
            if run.close is None or run.close is Close.CUT or run.process.is_dead:
                continue
            is_given_up = (run.key, run.number) in self.given_up
            knows_end = run.token in self.answered_tokens or run.token in self.lost_renewals
            if not knows_end and not is_given_up:
                self.violated(Invariant.NOT_LOST, f"{run.key}: {run.text} was never written")


def _broken_by_claim(expected: Decision, decision: Decision, truth: Truth | None) -> Invariant:
    """Which promise a wrong answer to a claim breaks."""
    if expected is Decision.LOST:
        return Invariant.ZOMBIE  # A worker that is late is as fenced off as an owner is.
    if expected is Decision.MISMATCH or decision is Decision.MISMATCH:
        return Invariant.SAME_REQUEST
    if decision in (Decision.ADMIT, Decision.TAKE_OVER):
        if truth is not None and truth.status is Status.PENDING:
            return Invariant.ONE_OWNER
        return Invariant.OUTCOME_STANDS
    if expected is Decision.CONFIRM:
        return Invariant.OWN_CLAIM
    return Invariant.HONEST_ANSWER
