"""Runs in a group with a limit or a rate: when a slot is taken, and when it is free."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from celery_leases.attempt.renewal import _renewal as renewal_of
from celery_leases.decide.endings import Lost, Returned, Snoozed
from celery_leases.decide.verdicts import Reschedule, Return
from celery_leases.errors import Snooze, StoreUnavailable
from celery_leases.groups.slots import Ask
from celery_leases.record import State
from tests.unit.decision_inputs import GROUP, KEY, THEIRS
from tests.unit.memory_worker import DONE, OF_THE_KEY, SOON, Bench

OTHER_KEY = replace(KEY, key="invoice:7", stored="t:billing.send|invoice:7")


@pytest.fixture(params=[False, True], ids=["leases apart", "rows are leases"])
def bench(request: pytest.FixtureRequest) -> Bench:
    """A worker whose lease store, or database, has the slots of groups."""
    return Bench(in_records=request.param)


def another(bench: Bench) -> Any:
    """What another call of the group gets now."""
    call = bench.call(key=OTHER_KEY, call_id=THEIRS, ask=Ask(1), resume="never")
    answer = bench.run(call)
    return "full" if isinstance(answer, Reschedule) and answer.full_since else answer


def test_another_call_waits_while_the_body_runs_and_no_longer(bench: Bench) -> None:
    seen = []
    bench.run(bench.call(ask=Ask(1)), during=lambda _: seen.append(another(bench)))
    assert seen == ["full"]
    assert another(bench) == Return(1)


@pytest.mark.parametrize(
    "ending", [DONE, OF_THE_KEY, SOON, Snoozed(Snooze(60), 60.0), Lost("the body raised it")]
)
def test_every_end_frees_the_slot(bench: Bench, ending: Any) -> None:
    bench.run(bench.call(ask=Ask(1)), ending)
    assert another(bench) == Return(1)


def test_a_body_whose_lease_was_taken_counts_until_it_ends(bench: Bench) -> None:
    """Its key may be run by another attempt, but its slot is its own."""
    seen = []

    def stolen(held_lease: Any) -> None:
        bench.records.retry(KEY.stored)
        held_lease.lost = "taken by an operator"
        seen.append(another(bench))

    bench.run(bench.call(ask=Ask(1)), during=stolen)
    assert seen == ["full"]
    assert another(bench) == Return(1)


def test_a_call_that_does_not_run_takes_no_slot(bench: Bench) -> None:
    """Its key is done."""
    bench.run(bench.call())
    done = bench.run(bench.call(call_id=THEIRS, ask=Ask(1)))
    assert isinstance(done, Return)
    slots = bench.stores.groups.slots([GROUP])
    assert not any(found.held for found, _ in slots.values())


def test_a_replay_takes_no_turn_of_the_rate() -> None:
    """A lease store beside the records gives the turn with the lease, so the record comes first."""
    bench = Bench()
    bench.run(bench.call())
    bench.journal.clear()
    assert isinstance(bench.run(bench.call(call_id=THEIRS, ask=Ask(pause=60_000.0))), Return)
    assert "acquire" not in bench.journal


def test_finished_work_is_replayed_although_the_group_is_full(bench: Bench) -> None:
    bench.run(bench.call(key=OTHER_KEY, call_id="first"), Returned(5, "5"))
    seen = []
    again = bench.call(key=OTHER_KEY, call_id=THEIRS, ask=Ask(1))
    bench.run(bench.call(ask=Ask(1)), during=lambda _: seen.append(bench.run(again)))
    assert isinstance(seen[0], Return)
    assert seen[0].value == 5


def test_the_body_begins_when_it_is_its_turn(bench: Bench) -> None:
    began = []
    ask = Ask(pause=200.0)
    for key in (KEY, OTHER_KEY):
        call = bench.call(key=key, call_id=key.key, ask=ask, canvas=True)
        bench.run(call, during=lambda _: began.append(bench.clock.now()))
    assert began[1] - began[0] == pytest.approx(0.2, abs=0.05)
    assert bench.steps("release_slot") == []


def test_a_body_whose_turn_comes_after_its_lease_does_not_begin(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process stood still, so another attempt may hold the key."""
    ask, began, sleep = Ask(pause=200.0), [], bench.clock.sleep
    bench.run(bench.call(key=OTHER_KEY, call_id="first", ask=ask))
    monkeypatch.setattr(bench.clock, "sleep", lambda seconds: sleep(seconds + 1000))
    late = bench.run(bench.call(ask=ask), during=began.append)
    assert isinstance(late, Reschedule)
    assert late.started
    assert (began, bench.row.state) == ([], State.PENDING)
    assert bench.stores.holder(KEY.stored) is None


def test_the_body_begins_when_it_is_its_turn_though_the_reply_to_its_claim_was_lost() -> None:
    """The first one began after the pause of the second try."""
    bench, began = Bench(in_records=True), []
    for key in (KEY, OTHER_KEY):
        bench.journal.away("acquire", times=1, done=True)
        call = bench.call(key=key, call_id=key.key, ask=Ask(pause=200.0))
        bench.run(call, during=lambda _: began.append(bench.clock.now()))
    assert began[1] - began[0] == pytest.approx(0.15, abs=0.01)


def test_a_slot_that_cannot_be_taken_is_an_outage(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call is rescheduled, and nothing runs."""

    def away(*_: Any) -> None:
        raise StoreUnavailable("the database is away", False)

    groups = bench.stores.row_groups or bench.stores.groups
    monkeypatch.setattr(groups, "take" if bench.in_records else "taken", away)
    answer = bench.run(bench.call(ask=Ask(1)))
    assert isinstance(answer, Reschedule)
    assert answer.unavailable
    assert bench.records.row(KEY.stored) is None or bench.state is not State.RUNNING


def test_the_slot_is_renewed_with_the_lease(bench: Bench) -> None:
    """With the limit of the attempt, so that a lost slot can be written again."""
    seen = []
    for ask in (Ask(3), Ask(pause=200.0), None):
        call = bench.call(
            call_id=f"{ask}", key=replace(KEY, stored=f"t:billing.send|{ask}"), ask=ask
        )
        bench.run(call, during=lambda held_lease: seen.append(renewal_of(held_lease, 15.0).slot))
    assert seen == [(GROUP, 3), None, None]
