"""The calls of one held key in a worker: which of them begins when. Celery's timer is played."""

import random
from collections.abc import Sequence
from dataclasses import replace
from time import time
from types import SimpleNamespace
from typing import Any

import pytest
from celery.worker import state

from celery_leases.concurrency import os_threads
from celery_leases.groups.slots import (
    AHEAD,
    OVERTAKING,
    Ask,
    Room,
    Slots,
    Taken,
    room,
    take,
    with_place,
    without_slot,
)
from celery_leases.options import Group, LeaseOptions
from celery_leases.worker.publisher import GroupIsFull, KeyIsHeld
from celery_leases.worker.waiting_calls import (
    ANSWER_VALID_FOR,
    ANSWERED_TOGETHER,
    MAX_FINGERPRINTS,
    MAX_LOOKUP_INTERVAL,
    MAX_RETRY_PAUSE,
    MIN_LOOKUP_INTERVAL,
    ON_THE_WAY,
    GroupWaiters,
    KeyWaiters,
    WaitingCalls,
    _group_key,
)

MANY = 40

pytestmark = pytest.mark.skipif(
    not hasattr(state, "scheduled_requests"), reason="before Celery 5.7 no call is begun early"
)


class Call(SimpleNamespace):
    """A request that Celery's timer has."""

    __hash__ = object.__hash__

    def __init__(self, waiters: KeyWaiters, number: int) -> None:
        super().__init__(id=f"call-{number}", waiters=waiters, _eta_timer_entry=object())
        state.scheduled_requests.add(self)


def waiters(*, each_runs: bool) -> KeyWaiters:
    """The calls of a held key."""
    made = KeyWaiters("t:shop.work|invoice:1", 0.0, longest=600.0)
    made.each_runs = each_runs
    return made


def waiting(here: KeyWaiters, number: int = MANY) -> list[Call]:
    """So many calls that have come one after the other."""
    calls = [Call(here, number) for number in range(number)]
    for call in calls:
        here.add(call)
    return calls


def begun(here: KeyWaiters) -> list[Any]:
    found = []
    while (call := here.next_to_begin()) is not None:
        found.append(call)
    return found


def test_nothing_begins_while_the_key_is_held() -> None:
    here = waiters(each_runs=True)
    calls = waiting(here)
    assert begun(here) == []
    assert not here.needs_lookup(0.0)
    assert here.needs_lookup(MIN_LOOKUP_INTERVAL)
    here.key_is_free = True
    assert begun(here) == calls[:1]
    assert not here.needs_lookup(100.0)


def test_calls_that_run_follow_each_other_and_calls_that_are_answered_go_together() -> None:
    for each_runs, together in ((True, 1), (False, ANSWERED_TOGETHER)):
        here = waiters(each_runs=each_runs)
        calls = waiting(here)
        here.key_is_free = True
        (first,) = begun(here)
        here.call_ended(first, 1.0, answered=True)
        assert begun(here) == calls[1 : 1 + together]


def test_after_a_failure_the_next_call_is_begun_alone() -> None:
    here = waiters(each_runs=False)
    calls = waiting(here)
    here.key_is_free = True
    (first,) = begun(here)
    here.call_ended(first, 1.0, answered=False)
    assert begun(here) == calls[1:2]


def test_a_call_that_is_rescheduled_retains_its_place() -> None:
    here = waiters(each_runs=True)
    calls = waiting(here, 3)
    here.key_is_free = True
    (first,) = begun(here)
    here.begun.discard(first)
    here.seen_held(1.0)
    assert begun(here) == []
    again = Call(here, 0)
    here.add(again)
    here.key_is_free = True
    assert begun(here) == [again]
    assert calls[0] is not again


def test_calls_of_a_key_that_seems_to_be_free_and_is_not_begin_ever_more_seldom() -> None:
    here = waiters(each_runs=True)
    waiting(here, 1)
    pauses = []
    for number in range(12):
        here.rescheduled_in_a_row = number
        here.seen_held(100.0)
        pauses.append(here.not_before - 100.0)
        assert here.next_lookup - 100.0 == min(pauses[-1], MAX_LOOKUP_INTERVAL)
    assert pauses[0] == pytest.approx(MIN_LOOKUP_INTERVAL)
    assert pauses == sorted(pauses)
    assert pauses[-1] == MAX_RETRY_PAUSE
    here.call_ended(Call(here, 1), 100.0, answered=True)
    assert here.rescheduled_in_a_row == 0


def test_a_call_begins_at_once_after_a_run_in_another_worker() -> None:
    """Also if calls of its key were rescheduled in a row before, for a newer call there."""
    here = waiters(each_runs=True)
    (call,) = waiting(here, 1)
    here.rescheduled_in_a_row = 12
    here.seen_held(100.0)
    here.seen_free(101.0)
    assert begun(here) == []
    assert here.next_lookup == 102.0
    here.still_held(102.0)
    here.seen_free(103.0)
    assert begun(here) == [call]


def test_the_longer_a_key_is_held_the_more_seldom_the_store_is_asked() -> None:
    here = waiters(each_runs=True)
    waiting(here, 1)
    looks = []
    for now in (0.0, 5.0, 20.0, 50.0, 1000.0):
        here.still_held(now)
        looks.append(here.next_lookup - now)
    assert looks == pytest.approx(
        [MIN_LOOKUP_INTERVAL, MIN_LOOKUP_INTERVAL, 0.2, 0.5, MAX_LOOKUP_INTERVAL]
    )


def test_calls_that_celery_has_dropped_do_not_begin_and_are_forgotten() -> None:
    here = waiters(each_runs=True)
    calls = waiting(here, 4)
    state.scheduled_requests.discard(calls[0])
    calls[1].waiters = None
    here.remove_dropped()
    assert [call for _, _, call in sorted(here.waiting)] == calls[2:]
    state.scheduled_requests.discard(calls[2])
    here.key_is_free = True
    assert begun(here) == [calls[3]]


def test_a_call_that_was_begun_and_is_gone_does_not_stop_the_others() -> None:
    here = waiters(each_runs=True)
    calls = waiting(here, 3)
    here.key_is_free = True
    assert begun(here) == [calls[0]]
    state.scheduled_requests.discard(calls[0])
    state.reserved_requests.add(calls[0])
    here.remove_dropped()
    assert begun(here) == []
    state.reserved_requests.discard(calls[0])
    here.remove_dropped()
    assert begun(here) == [calls[1]]


def test_a_countdown_that_ends_early_starts_no_useless_attempt() -> None:
    here = waiters(each_runs=True)
    waiting(here, 2)
    here.still_held(10.0)
    assert here.must_wait(10.0 + ANSWER_VALID_FOR / 2)
    assert not here.must_wait(10.0 + ANSWER_VALID_FOR)
    here.key_is_free = True
    assert not here.must_wait(11.0)
    begun(here)
    assert here.must_wait(11.0)


def test_a_key_that_is_busy_for_ever_costs_no_memory() -> None:
    here = waiters(each_runs=True)
    for number in range(1_000):
        call = Call(here, number)
        here.add(call)
        here.add_fingerprint(f"v1:{number}")
        here.key_is_free = True
        assert begun(here) == [call]
        here.call_ended(call, 1.0, answered=True)
    assert len(here._places) == 0
    assert len(here.fingerprints) <= MAX_FINGERPRINTS


def test_two_messages_of_one_call_wait_together() -> None:
    here = waiters(each_runs=True)
    same = [Call(here, 7), Call(here, 7)]
    for call in same:
        here.add(call)
    here.key_is_free = True
    (first,) = begun(here)
    here.begun.discard(first)
    assert [first, *begun(here)] == same


def test_a_call_that_comes_before_the_store_was_asked_overtakes_nobody() -> None:
    """Those before it have times of the store."""
    here = GroupWaiters(
        "openai", os_threads.boot_clock(), longest=600.0, ahead=time() - os_threads.boot_clock()
    )
    first, second = Call(here, 1), Call(here, 2)
    asked = time() * 1000 - 1
    here.wait_since(first, asked)
    assert asked < here.wait_since(second, None) < asked + 60_000
    here.add(second)
    here.add(first)
    here.room = 2
    assert begun(here) == [first, second]


def group_of(*calls: float, limit: int = 0, rate: str | None = None) -> GroupWaiters:
    """The calls of a group, which wait since these times, in milliseconds."""
    here = GroupWaiters(_group_key("openai"), 0.0, longest=600.0, ahead=0.0)
    here.needs(Group("openai", limit=limit or None, rate=rate))
    for number, since in enumerate(calls):
        call = Call(here, number)
        here.wait_since(call, since)
        here.add(call)
    return here


def test_a_group_has_the_smallest_numbers_of_its_tasks() -> None:
    here = group_of(limit=5, rate="1/s")
    here.needs(Group("openai", limit=2, rate="2/s"))
    here.needs(Group("openai"))
    assert here.limit == 2
    assert here.pause == Group("openai", rate="1/s").pause * 1000


def test_a_worker_asks_for_its_oldest_call() -> None:
    assert group_of(20.0, 10.0, 30.0, limit=2).ask("w1") == Ask(2, 0.0, 10.0, "w1")
    assert group_of(limit=2).ask("w1").since == 0.0


def test_half_of_the_room_is_left_to_other_workers() -> None:
    """Calls that have begun a moment ago, and have no slot yet, count too."""
    here = group_of(*range(1, 20), limit=9)
    assert begun(here) == []
    now = os_threads.boot_clock()
    here.looked_up(Room(5, 0.0, 4, 9, now * 1000), now)
    assert [call.id for call in begun(here)] == ["call-0", "call-1", "call-2"]
    here.looked_up(Room(5, 0.0, 4, 9, now * 1000), now)
    assert begun(here) == []
    here.looked_up(Room(5, 0.0, 4, 9, now * 1000), now + ON_THE_WAY * 2)
    assert len(begun(here)) == 3


def test_an_answer_that_took_long_does_not_say_what_time_it_is() -> None:
    """The worker stood still before it read the answer."""
    here = group_of(1.0, limit=1)
    here.looked_up(Room(0, 0.0, 1, 1, 5_000.0), 0.0, 0.5)
    before = here.now_of_store()
    here.looked_up(Room(0, 0.0, 1, 1, 6_000.0), 35.0, 34.0)
    assert here.now_of_store() - before == pytest.approx(0.0, abs=900.0)


def test_the_end_of_a_body_begins_the_next_call_unless_a_rate_decides() -> None:
    for rate, expected in ((None, 1), ("1/s", 0)):
        here = group_of(1.0, 2.0, limit=1, rate=rate)
        here.looked_up(Room(1, 0.0, 0, 1, 0.0), 10.0)
        (first,) = begun(here)
        here.next_lookup = 99.0
        here.call_ended(first, 20.0, answered=True)
        assert len(begun(here)) == expected
        assert here.next_lookup == 20.0


def test_a_full_group_is_asked_for_ever_more_seldom_and_a_rate_when_its_turn_comes() -> None:
    here = group_of(1.0, limit=1)
    for now, expected in ((0.0, MIN_LOOKUP_INTERVAL), (50.0, 0.5), (900.0, MAX_LOOKUP_INTERVAL)):
        here.looked_up(Room(0, 0.0, 1, 1, now), now)
        assert here.next_lookup - now == pytest.approx(expected)
    here = group_of(1.0, rate="60/m")
    here.looked_up(Room(0, 0.7 + AHEAD / 1000, 0, 0, 0.0), 0.0)
    assert here.next_lookup == pytest.approx(0.7)


def test_a_refused_call_keeps_its_turn_and_stops_further_begins() -> None:
    here = group_of(1.0, 2.0, limit=2)
    here.looked_up(Room(3, 0.0, 0, 2, 0.0), 10.0)
    first = here.next_to_begin()
    here.begun.discard(first)
    here.seen_held(10.0)
    assert begun(here) == []
    here.wait_since(first, 1.0)
    here.add(first)
    here.room = 1
    assert begun(here) == [first]


def test_no_call_of_a_full_group_starves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three workers: two always get new calls, and the third has ten old ones. While a worker has a
    place in the waiting list, calls that came more than two seconds later leave a slot for it.
    """
    rand, slots, now = random.Random(7), Slots(), 1_000_000.0
    workers = {name: group_of(limit=3) for name in ("old", "new-1", "new-2")}
    ends: list[tuple[float, str, Call]] = []
    began: list[float] = []
    number = 0
    monkeypatch.setattr(os_threads, "boot_clock", lambda: now / 1000)

    def arrives(name: str, since: float) -> None:
        nonlocal number
        number += 1
        call = Call(workers[name], number)
        workers[name].wait_since(call, since)
        workers[name].add(call)

    for step in range(10):
        arrives("old", now - 60_000 + step)
    while workers["old"].waiting:
        now += 50
        assert now < 1_010_000
        for name in ("new-1", "new-2"):
            while len(workers[name].waiting) < 5:
                arrives(name, now)
        for name, here in rand.sample([*workers.items()], 3):
            ask = here.ask(name)
            slots = with_place(slots, ask, now)
            here.looked_up(room(slots, ask, now), now / 1000)
            for call in begun(here):
                own = replace(ask, since=float(here._places[call.id]))
                answer = take("g", slots, own, call.id, 15.0, now)
                if not isinstance(answer, Taken):
                    here.add(call)
                    continue
                places = [since for other, (since, _) in slots.places.items() if other != name]
                slots = answer.slots
                assert len(slots.held) + sum(each < own.since - OVERTAKING for each in places) <= 3
                if name == "old":
                    began.append(own.since)
                ends.append((now + rand.uniform(20, 300), name, call))
        for end in [each for each in ends if each[0] <= now]:
            ends.remove(end)
            slots = without_slot(slots, end[2].id)
            workers[end[1]].call_ended(end[2], now / 1000, answered=True)
    assert len(began) == 10
    assert began == sorted(began)


# -- the timer -------------------------------------------------------------------------------------


class Entry(SimpleNamespace):
    """A callback of the timer."""

    def __call__(self) -> None:
        self.fun(*self.args)


class Timer:
    """Celery's timer, whose callbacks run when the test wants it."""

    def __init__(self) -> None:
        self.due: list[tuple[float, Any]] = []

    def call_after(self, seconds: float, fun: Any, args: tuple[Any, ...] = ()) -> Any:
        self.due.append((seconds, entry := Entry(fun=fun, args=args)))
        return entry

    def run(self, shorter_than: float) -> None:
        """Make the calls that are due so soon."""
        now, self.due = (
            [one for one in self.due if one[0] < shorter_than],
            [one for one in self.due if one[0] >= shorter_than],
        )
        for _, entry in now:
            entry()


class Scheduled(Call):
    """A request that waits for a key and counts how often it is begun."""

    def __init__(
        self, calls: WaitingCalls, waiters: KeyWaiters, timer: Timer, number: int = 1
    ) -> None:
        super().__init__(waiters, number)
        self.begins = 0
        self.waits_until = 1e12
        self._eta_timer_entry = timer.call_after(50.0, self.begin, (self,))
        calls.scheduled(self)

    def begin(self, of: Any) -> None:
        """What Celery does when its time has come."""
        assert of is self
        self.begins += 1
        state.scheduled_requests.discard(self)
        state.reserved_requests.add(self)

    def scheduled_again(self, entry: Any) -> None:
        self._eta_timer_entry = entry


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> Timer:
    """That of a worker of this process."""
    made = Timer()
    worker = SimpleNamespace(consumer=SimpleNamespace(timer=made), app=None)
    monkeypatch.setattr("celery_leases.worker.processes.current_worker", lambda: worker)
    return made


def a_held_key() -> tuple[WaitingCalls, KeyWaiters]:
    """With one key, which is held."""
    calls, here = WaitingCalls(), waiters(each_runs=True)
    calls.by_key[here.stored_key] = here
    return calls, here


def test_a_call_begins_once_whether_its_countdown_or_its_key_comes_first(timer: Timer) -> None:
    for order in ("early first", "countdown first"):
        calls, here = a_held_key()
        call = Scheduled(calls, here, timer)
        countdown = call._eta_timer_entry
        here.key_is_free = True
        calls._begin_ready()
        if order == "countdown first":
            countdown()
        timer.run(shorter_than=0.01)
        countdown()
        assert call.begins == 1, order


def test_a_call_that_celery_drops_just_before_its_early_begin_does_not_begin(timer: Timer) -> None:
    calls, here = a_held_key()
    call = Scheduled(calls, here, timer)
    here.key_is_free = True
    calls._begin_ready()
    state.scheduled_requests.discard(call)
    timer.run(shorter_than=0.01)
    assert call.begins == 0


def test_a_call_whose_countdown_ends_while_its_key_is_held_waits_on(timer: Timer) -> None:
    calls, here = a_held_key()
    call = Scheduled(calls, here, timer)
    here.still_held(os_threads.boot_clock())
    call._eta_timer_entry()
    assert call.begins == 0
    call.waits_until = os_threads.boot_clock()
    call._eta_timer_entry()
    assert call.begins == 1


def test_a_worker_that_stops_begins_nothing_early(timer, monkeypatch) -> None:
    calls, here = a_held_key()
    call = Scheduled(calls, here, timer)
    here.key_is_free = True
    monkeypatch.setattr(state, "should_stop", 0)
    calls._begin_ready()
    timer.run(shorter_than=0.01)
    assert call.begins == 0


def test_a_group_that_is_full_for_ever_costs_no_memory(timer: Timer) -> None:
    """Calls that were begun, and are rescheduled because the group or their key is not free."""
    calls, group = WaitingCalls(), Group("openai", limit=1)
    options = LeaseOptions(group=group)
    app = SimpleNamespace(conf={})
    task = SimpleNamespace(name="shop.work", lease_options=options, app=app)
    here = GroupWaiters(_group_key("openai"), os_threads.boot_clock(), longest=600.0, ahead=0.0)
    calls.by_key[here.stored_key] = here
    calls._waiters_of = lambda *_: waiters(each_runs=True)  # type: ignore[method-assign]
    full = GroupIsFull("full", "openai", 1.8e12)
    for number in range(100):
        call = Call(here, number)
        call.task = task
        here.wait_since(call, None)
        calls.rescheduled(call, full if number % 2 else KeyIsHeld("held", "t:k", None))
    assert len(here._places) == 0


def test_there_is_one_check_at_a_time(timer: Timer) -> None:
    calls, here = a_held_key()
    waiting(here, 1)
    for _ in range(5):
        calls._due = 0.0
        calls._start_ticking(SimpleNamespace(timer=timer))
    for _ in range(3):
        timer.run(shorter_than=1.0)
    assert len([seconds for seconds, _ in timer.due if seconds < 1.0]) == 1


def test_all_keys_that_are_due_are_asked_for(timer: Timer, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def held(keys: Sequence[str]) -> set[str]:
        asked.extend(keys)
        return set()

    store = SimpleNamespace(held=held)
    components = SimpleNamespace(leases=store)
    monkeypatch.setattr("celery_leases.worker.processes.process_of", lambda _, **__: components)
    calls = WaitingCalls()
    keys = [f"t:shop.work|{number}" for number in range(1_234)]

    def no_thread(_: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("celery_leases.concurrency.os_threads.start_thread", no_thread)
    with pytest.raises(RuntimeError):
        calls._look_up(keys)
    monkeypatch.setattr("celery_leases.concurrency.os_threads.start_thread", lambda work: work())
    calls._look_up(keys)
    assert asked == keys
