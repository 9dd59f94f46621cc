"""The calls of one held key in a worker: which of them begins when. Celery's timer is played."""

from types import SimpleNamespace
from typing import Any

import pytest
from celery.worker import state

from celery_leases.seam.held_calls import LATEST_LOOK, LONGEST_PAUSE, SOONEST_LOOK, TOGETHER, Line

MANY = 40


class Call(SimpleNamespace):
    """A request that Celery's timer has."""

    __hash__ = object.__hash__

    def __init__(self, line: Line, number: int) -> None:
        super().__init__(id=f"call-{number}", line=line, _eta_timer_entry=object())
        state.scheduled_requests.add(self)


def line(*, rerun: bool) -> Line:
    """A line whose key is held."""
    return Line("t:shop.work|invoice:1", 0.0, rerun=rerun, longest=600.0)


def waiting(here: Line, number: int = MANY) -> list[Call]:
    """So many calls that have come one after the other."""
    calls = [Call(here, number) for number in range(number)]
    for call in calls:
        here.join(call)
    return calls


def begun(here: Line) -> list[Any]:
    """What begins now."""
    found = []
    while (call := here.next()) is not None:
        found.append(call)
    return found


def test_nothing_begins_while_the_key_is_held() -> None:
    """The store is asked in a moment."""
    here = line(rerun=True)
    calls = waiting(here)
    assert begun(here) == []
    assert not here.wants_to_know(0.0)
    assert here.wants_to_know(SOONEST_LOOK)
    here.free = True
    assert begun(here) == calls[:1]
    assert not here.wants_to_know(100.0)


def test_calls_that_run_follow_each_other_and_calls_that_are_answered_go_together() -> None:
    """The first one shows whether there is an answer."""
    for rerun, together in ((True, 1), (False, TOGETHER)):
        here = line(rerun=rerun)
        calls = waiting(here)
        here.free = True
        (first,) = begun(here)
        here.begun.discard(first)
        here.ended(1.0)
        assert begun(here) == calls[1 : 1 + together]


def test_a_call_that_is_put_back_keeps_its_place() -> None:
    """Its next message has the same id."""
    here = line(rerun=True)
    calls = waiting(here, 3)
    here.free = True
    (first,) = begun(here)
    here.begun.discard(first)
    here.held(1.0)
    assert begun(here) == []
    again = Call(here, 0)
    here.join(again)
    here.free = True
    assert begun(here) == [again]
    assert calls[0] is not again


def test_a_key_that_seems_to_be_free_and_is_not_is_asked_for_ever_more_seldom() -> None:
    """A lease that has ended, say, whose row may not be taken over yet."""
    here = line(rerun=True)
    waiting(here, 1)
    pauses = []
    for in_vain in range(12):
        here.in_vain = in_vain
        here.held(100.0)
        pauses.append(here.look_at - 100.0)
    assert pauses[0] == pytest.approx(SOONEST_LOOK)
    assert pauses == sorted(pauses)
    assert pauses[-1] == LONGEST_PAUSE
    here.ended(100.0)
    assert here.in_vain == 0


def test_the_longer_a_key_is_held_the_more_seldom_the_store_is_asked() -> None:
    """A tenth of a second at first, a second in the end."""
    here = line(rerun=True)
    waiting(here, 1)
    looks = []
    for now in (0.0, 5.0, 20.0, 50.0, 1000.0):
        here.still_held(now)
        looks.append(here.look_at - now)
    assert looks == pytest.approx([SOONEST_LOOK, SOONEST_LOOK, 0.2, 0.5, LATEST_LOOK])


def test_calls_that_celery_has_dropped_do_not_begin_and_are_forgotten() -> None:
    """With the connection, or as they were revoked, or as their countdown was over."""
    here = line(rerun=True)
    calls = waiting(here, 4)
    state.scheduled_requests.discard(calls[0])
    calls[1].line = None
    here.still_held(1.0)
    assert [call for _, _, call in sorted(here.waiting)] == calls[2:]
    state.scheduled_requests.discard(calls[2])
    here.free = True
    assert begun(here) == [calls[3]]


def test_a_call_that_celery_is_just_about_to_schedule_is_waited_for() -> None:
    """Its message was received, but the timer does not have it yet."""
    here = line(rerun=True)
    (call,) = waiting(here, 1)
    entry, call._eta_timer_entry = call._eta_timer_entry, None
    state.scheduled_requests.discard(call)
    here.free = True
    assert begun(here) == []
    call._eta_timer_entry = entry
    state.scheduled_requests.add(call)
    assert begun(here) == [call]


def test_two_messages_of_one_call_wait_together() -> None:
    """They have one place."""
    here = line(rerun=True)
    same = [Call(here, 7), Call(here, 7)]
    for call in same:
        here.join(call)
    here.free = True
    (first,) = begun(here)
    here.begun.discard(first)
    assert [first, *begun(here)] == same
