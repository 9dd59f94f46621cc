"""What comes in queries and forms: read within bounds, and refused with 400 where it is
malformed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal, get_args
from urllib.parse import parse_qsl, quote, unquote, urlencode

from starlette.exceptions import HTTPException
from starlette.requests import Request

from celery_leases.client import LeaseStatus, RecordFilter
from celery_leases.common.durations import parsed
from celery_leases.common.texts import printable
from celery_leases.errors import LeaseConfigurationError
from celery_leases.protocol.filters import KNOWN_STATES, Position
from celery_leases.protocol.keys import STORED_KEY_MAX

LARGEST: Final = 4_000_000
"""Bytes of a form; 500 selected keys have at most two thirds of that, as they are quoted twice."""
MOST_FIELDS: Final = 1_000
MOST_SELECTED: Final = 500
LONGEST_FIELD: Final = 100_000
_INT_MAX: Final = 2**63
_LAST_MOMENT: Final = 253_402_300_799_000_000
"""Microseconds since the epoch, at the end of the year 9999."""
URLENCODED: Final = "application/x-www-form-urlencoded"

What = Literal["retry", "release", "forget", "resolve_done", "resolve_retry"]
Order = Literal["latest", "slowest"]


def bad(text: str) -> HTTPException:
    """The answer to what cannot be read."""
    return HTTPException(400, text)


class Fields:
    """The fields of a query or a form."""

    def __init__(self, coded: bytes) -> None:
        try:
            self._pairs = parse_qsl(
                coded.decode("ascii"),
                keep_blank_values=True,
                errors="strict",
                max_num_fields=MOST_FIELDS,
            )
        except ValueError:
            raise bad("The form cannot be read.") from None
        if any("\x00" in name + value or len(value) > LONGEST_FIELD for name, value in self._pairs):
            raise bad("The form cannot be read.")

    def get(self, name: str, otherwise: str = "") -> str:
        """The value of a field, without blanks around it."""
        return next((value.strip() for each, value in self._pairs if each == name), otherwise)

    def all(self, name: str) -> list[str]:
        """The values of a field that comes several times, those that are not blank."""
        return [value for each, value in self._pairs if each == name and value.strip()]

    def number(self, name: str) -> int | None:
        """A whole number, if the field has one."""
        text = self.get(name)
        if not text:
            return None
        if not (text.isascii() and text.isdigit() and len(text) < 20) or int(text) >= _INT_MAX:
            raise bad(f"{name} is no number.")
        return int(text)


async def form_of(request: Request) -> Fields:
    """The form of a request; refuses one of another kind, and one that is too large."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != URLENCODED:
        raise HTTPException(415, "Send a form.")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > LARGEST:
            raise HTTPException(413, "The form is too large.")
    return Fields(bytes(body))


# -- filters ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Asked:
    """The filter, as it was written."""

    states: tuple[str, ...] = ()
    task: str = ""
    group: str = ""
    prefix: str = ""
    reason: str = ""
    since: str = ""
    until: str = ""
    crashed: str = ""

    @classmethod
    def read(cls, given: Fields) -> Asked:
        """The filter of a query or form."""
        names = [field.name for field in fields(cls) if field.name != "states"]
        return cls(tuple(given.all("state")), **{name: given.get(name) for name in names})

    def wanted(self, now: datetime) -> RecordFilter:
        """The filter itself; a span is counted back from *now*."""
        if unknown := set(self.states).difference(KNOWN_STATES):
            raise bad(f"{printable(min(unknown))} is no state.")
        return RecordFilter(
            states=self.states,
            task=self.task or None,
            group=self.group or None,
            prefix=self.prefix or None,
            reason=self.reason or None,
            since=_moment(self.since, now),
            until=_moment(self.until, now),
            crashed=bool(self.crashed),
        )

    def query(self, **more: str | None) -> str:
        """It as the query of a URL."""
        return query_of(
            [
                *(("state", state) for state in self.states),
                *(
                    (field.name, getattr(self, field.name))
                    for field in fields(self)
                    if field.name != "states"
                ),
                *more.items(),
            ]
        )


def query_of(pairs: Sequence[tuple[str, str | None]]) -> str:
    """A query with its question mark; empty without any values."""
    kept = [(name, value) for name, value in pairs if value]
    return f"?{urlencode(kept)}" if kept else ""


def order_of(given: Fields) -> Order:
    """The order of the list."""
    found = given.get("order", "latest") or "latest"
    if found not in get_args(Order):
        raise bad(f"{printable(found)} is no order.")
    return found  # type: ignore[return-value]


def place_of(given: Fields) -> str | None:
    """Where the list goes on."""
    token = given.get("after")
    if not token:
        return None
    try:
        place = Position.read(token)
    except LeaseConfigurationError:
        place = None
    if place is None or abs(place.value) >= _INT_MAX or "\x00" in place.stored_key:
        raise bad("There is no such page: begin with the first one.")
    return token


def _moment(text: str, now: datetime) -> int | None:
    """Microseconds since the epoch; a span counts back from *now*, a time without a zone is in
    UTC.
    """
    if not text:
        return None
    try:
        span = parsed(text)
        when = now - timedelta(seconds=span) if span is not None else datetime.fromisoformat(text)
        when = when if when.tzinfo else when.replace(tzinfo=UTC)
        return max(0, round(when.timestamp() * 1e6))
    except (ValueError, OverflowError):
        raise bad(
            f"{printable(text)} is no time: write one such as 2026-04-01T03:00 (UTC), or a span "
            "before now: 12h."
        ) from None


# -- a filter as it was confirmed ------------------------------------------------------------------

_TEXTS: Final = ("task", "group", "prefix", "reason")
_NUMBERS: Final = ("since", "until", "unmoved_since")


def hidden(wanted: RecordFilter) -> list[tuple[str, str]]:
    """A filter as hidden fields, with its moments: what it means does not move with the clock."""
    found = [("state", state) for state in wanted.states]
    found += [
        (name, str(getattr(wanted, name)))
        for name in (*_TEXTS, *_NUMBERS)
        if getattr(wanted, name) is not None
    ]
    return [*found, *([("crashed", "1")] if wanted.crashed else [])]


def confirmed(given: Fields) -> RecordFilter:
    """The filter of those fields."""
    states = tuple(given.all("state"))
    moment = given.number("unmoved_since")
    if moment is None or set(states).difference(KNOWN_STATES):
        raise bad("The form cannot be read.")
    texts: dict[str, Any] = {name: given.get(name) or None for name in _TEXTS}
    numbers: dict[str, Any] = {name: given.number(name) for name in _NUMBERS}
    if any(value is not None and value > _LAST_MOMENT for value in numbers.values()):
        raise bad("The form cannot be read.")
    return RecordFilter(states, **texts, **numbers, crashed=bool(given.get("crashed")))


# -- keys as they were seen ------------------------------------------------------------------------


def seen_value(status: LeaseStatus) -> str:
    """A status as the value of a field: what must not have changed when something is done. The key
    is quoted, as a browser sends each line break of a field as CR LF.
    """
    stored = quote(status.stored_key or status.key, safe="/:|", errors="replace")
    return f"{status.fence}:{status.state}:{stored}"


def seen_of(given: Fields) -> list[LeaseStatus]:
    """The statuses that were seen, of each key once."""
    found = {status.key: status for status in map(_seen, given.all("seen"))}
    if len(found) > MOST_SELECTED:
        raise bad(f"Select at most {MOST_SELECTED} keys.")
    return [*found.values()]


def _seen(value: str) -> LeaseStatus:
    fence, _, rest = value.partition(":")
    state, _, quoted = rest.partition(":")
    stored = unquote(quoted)
    number = int(fence) if fence.isascii() and fence.isdigit() and len(fence) < 20 else _INT_MAX
    if number >= _INT_MAX or state not in KNOWN_STATES or not is_stored_key(stored):
        raise bad("The selection cannot be read.")
    return LeaseStatus(stored, None, state, fence=number, stored_key=stored)


def is_stored_key(text: str) -> bool:
    """Whether *text* can be the key of a record."""
    return text.startswith("t:") and "|" in text and len(text) <= STORED_KEY_MAX


def action_of(given: Fields) -> What:
    """The action that is asked for."""
    found = given.get("action")
    if found not in get_args(What):
        raise bad("There is no such action.")
    return found  # type: ignore[return-value]
