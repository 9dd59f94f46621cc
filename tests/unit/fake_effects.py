"""Effects and progress in memory, and a desk at which bodies of one key are attempted over and
over.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from celery_leases.attempt.effect_calls import EffectReply, calls_of
from celery_leases.attempt.effects import Effects
from celery_leases.attempt.held_lease import HeldLease
from celery_leases.attempt.steps import Steps
from celery_leases.errors import StoreUnavailable
from celery_leases.failures.rules import Rules
from celery_leases.lease import Lease
from celery_leases.protocol.effects import Begun, Effect, EffectState, Found, Scope, scope_of
from celery_leases.protocol.outcomes import after_run
from celery_leases.protocol.records import Outcome, Record, State, Won
from celery_leases.testing.contracts.claim_requests import make_claim_request
from tests.unit.fake_records import FakeRecords, StillClock
from tests.unit.fake_stores import Journal
from tests.unit.situations import a_call

KEY = "t:billing.send|invoice:1842"
CHARGE = "charge"


@dataclass
class FakeEffects:
    """One row for each key, name and scope, fenced by the rows of *records*."""

    records: FakeRecords
    journal: Journal
    rows: dict[tuple[str, str, str], Effect] = field(default_factory=dict)
    #: While it is away it says that nothing was written, as for a row that is locked.
    refuses: bool = False

    def begin(
        self,
        record: Record,
        name: str,
        idempotency_key: str,
        scope: Scope,
        taken: int | None = None,
    ) -> Begun | Found | None:
        """Commit the intent, find that of another attempt, or refuse."""
        try:
            return self.journal.step(
                "begin", lambda: self._begin(record, name, idempotency_key, scope, taken)
            )
        except StoreUnavailable as error:  # a database that is away does not say what it has done
            raise StoreUnavailable(str(error), False if self.refuses else None) from None

    def _begin(
        self, record: Record, name: str, key: str, scope: Scope, taken: int | None
    ) -> Begun | Found | None:
        if not self.is_running(record):
            return None
        found = self.row(record.stored_key, name, scope.name)
        if found is not None:
            ours = found.state is EffectState.SENT and found.fence == record.fence
            if ours:
                return Begun(found)
            if found.state is not EffectState.SENT or found.fence != taken:
                return Found(found)
        now = self.records.now
        row = Effect(
            record.stored_key, name, scope.name, EffectState.SENT, record.fence, key, now, now
        )
        self.rows[record.stored_key, name, scope.name] = row
        return Begun(row)

    def is_running(self, record: Record) -> bool:
        """Whether the row is still the attempt's."""
        row = self.records.row(record.stored_key)
        ours = (State.RUNNING, record.fence, record.owner)
        return row is not None and (row.state, row.fence, row.owner) == ours

    def finish(self, effect: Effect, result: str | None, reference: str | None) -> bool:
        """Note the reply."""
        return self.journal.step("finish", lambda: self._finish(effect, result, reference))

    def _finish(self, effect: Effect, result: str | None, reference: str | None) -> bool:
        found = self.row(effect.stored_key, effect.name, effect.scope)
        if found is None or found.fence != effect.fence:
            return False
        if found.state is EffectState.DONE:
            return (found.result, found.reference) == (result, reference)
        done = replace(
            found,
            state=EffectState.DONE,
            result=result,
            reference=reference,
            done_at=self.records.now,
        )
        self.rows[effect.stored_key, effect.name, effect.scope] = done
        return True

    def withdraw(self, effect: Effect) -> bool:
        """Take the intent back."""
        return self.journal.step("withdraw", lambda: self._withdraw(effect))

    def _withdraw(self, effect: Effect) -> bool:
        found = self.row(effect.stored_key, effect.name, effect.scope)
        ours = found is not None and (found.state, found.fence) == (EffectState.SENT, effect.fence)
        if ours:
            del self.rows[effect.stored_key, effect.name, effect.scope]
        return ours

    def row(self, stored_key: str, name: str, scope: str) -> Effect | None:
        """The effect, as it is now."""
        found = self.rows.get((stored_key, name, scope))
        return replace(found, now=self.records.now) if found is not None else None

    def of_key(self, record: Record) -> Sequence[Effect]:
        """Not by these tests."""
        return ()

    def forget_sent(self, record: Record) -> int:
        """Not by these tests."""
        return 0

    def save_progress(self, record: Record, progress: str) -> bool:
        """Save it if the row is the attempt's."""
        return self.journal.step("save", lambda: self._change(record, progress=progress, crashes=0))

    def clear_crashes(self, record: Record) -> None:
        """End the row of crashes."""
        self.journal.step("clear crashes", lambda: self._change(record, crashes=0))

    def _change(self, record: Record, **values: Any) -> bool:
        if not self.is_running(record):
            return False
        self.records.rows[record.stored_key] = replace(
            self.records.rows[record.stored_key], **values
        )
        return True


class FakeRenewer:
    """Extends at once, and notes it."""

    def __init__(self, journal: Journal, clock: StillClock) -> None:
        self.journal = journal
        self.clock = clock

    def extend(self, held_lease: HeldLease, seconds: float) -> None:
        """Push the lease out."""
        held_lease.check()
        self.journal.step("extend", lambda: held_lease.extended(self.clock.now(), seconds))


class Attempt:
    """One attempt: its lease, its effects, and the calls it makes."""

    def __init__(self, desk: Desk, record: Record, **options: Any) -> None:
        self.desk = desk
        self.record = record
        claim_request = make_claim_request(KEY, record.owner, ttl=desk.ttl)
        self.held_lease = HeldLease(
            claim_request, desk.clock.now(), desk.clock, renew=options.pop("renew", True)
        )
        self.held_lease.fence = record.fence
        store: Any = desk.store
        given: dict[str, Any] = {
            "judge": lambda error: Rules.default().judge(error, 0.0),
            "patience": 10.0,
        }
        self.effects = Effects(
            held_lease=self.held_lease,
            record=record,
            store=store,
            clock=desk.clock,
            closed=self.closed,
            prefix="celery_leases",
            scope=scope_of(record, rerun=options.pop("rerun", False), retention=60.0),
            result_max=1000,
            **(given | options),
        )
        renewer: Any = FakeRenewer(desk.journal, desk.clock)
        transaction: Any = None
        steps = Steps(renewer, store, self.effects, self.closed, transaction, transaction)
        self.lease = Lease(self.held_lease, record, lambda: steps, os.getpid())
        #: Raised at the end of the next step that signals are kept away from.
        self.pending: BaseException | None = None

    @contextmanager
    def closed(self) -> Iterator[None]:
        """A step that signals are kept away from."""
        yield
        pending, self.pending = self.pending, None
        if pending is not None:
            raise pending

    def effect(self, call: Any = None, *, name: str = CHARGE, **given: Any) -> EffectReply:
        """Make the effect happen; *call* may be its reply, or an error it raises."""
        known = {
            "reference": None,
            "verify": None,
            "verify_after": 60.0,
            "uncertain": "stop",
        } | given
        return self.effects.perform(name, calls_of(self.desk.calling(call), **known))

    def lose(self) -> None:
        """The lease is over by the clock."""
        self.desk.clock.sleep(2 * self.desk.ttl)


@dataclass
class Desk:
    """The stores, the clock, and all calls that were made, by their idempotency keys."""

    ttl: float = 15.0
    clock: StillClock = field(default_factory=StillClock)
    journal: Journal = field(default_factory=Journal)
    called: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.records = FakeRecords(self.clock, self.journal)
        self.store = FakeEffects(self.records, self.journal)

    def attempt(self, call_id: str = "call", **options: Any) -> Attempt:
        """Claim the key, from whoever has it."""
        claim = self.records.others.claim(
            make_claim_request(KEY, call_id=call_id, rerun=options.get("rerun", False)), "fake"
        )
        assert isinstance(claim, Won), claim
        return Attempt(self, claim.record, **options)

    def closed(self, record: Record, ending: Any, **more: Any) -> Outcome:
        """Close the attempt."""
        outcome = replace(after_run(a_call(call_id=record.call_id), record, ending), **more)
        assert self.records.settle(record, outcome)
        return outcome

    def calling(self, call: Any = None) -> Callable[[str], Any]:
        """A callable that notes its idempotency key and does *call*, raises it, or replies with
        it.
        """

        def made(key: str) -> Any:
            self.called.append(key)
            self.journal.append("call")
            if isinstance(call, BaseException):
                raise call
            return call(key) if callable(call) else call

        return made

    def steps(self) -> list[str]:
        """The steps so far, forgotten by this."""
        taken = list(self.journal)
        self.journal.clear()
        return taken

    def effect(self, name: str = CHARGE, scope: str = "#0") -> Effect | None:
        """The effect, as it is now."""
        return self.store.row(KEY, name, scope)

    @property
    def state(self) -> str | None:
        """Where the charge stands."""
        found = self.effect()
        return found.state.value if found is not None else None

    @property
    def row(self) -> Record:
        """The row of the key."""
        found = self.records.row(KEY)
        assert found is not None
        return found
