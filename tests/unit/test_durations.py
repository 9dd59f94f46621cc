"""Durations: parsing and formatting."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_leases.errors import LeaseConfigurationError
from celery_leases.text.durations import LONGEST, in_words, parsed, seconds

RIGHT = [
    (5, 5.0), (0.25, 0.25), ("30s", 30.0), ("5m", 300.0), ("1h30m", 5400.0), ("250ms", 0.25),
    ("1.5h", 5400.0), ("2d", 172_800.0), ("1d2h3m4s5ms", 93_784.005), ("6m0s", 360.0),
    ("300", 300.0), (" 300 ", 300.0), ("2.5", 2.5), (timedelta(minutes=5), 300.0),
    (timedelta(days=1, microseconds=1), 86_400.000001),
]  # fmt: skip

WRONG: list[Any] = [
    *(0, -1, 0.0, "0", "0s", timedelta(0), timedelta(seconds=-1)),
    *(True, False, None, [], {}, b"5m", 5j, object()),
    *(float("nan"), float("inf"), float("-inf"), 10**400, LONGEST, timedelta.max),
    *(
        "", " ", "s", "5 m", "5x", "m5", "1h-30m", "-5m", "+5m", "1e3", "nan", "inf", "5m3", "5mm",
        "1_0s", "\u0665s", "9" * 400,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("written", "meant"), RIGHT, ids=str)
def test_a_duration_may_be_written_in_many_ways(written: Any, meant: float) -> None:
    assert seconds(written) == pytest.approx(meant)
    assert type(seconds(written)) is float


@pytest.mark.parametrize("written", WRONG, ids=lambda value: repr(value)[:20])
def test_anything_else_is_refused_with_what_to_write(written: Any) -> None:
    with pytest.raises(LeaseConfigurationError) as refused:
        seconds(written, "lease_ttl")
    assert str(refused.value).startswith(f"lease_ttl={written!r} is not usable; write ")
    assert '"5m"' in str(refused.value)


def test_zero_is_a_duration_only_where_it_is_asked_for() -> None:
    assert [seconds(value, zero=True) for value in (0, "0s", timedelta(0))] == [0.0, 0.0, 0.0]
    with pytest.raises(LeaseConfigurationError, match="write 0 or more seconds"):
        seconds(-0.001, zero=True)


@given(st.text(alphabet="0123456789.dhmsnuµ -+e\u0665", max_size=30))
def test_no_text_breaks_the_parser(text: str) -> None:
    span = parsed(text)
    assert span is None or 0 <= span < 1e30


@given(st.integers(0, 99), st.integers(0, 23), st.integers(0, 59), st.integers(0, 59))
def test_what_is_written_with_every_unit_adds_up(days, hours, minutes, rest) -> None:
    written = f"{days}d{hours}h{minutes}m{rest}s"
    assert (
        parsed(written)
        == timedelta(days=days, hours=hours, minutes=minutes, seconds=rest).total_seconds()
    )


@pytest.mark.parametrize(
    ("span", "said"),
    [
        (0, "1 second"), (0.2, "1 second"), (1, "1 second"), (44.1, "45 seconds"),
        (60, "60 seconds"), (65, "65 seconds"), (66, "2 minutes"), (246, "5 minutes"),
        (300, "5 minutes"), (305, "5 minutes"), (306, "6 minutes"), (3605, "60 minutes"),
        (3606, "2 hours"), (7200, "2 hours"), (86_400, "24 hours"),
    ],
)  # fmt: skip
def test_a_span_in_words_is_rounded_up(span: float, said: str) -> None:
    assert in_words(span) == said
