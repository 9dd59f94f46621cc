"""The calls of one held key in a worker: which of them begins when. Celery's timer is played."""

from collections.abc import Sequence
from time import monotonic, time
from types import SimpleNamespace
from typing import Any

import pytest
from celery.worker import state

from celery_leases.options import Group, LeaseOptions
from celery_leases.worker.publisher import GroupIsFull, KeyIsHeld
from celery_leases.worker.waiting_calls import (
    ANSWER_VALID_FOR,
    ANSWERED_TOGETHER,
    MAX_FINGERPRINTS,
    MAX_LOOKUP_INTERVAL,
    MAX_RETRY_PAUSE,
    MIN_LOOKUP_INTERVAL,
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


def test_a_key_that_seems_to_be_free_and_is_not_is_asked_for_ever_more_seldom() -> None:
    here = waiters(each_runs=True)
    waiting(here, 1)
    pauses = []
    for number in range(12):
        here.rescheduled_in_a_row = number
        here.seen_held(100.0)
        pauses.append(here.next_lookup - 100.0)
    assert pauses[0] == pytest.approx(MIN_LOOKUP_INTERVAL)
    assert pauses == sorted(pauses)
    assert pauses[-1] == MAX_RETRY_PAUSE
    here.call_ended(Call(here, 1), 100.0, answered=True)
    assert here.rescheduled_in_a_row == 0


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
    here = GroupWaiters("openai", monotonic(), longest=600.0)
    first, second = Call(here, 1), Call(here, 2)
    asked = time() * 1000 - 1
    here.wait_since(first, asked)
    assert asked < here.wait_since(second, None) < asked + 60_000
    here.add(second)
    here.add(first)
    here.room = 2
    assert begun(here) == [first, second]


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
    here.still_held(monotonic())
    call._eta_timer_entry()
    assert call.begins == 0
    call.waits_until = monotonic()
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
    here = GroupWaiters(_group_key("openai"), monotonic(), longest=600.0)
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
