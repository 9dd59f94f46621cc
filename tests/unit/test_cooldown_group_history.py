"""The last closings of a gate: what is one, when it opened again, and its stored form."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest

from celery_leases.groups.group import Gate
from celery_leases.groups.history import (
    CLOSINGS_MAX,
    PastClosing,
    dump,
    load,
    with_closing,
    with_opening,
)

NOW = 1_000_000.0
SHUT = Gate("g", 1, 60.0, "rate_limited", "status:429", "a secret")
FIRST = PastClosing(NOW, NOW + 60.0, 1, "rate_limited", "status:429")


def test_a_gate_that_is_not_closed_starts_a_new_closing() -> None:
    assert with_closing([], SHUT, NOW) == [FIRST]
    later = PastClosing(NOW + 70.0, NOW + 130.0, 1, "rate_limited", "status:429")
    assert with_closing([FIRST], SHUT, NOW + 70.0) == [later, FIRST]


def test_a_standing_closing_is_extended() -> None:
    (found,) = with_closing([FIRST], Gate("g", 1, 600.0, "quota"), NOW + 10.0)
    assert found == PastClosing(NOW, NOW + 610.0, 1, "quota")


@pytest.mark.parametrize("order", [*permutations(range(3))])
def test_failures_that_are_noted_in_any_order_are_one_closing(order: tuple[int, ...]) -> None:
    past: list[PastClosing] = []
    for number in order:
        past = with_closing(past, Gate("g", 1, 60.0 + number, str(number)), NOW + number)
    assert past == [PastClosing(NOW, NOW + 64.0, 1, "2")]


@pytest.mark.parametrize(
    "past", [[], [PastClosing(NOW - 90.0, NOW - 30.0, 1, "old")], with_opening([FIRST], NOW)]
)
def test_a_closing_that_is_over_is_not_extended(past: list[PastClosing]) -> None:
    assert len(with_closing(past, SHUT, NOW + 10.0)) == len(past) + 1


def test_the_next_trip_is_a_closing_of_its_own() -> None:
    assert len(with_closing([FIRST], replace(SHUT, trips=2), NOW + 59.9)) == 2


def test_only_the_latest_are_stored() -> None:
    past: list[PastClosing] = []
    for number in range(30):
        past = with_closing(past, SHUT, NOW + 100 * number)
    assert [each.closed_at - NOW for each in past] == [
        2900.0 - 100 * n for n in range(CLOSINGS_MAX)
    ]


def test_an_opening_belongs_to_the_latest_closing_and_is_recorded_once() -> None:
    opened = with_opening([FIRST, FIRST], NOW + 5.0)
    assert [each.opened_at for each in opened] == [NOW + 5.0, None]
    assert with_opening(opened, NOW + 9.0) == opened
    assert with_opening([], NOW) == []


def test_what_is_stored_is_read_again() -> None:
    past = [*with_opening([FIRST], NOW + 5.0), FIRST]
    assert load(dump(past)) == past
    assert "secret" not in dump(with_closing([], SHUT, NOW))
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
