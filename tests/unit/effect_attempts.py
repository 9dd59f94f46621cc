"""Effects and progress in memory, and a bench that runs many attempts of one key."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from celery_leases.attempt.held_lease import HeldLease
from celery_leases.body.effects import EffectReply
from celery_leases.decide.after_run import after_run
from celery_leases.effect import Begun, Effect, Found
from celery_leases.errors import StoreUnavailable
from celery_leases.lease import Lease
from celery_leases.record import (
    Outcome,
    Record,
)
from celery_leases.stores.sql.effects import SqlEffectStore
from celery_leases.testing.contracts.calls import claimed, make_call
from tests.unit.decision_inputs import a_call
from tests.unit.memory_stores import Journal, ManualClock, MemoryRecords, noted

KEY = "t:billing.send|invoice:1842"
CHARGE = "charge"


class MemoryEffects(SqlEffectStore):
    """Effects next to *records*; each step is recorded."""

    def __init__(self, records: MemoryRecords, journal: Journal) -> None:
        super().__init__(records.database, records.tables)
        self.journal = journal
        #: An outage is reported as "nothing was written", as for a locked row.
        self.refuses = False
        writing = {"finish": "finish", "withdraw": "withdraw", "save_progress": "save"}
        noted(self, journal, clear_crashes="clear crashes", **writing)

    def begin(self, *given: Any, **more: Any) -> Begun | Found | None:
        """Commit the intent, find that of another attempt, or refuse."""
        begin = super().begin
        try:
            return self.journal.step("begin", lambda: begin(*given, **more))
        except (
            StoreUnavailable
        ) as error:  # during an outage it is not known what the database has done
            raise StoreUnavailable(str(error), False if self.refuses else None) from None


class FakeRenewer:
    """Extends at once, and records it."""

    def __init__(self, journal: Journal, clock: ManualClock) -> None:
        self.journal = journal
        self.clock = clock

    def extend(self, held_lease: HeldLease, seconds: float) -> None:
        held_lease.check()
        self.journal.step("extend", lambda: held_lease.extended(self.clock.now(), seconds))


class Attempt:
    """One attempt: its lease, its effects, and the calls it makes."""

    def __init__(self, desk: EffectBench, record: Record, **options: Any) -> None:
        self.desk = desk
        self.record = record
        call = make_call(KEY, record.owner, ttl=desk.ttl)
        self.held_lease = HeldLease(
            call, desk.clock.now(), desk.clock, renew=options.pop("renew", True)
        )
        self.held_lease.fence = record.fence
        each_runs = options.pop("each_runs", False)
        given: dict[str, Any] = {"retention": 60.0, "call_id": record.call_id}
        self.call = a_call(runs="each" if each_runs else "once", **(given | options))
        process: Any = SimpleNamespace(
            renewer=FakeRenewer(desk.journal, desk.clock),
            effects=desk.store,
            clock=desk.clock,
            wall_time=lambda: 0.0,
            settings=SimpleNamespace(prefix="celery_leases"),
        )
        self.lease = Lease(
            process, self.call, self.held_lease, record, self.interrupts_deferred, os.getpid()
        )
        #: Raised at the end of the next step that is protected from signals.
        self.pending: BaseException | None = None

    @contextmanager
    def interrupts_deferred(self) -> Iterator[None]:
        """A step that is protected from signals."""
        yield
        pending, self.pending = self.pending, None
        if pending is not None:
            raise pending

    def effect(self, call: Any = None, *, name: str = CHARGE, **given: Any) -> EffectReply:
        """Make the effect happen; *call* may be its reply, or an error it raises."""
        return self.lease.effect(name, self.desk.calling(call), **given)

    def lose(self) -> None:
        """Let the lease expire by the clock."""
        self.desk.clock.sleep(2 * self.desk.ttl)


@dataclass
class EffectBench:
    """The stores, the clock, and all requests that were made, by their idempotency keys."""

    ttl: float = 15.0
    clock: ManualClock = field(default_factory=ManualClock)
    journal: Journal = field(default_factory=Journal)
    called: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.records = MemoryRecords(self.clock, self.journal)
        self.store = MemoryEffects(self.records, self.journal)

    def attempt(self, call_id: str = "call", **options: Any) -> Attempt:
        """Claim the key, also from another holder."""
        answer = self.records.others.claim(
            make_call(KEY, call_id=call_id, each_runs=options.get("each_runs", False)), "fake"
        )
        return Attempt(self, claimed(answer), **options)

    def closed(self, record: Record, ending: Any, **more: Any) -> Outcome:
        outcome = replace(after_run(a_call(call_id=record.call_id), record, ending), **more)
        assert self.records.settle(record, outcome)
        return outcome

    def calling(self, call: Any = None) -> Callable[[str], Any]:
        """A callable that records its idempotency key, and then calls, raises or returns *call*."""

        def made(key: str) -> Any:
            self.called.append(key)
            self.journal.append("call")
            if isinstance(call, BaseException):
                raise call
            return call(key) if callable(call) else call

        return made

    def steps(self) -> list[str]:
        """The steps since the last call of this method."""
        taken = list(self.journal)
        self.journal.clear()
        return taken

    def effect(self, name: str = CHARGE, scope: str = "#0") -> Effect | None:
        """The effect, as it is now."""
        return self.store.read(KEY, name, scope)

    @property
    def state(self) -> str | None:
        found = self.effect()
        return found.state.value if found is not None else None

    @property
    def row(self) -> Record:
        found = self.records.row(KEY)
        assert found is not None
        return found
