"""Delays that a response or an exception gives, at most six hours.

The first of these that is present counts: an attribute of the exception, ``retry-after-ms``,
``retry-after``, ``x-amz-retry-after``, ``google.rpc.RetryInfo``, ``x-ratelimit-reset-requests`` and
``-tokens`` of an empty window, ``anthropic-ratelimit-…-reset``, ``x-ratelimit-reset``,
``ratelimit``. A value that is malformed, in the past, or not above 0 counts as absent.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Final

from celery_leases.failures.cooldown_policies import SIX_HOURS
from celery_leases.failures.error_facts import ErrorFacts
from celery_leases.text.durations import parsed

LIMITING: Final = frozenset({None, 403, 413, 429, 503, 509, 529})
"""The statuses with which the headers about a rate limit's window explain the failure. Some servers
send them with every response.
"""

_NUMBER: Final = re.compile(r"\d{1,15}(?:\.\d{1,15})?", re.ASCII)
_EPOCH: Final = 1e9
_EPOCH_IN_MS: Final = 1e11
_ANTHROPIC: Final = re.compile(r"(anthropic-ratelimit-[a-z-]+)-reset")
_LEFT: Final = re.compile(r"(?:^|[;,\s])(?:r|remaining)=(\d{1,15})(?![\d.])", re.ASCII)
_WAIT: Final = re.compile(r"(?:^|[;,\s])(?:t|reset)=(\d{1,15})(?![\d.])", re.ASCII)

Headers = Mapping[str, str]
Found = tuple[float | None, str]


@dataclass(frozen=True, slots=True)
class ServerDelay:
    """A delay in seconds that a response or an exception gives, its source, and whether it was cut
    to six hours.
    """

    seconds: float
    source: str
    clamped: bool = False


def server_delay(facts: ErrorFacts, now: float) -> ServerDelay | None:
    """The delay that the response or the exception gives; ``None`` if it gives none.

    *now* is the wall clock in seconds since the epoch. A date is compared with the ``date`` header
    of the response, if there is one, so the clocks of server and client need not agree.
    """
    for seconds, source in _candidates(facts, _date(facts.headers.get("date")) or now):
        if seconds is not None and 0 < seconds < math.inf:
            return ServerDelay(min(seconds, SIX_HOURS), source, seconds > SIX_HOURS)
    return None


def _candidates(facts: ErrorFacts, base: float) -> Iterator[Found]:
    headers = facts.headers
    yield facts.retry_after, "exception"
    yield _scaled(headers.get("retry-after-ms"), 1e-3), "retry-after-ms"
    yield _retry_after(headers.get("retry-after"), base), "retry-after"
    yield _scaled(headers.get("x-amz-retry-after"), 1e-3), "x-amz-retry-after"
    yield facts.retry_info, "google.rpc.RetryInfo"
    if facts.status in LIMITING:
        yield _empty_windows(headers)
        yield _anthropic_windows(headers, base)
        yield _reset(headers, base), "x-ratelimit-reset"
        yield _ratelimit(headers.get("ratelimit", "")), "ratelimit"


def _number(text: str | None) -> float | None:
    # str.strip() and float() do not agree on what white space is.
    found = _NUMBER.fullmatch(text.strip()) if text else None
    return float(found[0]) if found else None


def _scaled(text: str | None, unit: float) -> float | None:
    number = _number(text)
    return number * unit if number is not None else None


def _date(text: str | None) -> float | None:
    """An HTTP date in seconds since the epoch (RFC 9110, section 5.6.7: three formats)."""
    try:
        moment = parsedate_to_datetime(text) if text else None
    except (ValueError, TypeError, OverflowError, IndexError):
        return None
    return _epoch(moment)


def _epoch(moment: datetime | None) -> float | None:
    if moment is None:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _since(moment: float | None, base: float) -> float | None:
    return moment - base if moment is not None else None


def _retry_after(text: str | None, base: float) -> float | None:
    number = _number(text)
    return number if number is not None else _since(_date(text), base)


def _latest(found: Iterable[Found]) -> Found:
    """The longest of several delays: a request is only accepted once all of them are over."""
    return max(((seconds, source) for seconds, source in found if seconds), default=(None, ""))


def _empty_windows(headers: Headers) -> Found:
    """The delay by OpenAI's windows, which have Go's durations. Only empty windows count: the
    others did not cause the failure.
    """
    return _latest(
        (parsed(headers.get(f"x-ratelimit-reset-{window}", "")), f"x-ratelimit-reset-{window}")
        for window in ("requests", "tokens")
        if _number(headers.get(f"x-ratelimit-remaining-{window}")) == 0
    )


def _anthropic_windows(headers: Headers, base: float) -> Found:
    """The delay by Anthropic's windows, which have RFC 3339 times: by the empty windows, or by all
    if none is known to be empty.
    """
    windows = {match[1]: headers[name] for name in headers if (match := _ANTHROPIC.fullmatch(name))}
    empty = {window for window in windows if _number(headers.get(f"{window}-remaining")) == 0}
    return _latest(
        (_since(_rfc3339(windows[window]), base), f"{window}-reset") for window in empty or windows
    )


def _rfc3339(text: str) -> float | None:
    try:
        return _epoch(datetime.fromisoformat(text))
    except (ValueError, OverflowError):
        return None


def _reset(headers: Headers, base: float) -> float | None:
    number = _number(headers.get("x-ratelimit-reset"))
    if number is None or (_number(headers.get("x-ratelimit-remaining")) or 0) > 0:
        return None
    if number > _EPOCH_IN_MS:
        number /= 1000
    return number - base if number > _EPOCH else number


def _ratelimit(text: str) -> float | None:
    """The delay by the header of the IETF draft: ``"default";r=0;t=40``, in earlier versions
    ``limit=100, remaining=0, reset=40``.
    """
    waits = []
    for policy in text.split(",") if ";" in text else [text]:
        left, wait = _LEFT.search(policy), _WAIT.search(policy)
        if wait and (left is None or int(left[1]) == 0):
            waits.append(float(wait[1]))
    return max(waits, default=None)
