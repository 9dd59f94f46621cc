"""Two workers and an operator, step by step: what the one does between two steps of the other.

The claim is searched: all that two calls, their renewals and outcomes, an operator and time can do
in so many steps.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from celery_leases.decide.endings import Interrupted, Lost, Snoozed
from celery_leases.decide.verdicts import Raise, Reschedule, Return, Verdict
from celery_leases.errors import CoolingDown, KeyReused, PermanentFailure, Snooze
from celery_leases.events import GroupOpened
from celery_leases.record import State
from celery_leases.stores.sql.rows import COMPARED
from tests.unit import claim_model
from tests.unit.claim_model import Broken, beginnings, search, walk
from tests.unit.decision_inputs import GROUP, KEY, OURS, THEIRS
from tests.unit.memory_worker import OF_THE_GROUP, OF_THE_KEY, RATE_LIMITED, SOON, Bench, error

OTHER_ARGUMENTS = replace(KEY, fingerprint="v1:other", digests={"month": "m2"})
OTHER_KEY = replace(KEY, key="invoice:7", stored="t:billing.send|invoice:7")


@pytest.fixture(params=[False, True], ids=["leases apart", "rows are leases"])
def bench(request: pytest.FixtureRequest) -> Bench:
    return Bench(request.param)


class TestAnotherCallDuringACooldown:
    """It must not run, must not spoil anything, and may run afterwards."""

    def test_it_gets_the_error_and_the_first_call_resumes(self, bench: Bench) -> None:
        call = bench.call()
        bench.run(call, OF_THE_KEY)
        for _ in range(3):
            assert isinstance(error(bench.run(bench.call(call_id=THEIRS))), CoolingDown)
        bench.clock.sleep(60.0)
        assert bench.run(bench.again(call)) == Return(1)
        assert (len(bench.ran), bench.row.attempt) == (2, 2)

    def test_it_may_overtake_the_first_call_which_is_then_replayed(self, bench: Bench) -> None:
        call = bench.call()
        bench.run(call, OF_THE_KEY)
        bench.clock.sleep(60.0)
        assert bench.run(bench.call(call_id=THEIRS)) == Return(1)
        assert bench.run(bench.again(call)) == Return(1, THEIRS)
        assert len(bench.ran) == 2

    def test_it_may_fail_too_and_both_resume(self, bench: Bench) -> None:
        first, second = bench.call(), bench.call(call_id=THEIRS)
        bench.run(first, OF_THE_KEY)
        bench.clock.sleep(60.0)
        bench.run(second, OF_THE_KEY)
        assert isinstance(bench.run(bench.again(first)), Reschedule)
        assert (bench.row.failures, bench.row.cooldowns, bench.row.call_id) == (2, 2, THEIRS)
        bench.clock.sleep(bench.row.waits)
        assert bench.run(bench.again(first)) == Return(1)
        assert bench.run(bench.again(second)) == Return(1, OURS)
        assert len(bench.ran) == 3

    def test_it_meets_the_lease_of_a_call_that_is_just_writing_its_failure(self, bench) -> None:
        met: list[Verdict] = []
        bench.journal.before("cool", lambda: met.append(bench.run(bench.call(call_id=THEIRS))))
        bench.run(bench.call(), OF_THE_KEY)
        assert isinstance(met[0], Reschedule | Raise)
        assert len(bench.ran) == 1
        assert bench.state is State.COOLING

    def test_in_the_last_second_it_does_not_block_the_call_that_resumes(self) -> None:
        bench = Bench()
        call = bench.call()
        bench.run(call, OF_THE_KEY)
        bench.clock.sleep(59.5)
        met: list[Verdict] = []
        bench.journal.before("claim", lambda: met.append(bench.run(bench.again(call))))
        assert isinstance(error(bench.run(bench.call(call_id=THEIRS))), CoolingDown)
        assert isinstance(met[0], Reschedule)
        assert met[0].delay < 2.0
        assert isinstance(bench.run(bench.again(call)), Reschedule), "a server's time is not cut"
        bench.clock.sleep(0.5)
        assert bench.run(bench.again(call)) == Return(1)

    def test_two_that_find_the_cooldown_over_do_not_run_together(self) -> None:
        bench = Bench()
        bench.run(bench.call(), OF_THE_KEY)
        bench.records.retry(KEY.stored)
        met: list[Verdict] = []
        bench.journal.before(
            "end_cooldown", lambda: met.append(bench.run(bench.call(call_id="third"), OF_THE_KEY))
        )
        reply = bench.run(bench.call(call_id=THEIRS))
        assert isinstance(met[0], Reschedule)
        assert isinstance(error(reply), CoolingDown)
        assert len(bench.ran) == 2


class TestAFreshMessage:
    """A message with the id of a call whose caller got the failure: from a dead-letter queue, or
    sent by hand.
    """

    def test_that_comes_during_the_cooldown_runs_once_after_it(self, bench: Bench) -> None:
        call = bench.call(resume="never")
        bench.run(call, OF_THE_KEY)
        reply = bench.run(bench.call())
        assert isinstance(reply, Reschedule)
        assert reply.failure_fence == bench.row.fence
        copy = bench.again(call, failure_fence=reply.failure_fence)
        hop = bench.run(copy)
        assert isinstance(hop, Reschedule)
        assert hop.failure_fence == reply.failure_fence
        bench.clock.sleep(60.0)
        assert str(error(bench.run(bench.redelivered(call)))) == "ValueError: boom"
        bench.run(bench.again(copy), OF_THE_KEY)
        bench.clock.sleep(120.0)
        assert str(error(bench.run(bench.again(copy)))) == "ValueError: boom"
        assert len(bench.ran) == 2

    def test_that_arrives_during_an_outage_is_still_new_afterwards(self, bench: Bench) -> None:
        call = bench.call(resume="never")
        bench.run(call, OF_THE_KEY)
        bench.clock.sleep(60.0)
        assert bench.run(bench.again(call, failure_fence=0)) == Return(1)


class TestAnOperator:
    """Retries a key while a copy of its call is on its way."""

    def test_the_call_called_again_runs_and_the_copy_is_replayed(self, bench: Bench) -> None:
        call = bench.call()
        bench.run(call, OF_THE_KEY)
        bench.records.retry(KEY.stored)
        assert bench.run(bench.call(call_id=THEIRS)) == Return(1)
        assert bench.run(bench.again(call)) == Return(1, THEIRS)
        assert len(bench.ran) == 2

    def test_the_copy_that_arrives_meanwhile_is_rescheduled(self, bench: Bench) -> None:
        call = bench.call(on_busy="raise", on_done="raise")
        bench.run(call, OF_THE_KEY)
        bench.records.retry(KEY.stored)
        met: list[Verdict] = []
        other = bench.call(call_id=THEIRS)
        bench.run(other, during=lambda _: met.append(bench.run(bench.again(call))))
        assert isinstance(met[0], Reschedule)
        assert bench.run(bench.again(call)) == Return(1, THEIRS)

    def test_the_copy_may_come_first_as_a_hop(self, bench: Bench) -> None:
        call = bench.call()
        bench.run(call, OF_THE_KEY)
        bench.records.retry(KEY.stored)
        assert isinstance(bench.run(bench.again(call), OF_THE_KEY), Reschedule)
        assert (bench.row.failures, bench.row.waits) == (1, 60.0)

    def test_a_retry_between_settling_and_cooling_is_not_undone(self) -> None:
        bench = Bench()
        call = bench.call()

        def retry_by_force() -> None:
            bench.records.retry(KEY.stored)
            bench.memory.leases.clear()

        bench.journal.before("cool", retry_by_force)
        bench.run(call, OF_THE_KEY)
        assert not bench.cools
        assert bench.run(bench.call(call_id=THEIRS)) == Return(1)

    def test_a_retry_ends_the_refusals(self, bench: Bench) -> None:
        call = bench.call(resume="never")
        bench.run(call, OF_THE_KEY)
        assert isinstance(error(bench.run(bench.again(call))), PermanentFailure)
        bench.records.retry(KEY.stored)
        assert bench.run(bench.again(call)) == Return(1)

    def test_a_retry_of_the_key_does_not_open_its_groups_group(self, bench: Bench) -> None:
        call = bench.call()
        bench.run(call, OF_THE_GROUP)
        bench.records.retry(KEY.stored)
        assert isinstance(bench.run(bench.again(call)), Reschedule)
        bench.stores.groups.open(GROUP)
        assert bench.run(bench.again(call)) == Return(1)


class TestOtherArguments:
    def test_they_are_refused_while_the_first_call_will_resume(self, bench: Bench) -> None:
        bench.run(bench.call(), OF_THE_GROUP)
        for _ in range(2):
            assert isinstance(
                error(bench.run(bench.call(call_id=THEIRS, key=OTHER_ARGUMENTS))), KeyReused
            )
            bench.clock.sleep(61.0)
        assert len(bench.ran) == 1

    def test_they_may_have_the_key_of_a_call_that_stopped_once_it_has_cooled(self, bench) -> None:
        call = bench.call(resume="never")
        bench.run(call, OF_THE_KEY)
        assert isinstance(
            error(bench.run(bench.call(call_id=THEIRS, key=OTHER_ARGUMENTS))), CoolingDown
        )
        bench.clock.sleep(60.0)
        assert bench.run(bench.call(call_id=THEIRS, key=OTHER_ARGUMENTS)) == Return(1)
        assert isinstance(error(bench.run(bench.redelivered(call))), KeyReused)
        assert len(bench.ran) == 2


class TestRerun:
    """Each call is work of its own; the key is a mutex, and cools for all."""

    def test_a_cooldown_of_one_call_blocks_the_others_and_each_runs_once(self, bench) -> None:
        first, second = bench.call(runs="each"), bench.call(runs="each", call_id=THEIRS)
        bench.run(first, OF_THE_KEY)
        assert isinstance(error(bench.run(second)), CoolingDown)
        bench.clock.sleep(60.0)
        assert bench.run(bench.again(second)) == Return(1)
        assert bench.run(bench.again(first)) == Return(1)
        for call in (first, second):
            assert bench.run(bench.again(call)) == Return(1, call.call_id)
        assert len(bench.ran) == 3

    def test_a_copy_of_the_call_that_cools_does_not_run_twice(self, bench: Bench) -> None:
        call = bench.call(runs="each")
        bench.run(call, OF_THE_KEY)
        bench.clock.sleep(60.0)
        met: list[Verdict] = []
        bench.run(
            bench.again(call), during=lambda _: met.append(bench.run(bench.redelivered(call)))
        )
        assert isinstance(met[0], Reschedule)
        assert bench.run(bench.redelivered(call)) == Return(1, OURS)
        assert len(bench.ran) == 2


class TestOneGroupForManyKeys:
    def test_bodies_that_fail_together_are_one_closing_and_probe_one_by_one(self, bench) -> None:
        first, second = bench.call(), bench.call(key=OTHER_KEY, call_id=THEIRS)
        bench.run(first, OF_THE_GROUP, during=lambda _: bench.run(second, OF_THE_GROUP))
        assert bench.closed_group is not None
        assert bench.closed_group.in_a_row == 1
        bench.clock.sleep(60.0)
        met: list[Verdict] = []
        bench.run(bench.again(first), during=lambda _: met.append(bench.run(bench.again(second))))
        assert isinstance(met[0], Reschedule)
        assert met[0].delay <= 1.1
        assert bench.run(bench.again(second)) == Return(1)
        assert len(bench.seen.of(GroupOpened)) == 1

    def test_a_body_that_began_before_the_group_closed_does_not_close_it_again(self, bench) -> None:
        slow, probe = bench.call(key=OTHER_KEY, call_id=THEIRS), bench.call()

        def meanwhile(_: Any) -> None:
            bench.probe_due()
            bench.run(probe, during=late_failure)

        def late_failure(_: Any) -> None:
            bench.stores.groups.close(GROUP, RATE_LIMITED, slow.token)

        bench.run(slow, during=meanwhile)
        assert bench.closed_group is not None
        assert (
            bench.closed_group.in_a_row,
            bench.closed_group.probe,
            bench.closed_group.closed_for,
        ) == (1, None, 60.0)
        assert bench.seen.of(GroupOpened) == []


def test_quick_retries_outlive_everything_that_is_no_failure(bench: Bench) -> None:
    call = bench.call(max_retries=2)
    for ending in (
        SOON,
        Snoozed(Snooze(5), 5.0),
        SOON,
        Lost("taken"),
        Interrupted(SystemExit()),
        SOON,
    ):
        bench.run(bench.again(call), ending)
        bench.clock.sleep(10.0)
    assert (bench.state, bench.row.failures, bench.row.attempt, bench.row.crashes) == (
        State.COOLING, 1, 3, 0,
    )  # fmt: skip


# -- two claims of one key, and all that happens between their steps -------------------------------


@pytest.mark.parametrize(
    ("accidents", "depth"), [(1, 6), pytest.param(0, 8, marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize("begin", [name for name, _ in beginnings(0)])
def test_each_claim_is_one_step_even_with_other_steps_between_its_read_and_its_write(
    begin: str, accidents: int, depth: int
) -> None:
    assert search(dict(beginnings(accidents))[begin], depth) > 5_000


@pytest.mark.parametrize("begin", [name for name, _ in beginnings(0)])
def test_so_it_is_in_long_walks_with_many_accidents(begin: str) -> None:
    for seed in range(100):
        walk(dict(beginnings(4))[begin], seed, 40)


@pytest.mark.parametrize("column", sorted(set(COMPARED) - {"state", "owner"}))
def test_the_search_finds_what_a_column_is_compared_for(monkeypatch, column) -> None:
    monkeypatch.setattr(claim_model, "COMPARED", [name for name in COMPARED if name != column])
    with pytest.raises(Broken):
        all(search(world, 6) for _, world in beginnings(1))
