"""Server delays: how long a response says to wait."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_leases.failures.delays import ServerDelay, server_delay
from celery_leases.failures.error_facts import ErrorFacts

MOMENT = datetime(2026, 4, 1, 12, tzinfo=UTC)
NOW = MOMENT.timestamp()
IN_A_MINUTE = format_datetime(MOMENT + timedelta(minutes=1), usegmt=True)


def told(status: int | None = 429, /, **headers: str) -> ServerDelay | None:
    """What an answer with these headers tells, at noon."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return server_delay(ErrorFacts(status=status, headers=named), NOW)


RIGHT: list[tuple[dict[str, str], float, str]] = [
    ({"retry_after_ms": "1500"}, 1.5, "retry-after-ms"),
    ({"retry_after": "20"}, 20.0, "retry-after"),
    ({"retry_after": "1.5"}, 1.5, "retry-after"),
    ({"retry_after": " 20 "}, 20.0, "retry-after"),
    ({"retry_after": "20\x1f"}, 20.0, "retry-after"),
    ({"retry_after": IN_A_MINUTE}, 60.0, "retry-after"),
    ({"retry_after": "Wednesday, 01-Apr-26 12:01:00 GMT"}, 60.0, "retry-after"),
    ({"retry_after": "Wed Apr  1 12:01:00 2026"}, 60.0, "retry-after"),
    ({"x_amz_retry_after": "1500"}, 1.5, "x-amz-retry-after"),
    (
        {"x_ratelimit_remaining_requests": "0", "x_ratelimit_reset_requests": "6m0s"},
        360.0,
        "x-ratelimit-reset-requests",
    ),
    ({"x_ratelimit_remaining_tokens": "0", "x_ratelimit_reset_tokens": "12ms"}, 0.012, "x-ratelimit-reset-tokens"),
    ({"x_ratelimit_remaining_tokens": "0", "x_ratelimit_reset_tokens": "1m2.5s"}, 62.5, "x-ratelimit-reset-tokens"),
    ({"anthropic_ratelimit_requests_reset": "2026-04-01T12:01:00Z"}, 60.0, "anthropic-ratelimit-requests-reset"),
    (
        {"anthropic_ratelimit_input_tokens_reset": "2026-04-01T14:01:00+02:00"},
        60.0,
        "anthropic-ratelimit-input-tokens-reset",
    ),
    ({"x_ratelimit_reset": "40"}, 40.0, "x-ratelimit-reset"),
    ({"x_ratelimit_reset": f"{NOW + 90:.0f}"}, 90.0, "x-ratelimit-reset"),
    ({"x_ratelimit_reset": f"{(NOW + 90) * 1000:.0f}"}, 90.0, "x-ratelimit-reset"),
    ({"x_ratelimit_remaining": "0", "x_ratelimit_reset": "40"}, 40.0, "x-ratelimit-reset"),
    ({"ratelimit": '"default";r=0;t=40'}, 40.0, "ratelimit"),
    ({"ratelimit": '"default";t=40'}, 40.0, "ratelimit"),
    ({"ratelimit": '"minute";r=9;t=60, "hour";r=0;t=1800, "second";r=0;t=1'}, 1800.0, "ratelimit"),
    ({"ratelimit": "limit=100, remaining=0, reset=40"}, 40.0, "ratelimit"),
]  # fmt: skip


@pytest.mark.parametrize(("headers", "seconds", "source"), RIGHT, ids=lambda value: str(value)[:60])
def test_a_delay_is_read_from_each_place_and_format(headers, seconds, source) -> None:
    found = told(**headers)
    assert found is not None
    assert (round(found.seconds, 3), found.source, found.clamped) == (seconds, source, False)


def test_the_places_are_asked_in_a_fixed_order() -> None:
    headers = {
        "retry-after-ms": "2000",
        "retry-after": "3",
        "x-amz-retry-after": "4000",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "6s",
        "anthropic-ratelimit-tokens-reset": "2026-04-01T12:00:07Z",
        "x-ratelimit-reset": "8",
        "ratelimit": "r=0;t=9",
    }
    heard = []
    facts: dict[str, Any] = {"retry_after": 1.0, "retry_info": 5.0}
    while found := server_delay(ErrorFacts(status=429, headers=headers, **facts), NOW):
        heard.append(found.seconds)
        if found.source == "exception":
            facts["retry_after"] = None
        elif found.source == "google.rpc.RetryInfo":
            facts["retry_info"] = None
        else:
            del headers[found.source]
    assert heard == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]


WRONG: list[dict[str, str]] = [
    *(
        {"retry_after": value}
        for value in ("", "soon", "-1", "0", "nan", "inf", "1e9", "1_0", "0x10", "9" * 200, "5m")
    ),
    {"retry_after": format_datetime(MOMENT - timedelta(minutes=1), usegmt=True)},
    {"retry_after": IN_A_MINUTE.replace("12:01", "12:00")},
    {"retry_after": "Wed, 99 Foo 2026 12:01:00 GMT"},
    {"retry_after_ms": "-5"},
    {"x_amz_retry_after": "soon"},
    {"x_ratelimit_remaining_requests": "1", "x_ratelimit_reset_requests": "6m0s"},
    {"x_ratelimit_reset_requests": "6m0s"},
    {"x_ratelimit_remaining_tokens": "0", "x_ratelimit_reset_tokens": "soon"},
    {"x_ratelimit_remaining_tokens": "0"},
    {"anthropic_ratelimit_requests_reset": "2026-04-01T11:59:00Z"},
    {"anthropic_ratelimit_requests_reset": "tomorrow"},
    {"x_ratelimit_reset": f"{NOW - 1:.0f}"},
    {"x_ratelimit_remaining": "12", "x_ratelimit_reset": "40"},
    {"ratelimit": '"default";r=5;t=40'},
    {"ratelimit": '"default";r=0'},
    {"ratelimit": '"default";r=0;t=4.5'},
    {"ratelimit": "nonsense"},
]


@pytest.mark.parametrize("headers", WRONG, ids=lambda value: str(value)[:60])
def test_malformed_past_or_unrelated_values_are_ignored(headers) -> None:
    assert told(**headers) is None


def test_what_is_malformed_lets_the_next_place_speak() -> None:
    found = told(retry_after_ms="soon", retry_after="nan", x_amz_retry_after="1500")
    assert found == ServerDelay(1.5, "x-amz-retry-after")


def test_a_long_delay_is_cut_to_six_hours_and_says_so() -> None:
    """A provider's slip must not park a key for a year."""
    assert told(retry_after="21600") == ServerDelay(21600.0, "retry-after", clamped=False)
    assert told(retry_after="86400") == ServerDelay(21600.0, "retry-after", clamped=True)
    assert server_delay(ErrorFacts(retry_after=1e9), NOW) == ServerDelay(
        21600.0, "exception", clamped=True
    )


@pytest.mark.parametrize(
    "headers",
    [
        {"retry_after": IN_A_MINUTE},
        {"anthropic_ratelimit_requests_reset": "2026-04-01T12:01:00Z"},
        {"x_ratelimit_reset": f"{NOW + 60:.0f}"},
    ],
    ids=str,
)
def test_moments_are_measured_by_the_clock_of_the_answer(headers: dict[str, str]) -> None:
    ten_seconds_on = format_datetime(MOMENT + timedelta(seconds=10), usegmt=True)
    found = told(**headers, date=ten_seconds_on)
    assert found is not None
    assert found.seconds == 50.0
    assert told(**headers, date="yesterday") is not None


def test_seconds_do_not_depend_on_any_clock() -> None:
    assert told(retry_after="20", date="Wed, 01 Apr 2020 12:00:00 GMT") == ServerDelay(
        20.0, "retry-after"
    )


def test_of_several_empty_windows_the_last_to_fill_counts() -> None:
    openai = {
        "x_ratelimit_remaining_requests": "0",
        "x_ratelimit_reset_requests": "1s",
        "x_ratelimit_remaining_tokens": "0",
        "x_ratelimit_reset_tokens": "6m0s",
    }
    assert told(**openai) == ServerDelay(360.0, "x-ratelimit-reset-tokens")
    anthropic = {
        "anthropic_ratelimit_requests_remaining": "0",
        "anthropic_ratelimit_requests_reset": "2026-04-01T12:00:30Z",
        "anthropic_ratelimit_tokens_remaining": "4000",
        "anthropic_ratelimit_tokens_reset": "2026-04-01T12:01:00Z",
    }
    assert told(**anthropic) == ServerDelay(30.0, "anthropic-ratelimit-requests-reset")
    assert told(**{**anthropic, "anthropic_ratelimit_requests_remaining": "1"}) == ServerDelay(
        60.0, "anthropic-ratelimit-tokens-reset"
    )


@pytest.mark.parametrize("status", [404, 409, 500, 502])
def test_the_state_of_a_limit_does_not_apply_to_other_failures(status: int) -> None:
    """GitHub sends its window with every answer; waiting an hour after a 500 would be for
    nothing.
    """
    window = {"x_ratelimit_reset": f"{NOW + 3600:.0f}", "ratelimit": "r=0;t=9"}
    assert told(status, **window) is None
    assert told(status, **window, retry_after="3") == ServerDelay(3.0, "retry-after")


@given(
    st.dictionaries(
        st.sampled_from(
            [
                *("retry-after", "retry-after-ms", "x-amz-retry-after", "x-ratelimit-reset", "ratelimit", "date"),
                *("x-ratelimit-reset-tokens", "x-ratelimit-remaining-tokens", "anthropic-ratelimit-tokens-reset"),
            ]
        ),
        st.text(alphabet="0129TZ:.,;+-= rtm\x1f\u0665", max_size=40) | st.just(IN_A_MINUTE),
    )
)  # fmt: skip
def test_no_header_value_breaks_the_parser(headers: dict[str, str]) -> None:
    found = server_delay(ErrorFacts(status=429, headers=headers), NOW)
    assert found is None or 0 < found.seconds <= 21_600
