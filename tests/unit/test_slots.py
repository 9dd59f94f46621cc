"""The slots and the rate of a group: never more than the limit, begins that are apart, turns in the
order of arrival.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_leases.groups.slots import (
    AHEAD,
    BUSY,
    OVERTAKING,
    PLACE_TTL,
    Ask,
    Room,
    Slots,
    Taken,
    dump,
    load,
    room,
    take,
    with_place,
    with_slot,
    without_slot,
)

NOW = 1_800_000_000_000.0
TTL = 15.0
STEPS = st.lists(
    st.tuples(
        st.sampled_from("abcdef"),
        st.sampled_from(["take", "renew", "free", "wait"]),
        st.integers(1, 3),
        st.floats(0, 2_000),
    ),
    max_size=60,
)


def taken(slots: Slots, ask: Ask, token: str, now: float = NOW) -> Slots:
    """The slots once the attempt has what it asks for."""
    answer = take("g", slots, ask, token, TTL, now)
    assert isinstance(answer, Taken)
    return answer.slots


@given(STEPS)
def test_a_body_never_runs_beside_more_than_its_limit_allows(steps) -> None:
    """Whatever numbers the others have, and whenever leases end."""
    slots, now = Slots(), NOW
    running: dict[str, tuple[float, int]] = {}
    for token, step, limit, passed in steps:
        now += passed * 5
        running = {each: body for each, body in running.items() if body[0] > now}
        if step == "take" and token not in running:
            answer = take("g", slots, Ask(limit), token, TTL, now)
            if isinstance(answer, Taken):
                slots, running[token] = answer.slots, (now + TTL * 1000, limit)
        elif step == "renew" and token in running:
            slots = with_slot(slots, token, TTL, running[token][1], now)
            running[token] = (now + TTL * 1000, running[token][1])
        elif step == "free":
            slots = without_slot(slots, token)
            running.pop(token, None)
        else:
            slots = with_place(slots, Ask(limit, since=now, worker=token), now)
        assert all(len(running) <= each for _, each in running.values())
        assert slots.at(now).held.keys() == running.keys()
        slots = load(dump(slots))


@given(st.lists(st.floats(0, 300), min_size=2, max_size=60), st.floats(20, 700))
def test_begins_are_never_closer_than_the_pause(gaps, pause) -> None:
    slots, now, begins = Slots(), NOW, []
    for gap in gaps:
        now += gap
        answer = take("g", slots, Ask(pause=pause), f"{now}", TTL, now)
        if isinstance(answer, Taken):
            slots = answer.slots
            begins.append(now + answer.starts_in * 1000)
            assert answer.starts_in * 1000 <= AHEAD + 0.001
        else:
            assert isinstance(answer, Room)
            assert answer.wait * 1000 > AHEAD - 0.001
    assert all(other - one >= pause - 0.01 for one, other in pairwise(begins))


def test_a_turn_has_some_time_ahead_only_while_the_group_is_busy() -> None:
    ask = Ask(pause=50.0)
    slots = taken(Slots(), ask, "a")
    answer = take("g", slots, ask, "b", TTL, NOW + 60)
    assert isinstance(answer, Taken)
    assert answer.starts_in > 0.1
    later = take("g", slots, ask, "c", TTL, NOW + BUSY + 60)
    assert isinstance(later, Taken)
    assert later.starts_in == 0.0


def test_a_call_that_gets_its_turn_leaves_the_waiting_list() -> None:
    ask = Ask(1, since=NOW - 9_000, worker="one")
    slots = with_place(Slots(), ask, NOW)
    assert room(slots, Ask(1, worker="two"), NOW).places == 0
    assert taken(slots, ask, "a").places == {}


@pytest.mark.parametrize(
    ("since", "places"), [(NOW - 1, 1), (NOW - 1 + OVERTAKING, 1), (NOW + OVERTAKING, 0)]
)
def test_a_call_may_overtake_by_two_seconds(since: float, places: int) -> None:
    slots = with_place(Slots(), Ask(1, since=NOW - 1, worker="one"), NOW)
    assert room(slots, Ask(1, since=since, worker="two"), NOW).places == places
    assert room(slots, Ask(1, since=since, worker="one"), NOW).places == 1
    assert room(slots, Ask(1, since=since, worker="two"), NOW + PLACE_TTL).places == 1


def test_no_call_waits_until_a_clock_that_was_set_back_has_caught_up() -> None:
    later, ask = NOW + 3_600_000.0, Ask(1, 100.0, worker="two")
    slots = Slots(began=later, pause=100.0, places={"dead": (1.0, later)})
    assert room(slots, ask, NOW).wait == (AHEAD + 100.0) / 1000
    assert room(replace(slots, began=0.0), ask, NOW).places == 1


def test_a_room_says_how_many_run_and_when_the_next_may_begin() -> None:
    slots = taken(Slots(), Ask(2, pause=60_000.0), "a")
    assert room(slots, Ask(2, pause=60_000.0), NOW) == Room(0, 60.0, 1, 2, NOW)


@pytest.mark.parametrize(
    "text",
    [None, "", "x", "[]", "7", '{"held": 5}', '{"held": {"a": 1}}', '{"held": {"a": ["x", 1]}}'],
)
def test_what_cannot_be_read_is_empty(text: str | None) -> None:
    assert load(text) == Slots()


def test_the_stored_form_leaves_out_what_is_empty() -> None:
    assert json.loads(dump(Slots())) == {}
    slots = taken(Slots(), Ask(1), "a")
    assert load(dump(slots)) == slots
