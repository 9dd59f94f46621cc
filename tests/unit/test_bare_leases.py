"""A lease store of another distribution that has leases alone: marks and groups are rows."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from celery_leases.call import Call
from celery_leases.decide.answers import (
    Acquired,
    Holder,
    Refusal,
    Refused,
    Renewal,
    RenewalResult,
)
from celery_leases.decide.verdicts import Reschedule, Return
from celery_leases.record import State
from celery_leases.stores.interfaces import LeaseStore
from celery_leases.stores.sql.leases import LeasesWithRowMarks
from tests.unit.decision_inputs import GROUP, KEY
from tests.unit.memory_worker import DONE, FOR_GOOD, OF_THE_GROUP, OF_THE_KEY, Bench


class BareLeases(LeaseStore):
    """Leases that do not expire, with nothing that is not needed."""

    name = "bare"

    def __init__(self) -> None:
        self.owners: dict[str, Call] = {}

    def acquire(self, call: Call) -> Acquired | Refused:
        """Take the key unless another token has it."""
        owner = self.owners.setdefault(call.key.stored, call)
        return (
            Acquired() if owner.token == call.token else Refused(Refusal.HELD, self._holder(owner))
        )

    def renew(self, renewals: Sequence[Renewal]) -> list[RenewalResult]:
        """Nothing is ever lost."""
        return [RenewalResult.OURS for _ in renewals]

    def release(self, stored_key: str, token: str) -> bool:
        """Free the key."""
        owner = self.owners.get(stored_key)
        return owner is not None and owner.token == token and bool(self.owners.pop(stored_key))

    def holder(self, stored_key: str) -> Holder | None:
        """Who has the key."""
        owner = self.owners.get(stored_key)
        return self._holder(owner) if owner is not None else None

    def _holder(self, owner: Call) -> Holder:
        return Holder(owner.token, owner.call_id, owner.host, owner.options.ttl, owner.options.ttl)


class BareBench(Bench):
    """A worker with such leases."""

    def _stores(self) -> LeasesWithRowMarks:  # type: ignore[override]
        self.bare = BareLeases()
        return LeasesWithRowMarks(self.bare, self.records)


@pytest.fixture
def bench() -> BareBench:
    """A worker that has run nothing."""
    return BareBench()


def test_a_key_is_run_once_and_freed(bench: BareBench) -> None:
    held = list[bool]()
    assert bench.run(bench.call(), during=lambda _: held.append(bench.held)) == Return(1)
    assert isinstance(bench.run(bench.call()), Return)
    assert (len(bench.ran), held, bench.held) == (1, [True], False)


def test_a_held_key_waits(bench: BareBench) -> None:
    answers = list[object]()
    bench.run(bench.call(), during=lambda _: answers.append(bench.run(bench.call())))
    assert isinstance(answers[0], Reschedule)
    assert bench.state is State.DONE


def test_a_cooldown_is_in_the_record(bench: BareBench) -> None:
    """The lease is freed, and the next call reads that the key cools down."""
    bench.run(bench.call(), OF_THE_KEY)
    assert (bench.state, bench.held) == (State.COOLING, False)
    assert isinstance(bench.run(bench.call()), Reschedule)
    bench.clock.sleep(61.0)
    assert bench.run(bench.call()) == Return(1)


def test_a_group_is_a_row_that_the_claim_reads(bench: BareBench) -> None:
    """A closed one admits nobody, one that is due for a probe the probe, whose success opens it."""
    bench.run(bench.call(), OF_THE_GROUP)
    assert bench.closed_group is not None
    assert isinstance(bench.run(bench.call()), Reschedule)
    assert (len(bench.ran), bench.held) == (1, False)
    bench.clock.sleep(61.0)
    probes = list[object]()
    bench.run(
        bench.call(),
        DONE,
        during=lambda _: probes.append(bench.closed_group and bench.closed_group.probe),
    )
    assert probes == [bench.ran[1]]
    assert bench.closed_group is None


def test_the_probes_slot_is_renewed_with_its_lease(bench: BareBench) -> None:
    bench.probe_due()
    call = bench.call()

    def renewed(_: object) -> None:
        bench.clock.sleep(call.options.ttl * 0.9)
        renewal = Renewal(KEY.stored, call.token, call.options.ttl, slot=(GROUP, 0))
        assert bench.stores.renew([renewal]) == [RenewalResult.OURS]
        bench.clock.sleep(call.options.ttl * 0.9)
        assert bench.closed_group is not None
        assert bench.closed_group.probe == call.token

    bench.run(call, FOR_GOOD, during=renewed)
    assert len(bench.ran) == 1


def test_marks_are_rows(bench: BareBench) -> None:
    marks: LeasesWithRowMarks = bench.stores  # type: ignore[assignment]
    assert marks.swap_mark("k", "m", None, "1", 60.0)
    assert marks.mark("k", "m") == "1"
