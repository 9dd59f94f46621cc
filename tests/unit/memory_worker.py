"""A worker with stores in memory and a manual clock; each call runs to its end."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import pytest

from celery_leases.attempt.held_lease import HeldLease
from celery_leases.attempt.process import Process
from celery_leases.attempt.run import Execution
from celery_leases.call import Call
from celery_leases.decide.endings import Ending, Returned
from celery_leases.decide.verdicts import Raise, Verdict
from celery_leases.failures.actions import Reason, cooldown, permanent, retry
from celery_leases.groups.group import ClosedGroup, Closing
from celery_leases.record import Record, State
from celery_leases.stores.sql.leases import DatabaseLeaseStore
from tests.distributions.toy_leases import Memory, ToyLeaseStore
from tests.unit.decision_inputs import GROUP, KEY, TODAY, a_call, raised
from tests.unit.memory_stores import Journal, ManualClock, MemoryRecords, Seen, noted

DONE = Returned(1, "1")
KINDS = pytest.mark.parametrize(
    "in_records", [False, True], ids=["leases apart", "rows are leases"]
)
OF_THE_GROUP = raised(
    replace(cooldown("30s", scope="group"), server_delay="instead"), 60.0, Reason.RATE_LIMITED
)
OF_THE_KEY = raised(cooldown("60s", jitter=0.0))
SOON = raised(retry("2s", jitter=0.0))
FOR_GOOD = raised(permanent())
RATE_LIMITED = Closing(
    policy=a_call().options.failures.cooldown, reason="rate_limited", rule="r", server_delay=60.0
)


class NoRenewer:
    """Renews nothing: with a manual clock leases expire only when a test advances it."""

    def __init__(self) -> None:
        self.kept: set[str] = set()

    def add(self, held_lease: HeldLease) -> None:
        self.kept.add(held_lease.call.token)

    def drop(self, held_lease: HeldLease) -> None:
        self.kept.discard(held_lease.call.token)


@dataclass
class Bench:
    """A worker, its stores, and the events and steps of both."""

    in_records: bool = False
    clock: ManualClock = field(default_factory=ManualClock)
    journal: Journal = field(default_factory=Journal)
    seen: Seen = field(default_factory=Seen)
    #: The tokens of the bodies that have run.
    ran: list[str] = field(default_factory=list)
    stopping: bool = False

    def __post_init__(self) -> None:
        self.records = MemoryRecords(
            self.clock, self.journal, "acquire" if self.in_records else "claim"
        )
        #: Of the leases beside the records.
        self.memory = Memory(now=self.clock.now, began=-math.inf)
        self.stores = self._stores()
        self.renewer = NoRenewer()
        self._tokens = count(1)
        nothing: Any = None
        renewer: Any = self.renewer
        stores: Any = self.stores
        self.process = Process(
            settings=nothing,
            leases=stores,
            records=self.records,
            effects=nothing,
            renewer=renewer,
            observer=self.seen,
            clock=self.clock,
            rand=lambda: 0.0,
            host="host-a/17",
            stopping=lambda: self.stopping,
            wall_time=lambda: TODAY,
        )

    def _stores(self) -> DatabaseLeaseStore | ToyLeaseStore:
        names = ["age", "release", "cool", "end_cooldown"]
        steps = {"close": "close_group", "open": "open_group", "release_slot": "release_slot"}
        store: DatabaseLeaseStore | ToyLeaseStore
        if self.in_records:
            store = self.records.leases()
        else:
            store = ToyLeaseStore(self.memory, "toy")
            names.append("acquire")
        noted(store, self.journal, **{name: name for name in names})
        noted(store.groups, self.journal, **steps)
        return store

    def call(self, **changes: Any) -> Call:
        """A call of the group with its own token, which resumes after every failure."""
        given: dict[str, Any] = {
            "group": GROUP,
            "resume": "always",
            "token": f"attempt-{next(self._tokens)}",
        }
        return a_call(**(given | changes))

    def again(self, call: Call, **changes: Any) -> Call:
        back: dict[str, Any] = {
            "token": f"attempt-{next(self._tokens)}",
            "repeat": True,
            "started": True,
        }
        return replace(call, **(back | changes))

    def redelivered(self, call: Call) -> Call:
        """The message of *call* again, as its dead process left it, without a trace of the run."""
        return self.again(call, started=False)

    def run(
        self, call: Call, *endings: Ending, during: Callable[[HeldLease], object] = lambda _: None
    ) -> Verdict:
        """Run *call*: its body does *during* and ends with *ending*, by default a value."""

        def body(held_lease: HeldLease, record: Record) -> Ending:
            self.ran.append(held_lease.call.token)
            during(held_lease)
            return endings[0] if endings else DONE

        return Execution(self.process, call).run(body)

    # -- situations --------------------------------------------------------------------------------

    def close_group(self, closing: Closing = RATE_LIMITED) -> None:
        """A failure elsewhere has closed the group."""
        self.stores.groups.close(GROUP, closing, "elsewhere")
        self.journal.clear()

    def probe_due(self, closing: Closing = RATE_LIMITED) -> None:
        """The group is due for a probe: the next call is the probe."""
        self.close_group(closing)
        self.clock.sleep(closing.wait(1))

    # -- findings ----------------------------------------------------------------------------------

    @property
    def closed_group(self) -> ClosedGroup | None:
        """The group, as it is now."""
        return self.stores.groups.get(GROUP)

    @property
    def row(self) -> Record:
        found = self.records.row(KEY.stored)
        assert found is not None
        return found

    @property
    def state(self) -> State:
        return self.row.state

    def steps(self, *names: str) -> list[str]:
        """The steps taken so far, those of *names* only if there are any."""
        return [step for step in self.journal if not names or step in names]

    @property
    def held(self) -> bool:
        return self.stores.holder(KEY.stored) is not None

    @property
    def cools(self) -> bool:
        """Whether the lease store says that the key is cooling."""
        found = self.memory.leases.get(KEY.stored)
        return found is not None and found.call is None and found.until > self.clock.now()


def error(reply: Verdict) -> BaseException:
    assert isinstance(reply, Raise), reply
    return reply.error
