"""A cooldown group: how it closes, what a standing time is worth, and what counts as a
closing in a row.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_leases.failures.cooldown_policies import CooldownPolicy
from celery_leases.groups.group import Closed, ClosedGroup, Closing, reason_json
from celery_leases.groups.history import (
    CLOSINGS_MAX,
    PastClosing,
    dump,
    load,
    with_closing,
    with_opening,
)
from celery_leases.groups.slots import Slots, close
from tests.unit.decision_inputs import GROUP, a_closed_group, probed

POLICY = CooldownPolicy(30.0, cap=3600.0)
FAILED = Closing(POLICY, "rate_limited", "status:429", "slow down")
OURS, LATE = "probe", "some-body-that-began-before"
NOW = 1_800_000_000_000.0
DAYS = 30 * 86_400_000.0


def closed(
    group: str, closed_group: ClosedGroup | None, closing: Closing, token: str
) -> ClosedGroup:
    """The group after *closing*; *group* is the group before."""
    after = close(
        Slots() if closed_group is None else slots_with(closed_group), closing, token, NOW
    )
    found = after.closed_group(group, NOW)
    assert found is not None
    return found


def slots_with(closed_group: ClosedGroup) -> Slots:
    """The slots of a group with that group."""
    why = reason_json(Closing(POLICY, closed_group.reason, closed_group.rule, closed_group.message))
    probe, ends = closed_group.probe or "", NOW + closed_group.closed_for * 1000
    held = {probe: (NOW + closed_group.probe_for * 1000, 0)} if closed_group.probe else {}
    return Slots(held, closed=Closed(closed_group.in_a_row, ends, ends + DAYS, why, probe))


def told(seconds: float, *, instead: bool = True) -> Closing:
    """A failure with a server delay."""
    return Closing(POLICY, "rate_limited", server_delay=seconds, instead=instead)


class TestTheFirstFailure:
    def test_it_closes_the_group_for_the_first_wait_of_the_policy(self) -> None:
        assert closed(GROUP, None, FAILED, OURS) == ClosedGroup(
            GROUP, 1, 30.0, "rate_limited", "status:429", "slow down"
        )

    @pytest.mark.parametrize(("instead", "wait"), [(True, 5.0), (False, 30.0)])
    def test_a_server_delay_counts_instead_or_if_it_is_longer(self, instead, wait) -> None:
        assert closed(GROUP, None, told(5.0, instead=instead), OURS).closed_for == wait
        assert closed(GROUP, None, told(300.0, instead=instead), OURS).closed_for == 300.0


class TestWhileItIsClosed:
    """Bodies that were running when it closed fail one after the other."""

    def test_no_failure_is_another_closing(self) -> None:
        closed_group = a_closed_group(20.0, in_a_row=3)
        for token in (OURS, LATE):
            assert closed(GROUP, closed_group, FAILED, token).in_a_row == 3
            assert closed(GROUP, closed_group, told(600.0), token).in_a_row == 3

    def test_a_longer_wait_extends_the_standing_one(self) -> None:
        closed_group = closed(
            GROUP, a_closed_group(20.0), replace(told(600.0), rule="quota", message="empty"), LATE
        )
        assert (closed_group.closed_for, closed_group.rule, closed_group.message) == (
            600.0,
            "quota",
            "empty",
        )

    @pytest.mark.parametrize("wait", [1.0, 19.9, 20.0])
    def test_a_shorter_one_changes_nothing(self, wait: float) -> None:
        closed_group = a_closed_group(20.0)
        assert closed(GROUP, closed_group, told(wait), LATE) == closed_group

    def test_a_failure_after_many_closings_waits_as_long_as_those(self) -> None:
        assert closed(GROUP, a_closed_group(20.0, in_a_row=4), FAILED, LATE).closed_for == 240.0

    def test_a_running_probe_retains_its_slot(self) -> None:
        closed_group = closed(GROUP, probed(14.0), FAILED, LATE)
        assert (closed_group.closed_for, closed_group.probe, closed_group.probe_for) == (
            30.0,
            OURS,
            14.0,
        )
        again = closed(GROUP, closed_group, told(600.0), LATE)
        assert (again.closed_for, again.probe, again.probe_for) == (600.0, OURS, 14.0)

    @pytest.mark.parametrize("wait", [5.0, 600.0])
    def test_the_failure_of_a_probe_whose_group_was_closed_over_it_gives_its_slot_back(self, wait):
        closed_group = closed(
            GROUP, a_closed_group(20.0, in_a_row=2, probe=OURS, probe_for=14.0), told(wait), OURS
        )
        assert (closed_group.in_a_row, closed_group.closed_for) == (2, max(20.0, wait))
        assert (closed_group.probe, closed_group.probe_for) == (None, 0.0)


class TestWhileAProbeIsDue:
    """The time of the closing is over, and a probe may be running."""

    def test_the_failure_of_the_probe_is_the_next_closing(self) -> None:
        closed_group = closed(GROUP, probed(14.0), FAILED, OURS)
        assert (closed_group.in_a_row, closed_group.closed_for) == (2, 60.0)
        assert (closed_group.probe, closed_group.probe_for) == (None, 0.0)

    @pytest.mark.parametrize(
        "closed_group", [probed(14.0), a_closed_group(0.0)], ids=["probed", "free"]
    )
    def test_a_body_that_began_before_closes_it_again_without_another_closing(
        self, closed_group: ClosedGroup
    ) -> None:
        late = closed(GROUP, closed_group, FAILED, LATE)
        assert (late.in_a_row, late.closed_for, late.probe) == (1, 30.0, closed_group.probe)

    def test_closings_grow_by_one_for_each_probe_that_fails(self) -> None:
        closed_group, waits = closed(GROUP, None, FAILED, LATE), []
        for _ in range(8):
            closed_group = closed(
                GROUP,
                replace(closed_group, closed_for=0.0, probe=OURS, probe_for=14.0),
                FAILED,
                OURS,
            )
            waits.append(closed_group.closed_for)
        assert waits == [60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 3600.0, 3600.0]
        assert closed_group.in_a_row == 9


FREE = st.builds(
    a_closed_group, st.sampled_from([0.0, 0.5, 20.0, 7_200.0]), in_a_row=st.integers(1, 20)
)
GROUPS = FREE | st.builds(
    a_closed_group,
    st.sampled_from([0.0, 0.5, 20.0, 7_200.0]),
    in_a_row=st.integers(1, 20),
    probe=st.sampled_from([OURS, "another"]),
    probe_for=st.just(14.0),
)
CLOSINGS = st.builds(
    Closing,
    st.just(POLICY),
    st.just("why"),
    server_delay=st.none() | st.floats(1, 9_000),
    instead=st.booleans(),
)


@given(st.none() | GROUPS, CLOSINGS, st.sampled_from([OURS, LATE]))
def test_invariants_of_any_sequence(
    closed_group: ClosedGroup | None, closing: Closing, token: str
) -> None:
    after = closed(GROUP, closed_group, closing, token)
    least = closing.wait(1) if closing.instead else 30.0
    assert after.closed_for >= max(closed_group.closed_for if closed_group else 0.0, least) - 1e-6
    assert after.in_a_row - (closed_group.in_a_row if closed_group else 0) in (0, 1)
    assert after.in_a_row >= 1
    assert after.probe != token
    assert not after.probe_due
    if closed_group is not None and closed_group.probe != token:
        assert (after.probe, after.probe_for, after.in_a_row) == (
            closed_group.probe,
            closed_group.probe_for,
            closed_group.in_a_row,
        )


class TestWhatItSays:
    @pytest.mark.parametrize(
        ("closed_group", "probe_due", "blocked_for"),
        [
            (a_closed_group(20.0), False, 20.0),
            (a_closed_group(0.0), True, 0.0),
            (probed(14.0), True, 14.0),
        ],
    )
    def test_for_how_long_nothing_can_start(self, closed_group, probe_due, blocked_for) -> None:
        assert (closed_group.probe_due, closed_group.blocked_for) == (probe_due, blocked_for)

    def test_a_closed_group_counts_for_its_time_with_any_probe(self) -> None:
        assert a_closed_group(20.0, probe=OURS, probe_for=90.0).blocked_for == 20.0

    @pytest.mark.parametrize(
        ("policy", "quiet"),
        [(POLICY, 86_400.0), (CooldownPolicy(30.0, cap=86_400.0), 2 * 86_400.0)],
    )
    def test_it_is_remembered_until_its_closings_are_forgotten(self, policy, quiet) -> None:
        after = close(Slots(), replace(FAILED, policy=policy), LATE, NOW)
        assert after.closed is not None
        assert (after.closed.counts - after.closed.ends) / 1000 == quiet
        assert after.expires_at == after.closed.counts
        assert after.at(after.closed.counts).closed is None
        assert after.at(after.closed.counts - 1).closed == after.closed


WHEN = 1_000_000.0
SHUT = ClosedGroup("g", 1, 60.0, "rate_limited", "status:429", "a secret")
FIRST = PastClosing(WHEN, WHEN + 60.0, 1, "rate_limited", "status:429")


def test_a_group_that_is_not_closed_starts_a_new_closing() -> None:
    assert with_closing([], SHUT, WHEN) == [FIRST]
    later = PastClosing(WHEN + 70.0, WHEN + 130.0, 1, "rate_limited", "status:429")
    assert with_closing([FIRST], SHUT, WHEN + 70.0) == [later, FIRST]


def test_a_standing_closing_is_extended() -> None:
    (found,) = with_closing([FIRST], ClosedGroup("g", 1, 600.0, "quota"), WHEN + 10.0)
    assert found == PastClosing(WHEN, WHEN + 610.0, 1, "quota")


@pytest.mark.parametrize("order", [*permutations(range(3))])
def test_failures_that_are_noted_in_any_order_are_one_closing(order: tuple[int, ...]) -> None:
    past: list[PastClosing] = []
    for number in order:
        past = with_closing(past, ClosedGroup("g", 1, 60.0 + number, str(number)), WHEN + number)
    assert past == [PastClosing(WHEN, WHEN + 64.0, 1, "2")]


@pytest.mark.parametrize(
    "past", [[], [PastClosing(WHEN - 90.0, WHEN - 30.0, 1, "old")], with_opening([FIRST], WHEN)]
)
def test_a_closing_that_is_over_is_not_extended(past: list[PastClosing]) -> None:
    assert len(with_closing(past, SHUT, WHEN + 10.0)) == len(past) + 1


def test_the_next_close_is_a_closing_of_its_own() -> None:
    assert len(with_closing([FIRST], replace(SHUT, in_a_row=2), WHEN + 59.9)) == 2


def test_only_the_latest_are_stored() -> None:
    past: list[PastClosing] = []
    for number in range(30):
        past = with_closing(past, SHUT, WHEN + 100 * number)
    assert [each.closed_at - WHEN for each in past] == [
        2900.0 - 100 * n for n in range(CLOSINGS_MAX)
    ]


def test_an_opening_belongs_to_the_latest_closing_and_is_recorded_once() -> None:
    opened = with_opening([FIRST, FIRST], WHEN + 5.0)
    assert [each.opened_at for each in opened] == [WHEN + 5.0, None]
    assert with_opening(opened, WHEN + 9.0) == opened
    assert with_opening([], WHEN) == []


def test_what_is_stored_is_read_again() -> None:
    past = [*with_opening([FIRST], WHEN + 5.0), FIRST]
    assert load(dump(past)) == past
    assert "secret" not in dump(with_closing([], SHUT, WHEN))
    assert load('[[1,2,3,"r",null,null,"more"]]') == [PastClosing(1.0, 2.0, 3, "r")]


@pytest.mark.parametrize(
    "text",
    [
        *(None, "", "garbage", "[[1]]", "7", '[["x",2,3,"r",null,null]]', "[null]", "[" * 10_000),
        *('[[1e999,2,3,"r",null,null]]', '[[NaN,2,3,"r",null,null]]', '[[1,-2,3,"r",null,null]]'),
        '[[1,2,Infinity,"r",null,null]]',
    ],
)
def test_what_cannot_be_read_is_nothing(text: str | None) -> None:
    assert load(text) == []
