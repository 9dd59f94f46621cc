"""The probe of a group that is due for a probe: which call gets its slot, what its end does to the
group, and that the slot is given back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from celery_leases.attempt.run import Execution
from celery_leases.call import Call
from celery_leases.decide.endings import (
    ControlFlow,
    Interrupted,
    Lost,
    Returned,
    Snoozed,
    Terminated,
)
from celery_leases.decide.verdicts import Raise, Reschedule, Return, Run
from celery_leases.errors import CoolingDown, LeaseStoreMismatch, PermanentFailure, Snooze
from celery_leases.events import GroupOpened
from celery_leases.failures.actions import Reason, cooldown, permanent, retry
from celery_leases.record import Ended, Record, State
from tests.unit.decision_inputs import GROUP, KEY, THEIRS, a_record, raised, waiting
from tests.unit.memory_worker import DONE, RATE_LIMITED, Bench

OTHER_KEY = replace(KEY, key="invoice:7", stored="t:billing.send|invoice:7")
OF_THE_GROUP = raised(cooldown("30s", scope="group"), reason=Reason.RATE_LIMITED)


@pytest.fixture(params=[False, True], ids=["leases apart", "rows are leases"])
def bench(request: pytest.FixtureRequest) -> Bench:
    """A worker whose group is due for a probe."""
    bench = Bench(request.param)
    bench.probe_due()
    return bench


def free(bench: Bench) -> bool:
    """Whether the group is due for a probe, and the next one may probe."""
    return (
        bench.closed_group is not None
        and bench.closed_group.probe_due
        and bench.closed_group.probe is None
    )


class TestWhoProbes:
    def test_the_first_body_is_the_probe_and_others_wait_for_it(self, bench: Bench) -> None:
        replies = []

        def meanwhile(_: Any) -> None:
            replies.append(bench.run(bench.call(key=OTHER_KEY, call_id=THEIRS, on_busy="raise")))
            replies.append(bench.run(bench.call(key=OTHER_KEY, call_id=THEIRS)))

        assert bench.run(bench.call(), during=meanwhile) == Return(1)
        told, back = replies
        assert isinstance(told, Raise)
        assert isinstance(told.error, CoolingDown)
        assert isinstance(back, Reschedule)
        assert back.delay < told.error.retry_after == 15.0
        assert len(bench.ran) == 1

    def test_a_probe_that_was_killed_gives_way_when_its_slot_ends(self, bench: Bench) -> None:
        dead = bench.call(key=OTHER_KEY)
        bench.probe_due()
        assert Execution(bench.process, dead).acquire() == Run()
        assert isinstance(bench.run(bench.call()), Reschedule)
        bench.clock.sleep(15.0)
        assert bench.run(bench.call()) == Return(1)
        assert bench.closed_group is None

    def test_after_a_probe_without_a_finding_the_next_one_probes(self, bench: Bench) -> None:
        bench.run(bench.call(), raised(retry("1s")))
        assert bench.run(bench.call(key=OTHER_KEY)) == Return(1)
        assert bench.closed_group is None


class TestWhatItsEndMeans:
    """Success, or a failure of something else, opens; the group's closes; anything else is no
    finding.
    """

    def test_its_success_opens_the_group_once_and_its_closings_are_forgotten(self, bench) -> None:
        assert bench.run(bench.call()) == Return(1)
        assert bench.closed_group is None
        assert [event.group for event in bench.seen.of(GroupOpened)] == [GROUP]  # type: ignore[attr-defined]
        assert bench.steps("open_group", "release_slot") == ["open_group"]
        assert bench.run(bench.call(key=OTHER_KEY)) == Return(1)
        assert len(bench.seen.of(GroupOpened)) == 1
        bench.run(bench.call(key=replace(OTHER_KEY, stored="t:billing.send|third")), OF_THE_GROUP)
        assert bench.closed_group is not None
        assert bench.closed_group.in_a_row == 1

    @pytest.mark.parametrize(
        "ending",
        [raised(permanent()), raised(cooldown("60s", jitter=0.0))],
        ids=["permanent", "key"],
    )
    def test_a_failure_that_is_clearly_anothers_opens_it_too(self, bench, ending) -> None:
        bench.run(bench.call(), ending)
        assert bench.closed_group is None
        assert len(bench.seen.of(GroupOpened)) == 1
        assert bench.state in (State.FAILED, State.COOLING)

    def test_a_failure_of_the_group_closes_it_for_longer(self, bench: Bench) -> None:
        bench.run(bench.call(), OF_THE_GROUP)
        assert bench.closed_group is not None
        assert (
            bench.closed_group.in_a_row,
            bench.closed_group.closed_for,
            bench.closed_group.probe,
        ) == (2, 60.0, None)
        assert (bench.state, bench.row.waits) == (State.COOLING, 60.0)
        assert bench.seen.of(GroupOpened) == []
        bench.clock.sleep(60.0)
        assert free(bench)

    @pytest.mark.parametrize(
        "ending",
        [
            raised(retry("1s")),
            raised(cooldown("60s", ambiguous=True)),
            raised(retry("1s", ambiguous=True)),
            Snoozed(Snooze(60), 60.0),
            Lost("the body raised it"),
            Interrupted(SystemExit()),
            Terminated(SystemExit(), "hard time limit"),
            ControlFlow(Exception(), runs_again=True, delay=9.0),
            ControlFlow(Exception(), runs_again=False, ended=Ended.IGNORED),
            ControlFlow(Exception(), runs_again=False, ended=Ended.REJECTED),
            ControlFlow(Exception(), runs_again=False, ended=Ended.REPLACED),
        ],
        ids=lambda ending: type(ending).__name__,
    )
    def test_anything_else_leaves_it_due_for_a_probe_and_gives_the_slot_back(
        self, bench, ending
    ) -> None:
        bench.run(bench.call(), ending)
        assert free(bench)
        assert bench.seen.of(GroupOpened) == []
        assert not bench.held

    def test_an_outcome_that_is_not_accepted_is_no_finding(self, bench: Bench) -> None:
        bench.run(bench.call(), DONE, during=lambda _: bench.records.retry(KEY.stored))
        assert free(bench)

    def test_a_lost_lease_leaves_the_group_alone_and_frees_the_slot(self, bench: Bench) -> None:
        def lose(held_lease: Any) -> None:
            held_lease.lost = "taken"

        bench.run(bench.call(), DONE, during=lose)
        assert free(bench)
        assert bench.seen.of(GroupOpened) == []

    def test_a_probe_whose_slot_has_ended_opens_nothing(self, bench: Bench) -> None:
        def too_long(held_lease: Any) -> None:
            bench.clock.sleep(15.0)
            held_lease.hard_deadline += 15.0

        bench.run(bench.call(), DONE, during=too_long)
        assert bench.closed_group is not None
        assert bench.seen.of(GroupOpened) == []


class TestAGroupClosedOverItsProbe:
    """A body that began long ago fails of the group while the probe is under way."""

    @pytest.mark.parametrize("ending", [Returned(1, "1"), raised(permanent()), raised(retry("1s"))])
    def test_its_end_opens_nothing_and_gives_the_slot_back(self, bench, ending) -> None:
        short = replace(RATE_LIMITED, server_delay=2.0)
        bench.run(bench.call(), ending, during=lambda _: bench.close_group(short))
        assert bench.closed_group is not None
        assert (
            bench.closed_group.closed_for,
            bench.closed_group.in_a_row,
            bench.closed_group.probe,
        ) == (2.0, 1, None)
        assert bench.seen.of(GroupOpened) == []
        bench.clock.sleep(2.0)
        assert free(bench)

    @pytest.mark.parametrize("late", [2.0, 600.0])
    def test_its_own_failure_is_no_second_trip(self, bench: Bench, late: float) -> None:
        bench.run(
            bench.call(),
            OF_THE_GROUP,
            during=lambda _: bench.close_group(replace(RATE_LIMITED, server_delay=late)),
        )
        assert bench.closed_group is not None
        assert (
            bench.closed_group.in_a_row,
            bench.closed_group.closed_for,
            bench.closed_group.probe,
        ) == (
            1,
            max(30.0, late),
            None,
        )
        assert bench.row.waits == max(30.0, late)


def is_running(bench: Bench, crashes: int) -> None:
    """A row that a dead process left behind, for the so-many-th time."""
    before = bench.records.now() - 60_000_000
    bench.records.rows[KEY.stored] = a_record(
        State.RUNNING, crashes=crashes - 1, lease_store=bench.stores.name, started_at=before
    )


def stores_row(bench: Bench, record: Record) -> None:
    """A row that the records hold, whose times are those of the bench."""
    waits = None if record.retry_at is None else bench.records.now() + round(record.waits * 1e6)
    bench.records.rows[KEY.stored] = replace(record, retry_at=waits, expires_at=None)


def late_by(step: str) -> Callable[[Bench], None]:
    """The answer to a step takes longer than the lease lasts; where rows are leases, both are one
    step.
    """
    return lambda bench: bench.journal.before(
        "acquire" if bench.in_records else step, lambda: bench.clock.sleep(14.0)
    )


def mismatched(bench: Bench) -> None:
    """Two lease stores over one database."""

    def refuse() -> None:
        raise LeaseStoreMismatch("two stores", KEY.key, "a", "b")

    bench.journal.before("acquire" if bench.in_records else "claim", refuse)


def never_answers(bench: Bench) -> None:
    """The claim may or may not have been carried out, and the worker is stopping."""
    bench.stopping = True
    bench.journal.away("acquire" if bench.in_records else "claim", done=True)


def cannot_close(crashes: int) -> Callable[[Bench], None]:
    """The attempt must not run, and the database is gone before its row is closed."""

    def prepare(bench: Bench) -> None:
        is_running(bench, crashes)
        bench.journal.away("settle")

    return prepare


SITUATIONS: dict[str, Callable[[Bench], None]] = {
    "refused: cooling, and the lease store forgot": lambda bench: stores_row(bench, waiting(State.COOLING, 60)),
    "refused: a countdown": lambda bench: stores_row(bench, waiting(State.PENDING, 60)),
    "refused: other arguments": lambda bench: stores_row(bench, waiting(State.PENDING, 0, fingerprint="v1:other")),
    "refused: failed for good": lambda bench: stores_row(bench, waiting(State.FAILED, 0)),
    "replayed": lambda bench: stores_row(bench, waiting(State.DONE, 0, result="7")),
    "granted too late": late_by("acquire"),
    "claimed too late": late_by("claim"),
    "stands back": lambda bench: is_running(bench, 2),
    "gives up": lambda bench: is_running(bench, 3),
    "two lease stores": mismatched,
    "the claim is not answered": never_answers,
    "stands back, and cannot say so": cannot_close(2),
    "gives up, and cannot say so": cannot_close(3),
}  # fmt: skip


class TestItsSlotComesBack:
    @pytest.mark.parametrize("prepare", SITUATIONS.values(), ids=SITUATIONS)
    def test_where_the_body_does_not_run(self, bench, prepare) -> None:
        prepare(bench)
        bench.run(bench.call())
        assert bench.ran == []
        assert free(bench)

    def test_where_the_key_is_held_it_is_not_even_taken(self, bench: Bench) -> None:
        """A call that waits for another must not keep the dependency from being tried."""
        holder = bench.call(call_id=THEIRS)
        assert bench.run(holder, during=lambda _: bench.run(bench.call())) == Return(1)
        assert bench.ran == [holder.token]
        assert bench.closed_group is None, (
            "the holder was the probe, and nobody else touched its slot"
        )

    def test_where_the_answer_to_acquire_was_lost(self) -> None:
        bench = Bench()
        bench.probe_due()
        bench.journal.away("acquire", times=1, done=True)
        assert isinstance(bench.run(bench.call()), Reschedule)
        assert free(bench)
        assert not bench.held

    def test_during_an_outage_of_the_group_store_its_slot_expires(self, bench: Bench) -> None:
        bench.journal.away("release_slot", "open_group")
        assert bench.run(bench.call()) == Return(1)
        assert not bench.held
        bench.clock.sleep(15.0)
        assert free(bench)

    def test_a_group_that_could_not_be_opened_is_given_to_the_next_probe(
        self, bench: Bench
    ) -> None:
        bench.journal.away("open_group", times=1)
        assert bench.run(bench.call()) == Return(1)
        assert free(bench)
        assert bench.seen.of(GroupOpened) == []


def test_a_call_that_is_refused_at_the_group_gets_the_reason(bench: Bench) -> None:
    is_running(bench, 3)
    call: Call = bench.call()
    reply = bench.run(call)
    assert isinstance(reply, Raise)
    assert isinstance(reply.error, PermanentFailure)
