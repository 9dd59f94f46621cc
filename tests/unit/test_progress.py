"""Saved progress: what is remembered, when it is saved, and where a loop goes on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from celery_leases.body.null_lease import Unleased
from celery_leases.call import Call
from celery_leases.decide.endings import Interrupted, Lost, Snoozed, Terminated
from celery_leases.errors import (
    EffectMisused,
    GuardOpen,
    LeaseConfigurationError,
    LeaseLost,
    LeaseMisuse,
    Snooze,
    StoreUnavailable,
)
from celery_leases.failures.actions import cooldown
from celery_leases.lease import SAVE_EVERY, Lease
from celery_leases.progress import Progress, checked, dump, load
from celery_leases.record import State
from celery_leases.status import status_of
from tests.unit.decision_inputs import a_call, closed, raised
from tests.unit.effect_attempts import Attempt, EffectBench


@pytest.fixture
def desk() -> EffectBench:
    return EffectBench()


@pytest.fixture
def attempt(desk: EffectBench) -> Attempt:
    return desk.attempt()


class Killed(BaseException):
    """The process has died here: nothing that comes after it is done."""


def die() -> None:
    raise Killed


def work(
    lease: Lease,
    items: Iterable[int],
    place: int,
    then: Callable[[], object],
    done: list[int] | None = None,
    **more: Any,
) -> None:
    """Loop over *items*, and do *then* at the one called *place* before it is done."""
    for item in lease.each(items, **more):
        if item == place:
            then()
        if done is not None:
            done.append(item)


class OpenTransaction:
    """The user's transaction, which is open until the test ends it."""

    open = True

    def is_open(self) -> bool:
        return self.open

    def is_over(self) -> bool:
        return not self.open

    def roll_back(self) -> None:
        """Not by these tests."""


class TestWhatIsStored:
    @pytest.mark.parametrize("value", [None, 0, "", [], {"page": 3}, "ü ✓"])
    @pytest.mark.parametrize("positions", [{}, {"items": 3, "naïve ✓": 0}])
    def test_it_is_read_as_it_was_written(self, value: Any, positions: Any) -> None:
        progress = Progress(checked(value, "k"), positions)
        assert load(dump(progress, 3), 3) == progress

    def test_that_of_another_generation_does_not_count(self) -> None:
        text = dump(Progress('"x"', {"items": 3}), 3)
        assert load(text, 4) == load(None, 3) == Progress()
        assert load(text, 3) != Progress()

    @pytest.mark.parametrize("value", [object(), {1, 2}, lambda: None, {"a": object()}])
    def test_what_is_no_json_is_refused(self, attempt: Attempt, value: Any) -> None:
        attempt.lease.save_progress("before")
        attempt.desk.steps()
        with pytest.raises(EffectMisused, match=r"save_progress\(\) takes a JSON value, not"):
            attempt.lease.save_progress(value)
        assert attempt.desk.steps() == []
        assert attempt.lease.progress == "before"

    def test_operators_see_how_far_the_loops_have_come(self, desk, attempt) -> None:
        assert status_of("k", "t", desk.row, None, wall_time=0.0).progress is None
        list(attempt.lease.each([1, 2]))
        list(attempt.lease.each("abc", name="letters"))
        assert status_of("k", "t", desk.row, None, wall_time=0.0).progress == {
            "items": 2,
            "letters": 3,
        }
        attempt.lease.save_progress({"page": 3})
        assert status_of("k", "t", desk.row, None, wall_time=0.0).progress == {"page": 3}


class TestSaveProgress:
    def test_it_is_there_for_the_next_attempt(self, desk: EffectBench, attempt: Attempt) -> None:
        assert attempt.lease.progress is None
        attempt.lease.save_progress({"page": (1, 2)})
        assert attempt.lease.progress == {"page": [1, 2]}
        attempt.lease.save_progress(7)
        assert desk.attempt().lease.progress == 7
        assert desk.attempt().lease.progress == 7

    def test_it_renews_the_lease(self, desk: EffectBench, attempt: Attempt) -> None:
        desk.clock.sleep(5.0)
        left = attempt.lease.remaining()
        attempt.lease.save_progress(1)
        assert desk.steps() == ["save", "extend"]
        assert attempt.lease.remaining() == pytest.approx(left + 5.0)

    def test_it_ends_a_row_of_crashes(self, desk: EffectBench) -> None:
        for _ in range(3):
            attempt = desk.attempt()
        assert desk.row.crashes == 2
        attempt.lease.save_progress(1)
        assert (desk.row.crashes, attempt.held_lease.body_state.progressed) == (0, True)

    def test_a_lost_lease_saves_nothing(self, desk: EffectBench, attempt: Attempt) -> None:
        attempt.lose()
        with pytest.raises(LeaseLost):
            attempt.lease.save_progress(1)
        assert (desk.steps(), desk.row.progress) == ([], None)

    def test_a_record_that_has_moved_on_takes_nothing(self, desk, attempt) -> None:
        desk.attempt().lease.save_progress("theirs")
        with pytest.raises(LeaseLost, match="was changed by another attempt"):
            attempt.lease.save_progress("ours")
        assert attempt.lease.progress is None
        assert desk.attempt().lease.progress == "theirs"

    def test_a_store_that_does_not_answer_raises(self, desk: EffectBench, attempt: Attempt) -> None:
        desk.journal.away("save", times=1)
        with pytest.raises(StoreUnavailable):
            attempt.lease.save_progress(1)
        assert (attempt.lease.progress, attempt.held_lease.body_state.progressed) == (None, False)
        attempt.lease.save_progress(2)
        assert attempt.lease.progress == 2

    def test_a_lease_that_could_not_be_renewed_does_not_undo_it(self, desk, attempt) -> None:
        desk.journal.away("extend")
        with pytest.raises(StoreUnavailable):
            attempt.lease.save_progress(1)
        assert desk.attempt().lease.progress == 1

    def test_a_new_generation_begins_without_any(self, desk: EffectBench) -> None:
        one = desk.attempt("one", each_runs=True).lease
        one.save_progress(1)
        assert list(one.each("ab")) == ["a", "b"]
        two = desk.attempt("two", each_runs=True).lease
        assert (two.progress, list(two.each("ab"))) == (None, ["a", "b"])

    def test_a_signal_that_came_meanwhile_is_raised_once_it_is_saved(self, desk, attempt) -> None:
        attempt.pending = SystemExit()
        with pytest.raises(SystemExit):
            attempt.lease.save_progress(1)
        assert attempt.lease.progress == 1


class TestEach:
    """Loops that go on where an earlier attempt has stopped."""

    @pytest.fixture
    def items(self) -> list[str]:
        return [f"item {number}" for number in range(100)]

    def test_all_items_come_in_their_order(self, desk, attempt, items) -> None:
        assert list(attempt.lease.each(items)) == items
        assert desk.steps() == ["save", "save"]
        assert list(desk.attempt().lease.each(items)) == []

    def test_none_is_a_loop_too(self, desk: EffectBench, attempt: Attempt) -> None:
        assert list(attempt.lease.each([])) == []
        assert desk.steps() == []

    def test_it_is_saved_once_a_second(self, desk, attempt, items) -> None:
        for _ in attempt.lease.each(items):
            desk.clock.sleep(0.1)
        assert 10 <= len(desk.steps()) <= 12

    def test_slow_items_are_saved_one_by_one(self, desk, attempt, items) -> None:
        for _ in attempt.lease.each(items[:5]):
            desk.clock.sleep(2.0)
        assert desk.steps() == ["save"] * 5

    @pytest.mark.parametrize(("every", "saves"), [(1, 100), (7, 15), (100, 1), (1000, 1)])
    def test_with_every_it_is_saved_after_so_many(self, desk, attempt, items, every, saves) -> None:
        for _ in attempt.lease.each(items, every=every):
            desk.clock.sleep(0.01)
        assert desk.steps() == ["save"] * saves

    def test_an_item_is_finished_once_the_next_one_is_asked_for(self, desk, attempt) -> None:
        for item in attempt.lease.each("abcdef", every=1):
            if item == "d":
                break
        assert list(desk.attempt().lease.each("abcdef")) == ["d", "e", "f"]

    def test_items_are_taken_only_when_they_are_asked_for(self, desk, attempt) -> None:
        taken: list[int] = []

        def pages() -> Iterator[int]:
            for number in range(1000):
                taken.append(number)
                yield number

        for number in attempt.lease.each(pages()):
            if number == 2:
                break
        assert taken == [0, 1, 2]

    def test_an_attempt_that_is_interrupted_loses_nothing(self, desk, attempt) -> None:
        endings: list[Any] = [
            raised(cooldown("60s")), Snoozed(Snooze(5), 5.0), Lost("gone"),
            Interrupted(SystemExit()), Terminated(SystemExit(), "hard time limit"),
        ]  # fmt: skip
        done: list[int] = []
        for number, ending in enumerate(endings):
            with pytest.raises(Killed):
                work(attempt.lease, range(100), 5 * number + 4, die, done)
            unsaved = attempt.held_lease.body_state.unsaved_progress()
            assert unsaved != desk.row.progress
            assert load(unsaved, 0).positions == {"items": 5 * number + 4}
            desk.records.settle(attempt.record, _outcome(attempt, ending, unsaved))
            desk.clock.sleep(10_000.0)
            attempt = desk.attempt()
        assert done == list(range(24))

    @pytest.mark.parametrize("every", [None, 1, 1000])
    def test_a_lost_lease_stops_it_between_two_items(self, desk, attempt, every) -> None:
        seen: list[int] = []
        with pytest.raises(LeaseLost):
            work(attempt.lease, range(10), 3, attempt.lose, seen, every=every)
        assert seen == [0, 1, 2, 3]
        unsaved = attempt.held_lease.body_state.unsaved_progress()
        assert load(unsaved, 0).positions == {"items": 4}

    def test_it_stops_at_once_when_it_was_lost_before(self, desk, attempt) -> None:
        attempt.lose()
        with pytest.raises(LeaseLost):
            next(iter(attempt.lease.each("ab")))

    def test_a_record_that_has_moved_on_stops_it(self, desk: EffectBench, attempt: Attempt) -> None:
        others: list[Attempt] = []
        with pytest.raises(LeaseLost, match="was changed by another attempt"):
            work(attempt.lease, range(10), 3, lambda: others.append(desk.attempt()), every=1)
        assert load(desk.row.progress, 0).positions == {"items": 3}
        assert list(others[0].lease.each(range(5))) == [3, 4]

    def test_a_store_that_does_not_answer_ends_the_attempt(self, desk, attempt) -> None:
        with pytest.raises(StoreUnavailable):
            work(attempt.lease, range(10), 3, lambda: desk.journal.away("save"), every=1)
        unsaved = attempt.held_lease.body_state.unsaved_progress()
        assert load(unsaved, 0).positions == {"items": 4}

    def test_loops_of_other_names_have_their_own_positions(self, desk, attempt) -> None:
        def both(lease: Any, dies: tuple[str, int] | None) -> list[tuple[str, int]]:
            done = []
            for letter in lease.each("ab", name="letters", every=1):
                for number in lease.each(range(3), name=f"numbers of {letter}", every=1):
                    if (letter, number) == dies:
                        return done
                    done.append((letter, number))
            return done

        assert both(attempt.lease, ("b", 1)) == [("a", 0), ("a", 1), ("a", 2), ("b", 0)]
        assert both(desk.attempt().lease, None) == [("b", 1), ("b", 2)]

    def test_a_name_is_used_once_in_an_attempt(self, desk: EffectBench, attempt: Attempt) -> None:
        """The second loop would skip as many items as the first one had, without a word."""
        assert list(attempt.lease.each("ab")) == ["a", "b"]
        with pytest.raises(EffectMisused, match=r"each\(\) named 'items' twice.*name="):
            attempt.lease.each("cde")
        assert list(attempt.lease.each("cde", name="more")) == ["c", "d", "e"]

    @pytest.mark.parametrize("every", [0, -1, 1.5, True, "1"])
    def test_a_wrong_number_is_named_at_once(self, attempt: Attempt, every: Any) -> None:
        with pytest.raises(LeaseMisuse, match=r"each\(every="):
            attempt.lease.each("ab", every=every)

    @pytest.mark.parametrize("name", [None, 1, ("a",)])
    def test_a_wrong_name_raises_at_once(self, attempt: Attempt, name: Any) -> None:
        """JSON would make another one of it."""
        with pytest.raises(EffectMisused, match=r"each\(name="):
            attempt.lease.each("ab", name=name)

    def test_value_and_positions_are_saved_together(self, desk, attempt) -> None:
        for item in attempt.lease.each(range(10), every=5):
            attempt.lease.save_progress({"sum": item})
            if item == 6:
                break
        later = desk.attempt().lease
        assert later.progress == {"sum": 6}
        assert next(iter(later.each(range(10), every=1))) == 6

    def test_saving_a_value_counts_as_saving(self, desk: EffectBench, attempt: Attempt) -> None:
        for _ in attempt.lease.each("abc", every=10):
            attempt.lease.save_progress(1)
        assert desk.steps() == [*["save", "extend"] * 3, "save"]

    @pytest.mark.parametrize(("renew", "steps"), [(True, ["save"]), (False, ["save", "extend"])])
    def test_under_lease_renew_false_it_is_what_pushes_the_lease_out(self, desk, renew, steps):
        attempt = desk.attempt(renew=renew)
        for _ in attempt.lease.each(range(100 if not renew else 1)):
            desk.clock.sleep(1.0)
        assert desk.steps() == steps * (100 if not renew else 1)
        assert attempt.lease.held

    def test_nothing_is_saved_while_a_transaction_of_the_users_own_is_open(self, desk, attempt):
        """It would wait for its own thread's lock."""
        transaction: Any = OpenTransaction()
        with attempt.held_lease.body_state.locking(transaction):
            pass
        with pytest.raises(GuardOpen):
            attempt.lease.save_progress(1)
        with pytest.raises(GuardOpen, match="each"):
            list(attempt.lease.each("ab"))
        with pytest.raises(GuardOpen, match="effect"):
            attempt.lease.effect("charge", desk.calling())
        assert (desk.steps(), desk.called) == ([], [])
        transaction.open = False
        attempt.lease.save_progress(1)


def _outcome(attempt: Attempt, ending: Any, unsaved: str) -> Any:
    call: Call = a_call(call_id=attempt.record.call_id, max_crashes=100)
    outcome = replace(closed(call, ending, attempt.record), progress=unsaved)
    assert outcome.state in (State.PENDING, State.COOLING)
    return outcome


@settings(max_examples=200)
@given(
    every=st.sampled_from([1, 2, 5, None]),
    deaths=st.lists(st.tuples(st.integers(0, 40), st.booleans()), max_size=8),
    pace=st.sampled_from([0.0, 0.05, 0.3, 1.5]),
)
def test_after_any_death_nothing_is_skipped_and_little_is_repeated(every, deaths, pace) -> None:
    desk, done = EffectBench(), []
    items = range(50)
    for place, killed in [*deaths, (10**9, True)]:
        attempt = desk.attempt()
        before = len(done)
        try:
            for number, item in enumerate(attempt.lease.each(items, every=every)):
                done.append(item)
                if number == place:
                    raise Killed
                desk.clock.sleep(pace)
                desk.journal.clear()
                attempt.lease.extend(desk.ttl)
        except Killed:
            unsaved = attempt.held_lease.body_state.unsaved_progress
            if not killed and unsaved is not None:
                desk.records.settle(attempt.record, _outcome(attempt, Lost("gone"), unsaved()))
        run = done[before:]
        assert run == list(range(run[0], run[0] + len(run))) if run else True
        if before and run:
            # Those of the last second, or of the last save; and the item it died in.
            allowed = every - 1 if every else int(SAVE_EVERY / pace) + 1 if pace else 50
            assert done[before - 1] - allowed <= run[0] <= done[before - 1] + 1
    assert sorted(set(done)) == list(items)


class TestWithoutALease:
    def test_it_loops_over_all_items(self) -> None:
        assert list(Unleased().each("ab")) == list(Unleased().each("ab", every=1)) == ["a", "b"]

    def test_nothing_is_saved(self) -> None:
        lease = Unleased()
        lease.save_progress(object())
        assert lease.progress is None


@pytest.mark.parametrize(
    ("given", "lasts"), [("5m", 300.0), (timedelta(minutes=2), 120.0), (90, 90.0)]
)
def test_a_lease_is_extended_by_any_span_of_time(given: Any, lasts: float) -> None:
    attempt = EffectBench().attempt()
    attempt.lease.extend(given)
    assert attempt.lease.remaining() > lasts / 2


@pytest.mark.parametrize("given", [0, -1, math.inf, math.nan, "soon", None, True, 1e12])
def test_a_lease_is_not_extended_by_what_is_no_time(given: Any) -> None:
    desk = EffectBench()
    attempt = desk.attempt()
    with pytest.raises(LeaseConfigurationError, match="extend"):
        attempt.lease.extend(given)
    assert "extend" not in desk.steps()
