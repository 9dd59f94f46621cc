"""The last closings of a gate: what is one, when it opened again, and its stored form."""

from __future__ import annotations

import pytest

from celery_leases.protocol.closings import (
    KEPT,
    PastClosing,
    dump,
    load,
    with_closing,
    with_opening,
)
from celery_leases.protocol.groups import Gate

NOW = 1_000_000.0
SHUT = Gate("g", 1, 60.0, "rate_limited", "status:429", "a secret")
HALF_OPEN = Gate("g", 1, 0.0, "rate_limited")
FIRST = PastClosing(NOW, NOW + 60.0, 1, "rate_limited", "status:429")


def test_a_gate_that_was_open_or_half_open_closes_anew() -> None:
    """The latest comes first."""
    assert with_closing([], None, SHUT, NOW) == [FIRST]
    later = PastClosing(NOW + 70.0, NOW + 130.0, 1, "rate_limited", "status:429")
    assert with_closing([FIRST], HALF_OPEN, SHUT, NOW + 70.0) == [later, FIRST]


def test_a_standing_closing_is_extended() -> None:
    """It keeps its beginning."""
    (found,) = with_closing([FIRST], SHUT, Gate("g", 1, 600.0, "quota"), NOW + 10.0)
    assert found == PastClosing(NOW, NOW + 610.0, 1, "quota")


@pytest.mark.parametrize(
    "past", [[], [PastClosing(NOW - 90.0, NOW - 30.0, 1, "old")], with_opening([FIRST], NOW)]
)
def test_an_extension_of_a_closing_that_was_not_noted_is_one(past: list[PastClosing]) -> None:
    """An earlier release closed the gate, or the note was lost: it is no part of an older one."""
    assert len(with_closing(past, SHUT, SHUT, NOW + 10.0)) == len(past) + 1


def test_only_the_latest_are_kept() -> None:
    """Twenty."""
    past: list[PastClosing] = []
    for number in range(30):
        past = with_closing(past, None, SHUT, NOW + number)
    assert [each.closed_at - NOW for each in past] == [29.0 - place for place in range(KEPT)]


def test_an_opening_belongs_to_the_latest_closing_and_is_said_once() -> None:
    """What happened before stays as it was."""
    opened = with_opening([FIRST, FIRST], NOW + 5.0)
    assert [each.opened_at for each in opened] == [NOW + 5.0, None]
    assert with_opening(opened, NOW + 9.0) == opened
    assert with_opening([], NOW) == []


def test_what_is_stored_is_read_again() -> None:
    """Without the message, and with what a later release adds."""
    past = [*with_opening([FIRST], NOW + 5.0), FIRST]
    assert load(dump(past)) == past
    assert "secret" not in dump(with_closing([], None, SHUT, NOW))
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
    """No operator's page fails for it."""
    assert load(text) == []
