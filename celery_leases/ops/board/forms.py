"""Parsing of queries and forms; malformed or too large ones are refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from typing import Any, Final, Literal, get_args
from urllib.parse import parse_qsl, quote, unquote, urlencode

from starlette.exceptions import HTTPException
from starlette.requests import Request

from celery_leases.client import LeaseStatus, RecordFilter
from celery_leases.errors import LeaseConfigurationError
from celery_leases.keys import STORED_KEY_MAX
from celery_leases.operator_actions import ACTIONS, ActionName
from celery_leases.record_filters import KNOWN_STATES, Position
from celery_leases.text.cleaning import printable
from celery_leases.text.durations import moment

MAX_BODY: Final = 4_000_000
"""Bytes of a form; 500 selected keys take at most two thirds, because they are quoted twice."""
MAX_FIELDS: Final = 1_000
MAX_SELECTED: Final = 500
MAX_FIELD_LENGTH: Final = 100_000
_INT_MAX: Final = 2**63
_MAX_TIME: Final = 253_402_300_799_000_000
"""The end of the year 9999, in microseconds since the epoch."""
URLENCODED: Final = "application/x-www-form-urlencoded"

Order = Literal["latest", "slowest"]


def bad_request(text: str) -> HTTPException:
    """The error 400 for a query or form that cannot be read."""
    return HTTPException(400, text)


class Fields:
    """The fields of a query or a form."""

    def __init__(self, coded: bytes) -> None:
        try:
            self._pairs = parse_qsl(
                coded.decode("ascii"),
                keep_blank_values=True,
                errors="strict",
                max_num_fields=MAX_FIELDS,
            )
        except ValueError:
            raise bad_request("The form cannot be read.") from None
        if any(
            "\x00" in name + value or len(value) > MAX_FIELD_LENGTH for name, value in self._pairs
        ):
            raise bad_request("The form cannot be read.")

    def get(self, name: str, otherwise: str = "") -> str:
        """The first value of a field, without surrounding blanks."""
        return next((value.strip() for each, value in self._pairs if each == name), otherwise)

    def all(self, name: str) -> list[str]:
        """All values of a field that are not blank."""
        return [value for each, value in self._pairs if each == name and value.strip()]

    def number(self, name: str) -> int | None:
        """The integer value of a field; ``None`` if it is empty."""
        text = self.get(name)
        if not text:
            return None
        if not (text.isascii() and text.isdigit() and len(text) < 20) or int(text) >= _INT_MAX:
            raise bad_request(f"{name} is not a number.")
        return int(text)


async def form_of(request: Request) -> Fields:
    """The form of a request; refuses another content type and a form that is too large."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != URLENCODED:
        raise HTTPException(415, f"Send the form as {URLENCODED}.")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY:
            raise HTTPException(413, "The form is too large.")
    return Fields(bytes(body))


# -- filters ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FilterForm:
    """A filter as it was entered."""

    states: tuple[str, ...] = ()
    task: str = ""
    group: str = ""
    prefix: str = ""
    reason: str = ""
    since: str = ""
    until: str = ""
    crashed: str = ""

    @classmethod
    def read(cls, given: Fields) -> FilterForm:
        """The filter in a query or form."""
        names = [field.name for field in fields(cls) if field.name != "states"]
        return cls(tuple(given.all("state")), **{name: given.get(name) for name in names})

    def wanted(self) -> RecordFilter:
        """The filter to apply; a duration means that long before now."""
        if unknown := set(self.states).difference(KNOWN_STATES):
            raise bad_request(f"{printable(min(unknown))} is not a state.")
        return RecordFilter(
            states=self.states,
            task=self.task or None,
            group=self.group or None,
            prefix=self.prefix or None,
            reason=self.reason or None,
            since=_moment(self.since),
            until=_moment(self.until),
            crashed=bool(self.crashed),
        )

    def query(self, **more: str | None) -> str:
        """The filter as the query of a URL."""
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
    """A query with its question mark; empty if there are no values."""
    given = [(name, value) for name, value in pairs if value]
    return f"?{urlencode(given)}" if given else ""


def order_of(given: Fields) -> Order:
    """The order of the list."""
    found = given.get("order", "latest") or "latest"
    if found not in get_args(Order):
        raise bad_request(f"{printable(found)} is not an order.")
    return found  # type: ignore[return-value]


def page_token_of(given: Fields) -> str | None:
    """The token of the page to show; ``None`` for the first page."""
    token = given.get("after")
    if not token:
        return None
    try:
        place = Position.read(token)
    except LeaseConfigurationError:
        place = None
    if place is None or abs(place.value) >= _INT_MAX or "\x00" in place.stored_key:
        raise bad_request("There is no such page: start with the first one.")
    return token


def _moment(text: str) -> int | None:
    """A time in microseconds since the epoch; ``None`` if *text* is empty.

    A duration means that long ago; a time without a time zone is UTC.
    """
    if not text:
        return None
    try:
        return max(0, round(moment(text, UTC).timestamp() * 1e6))
    except LeaseConfigurationError as error:
        raise bad_request(f"{printable(str(error))} (times are in UTC)") from None


def time_of(given: Fields, name: str) -> datetime:
    """The time in a field that has microseconds since the epoch."""
    found = given.number(name)
    if found is None or found > _MAX_TIME:
        raise bad_request("The form cannot be read.")
    return datetime.fromtimestamp(found / 1e6, UTC)


# -- the filter in the form that confirms an action -----------------------------------------------

_TEXTS: Final = ("task", "group", "prefix", "reason")
_NUMBERS: Final = ("since", "until", "unmoved_since")


def hidden(wanted: RecordFilter) -> list[tuple[str, str]]:
    """A filter as hidden fields; its times are absolute, so it selects the same records later."""
    found = [("state", state) for state in wanted.states]
    found += [
        (name, str(getattr(wanted, name)))
        for name in (*_TEXTS, *_NUMBERS)
        if getattr(wanted, name) is not None
    ]
    return [*found, *([("crashed", "1")] if wanted.crashed else [])]


def confirmed(given: Fields) -> RecordFilter:
    """The filter in the fields that :func:`hidden` made."""
    states = tuple(given.all("state"))
    moment = given.number("unmoved_since")
    if moment is None or set(states).difference(KNOWN_STATES):
        raise bad_request("The form cannot be read.")
    texts: dict[str, Any] = {name: given.get(name) or None for name in _TEXTS}
    numbers: dict[str, Any] = {name: given.number(name) for name in _NUMBERS}
    if any(value is not None and value > _MAX_TIME for value in numbers.values()):
        raise bad_request("The form cannot be read.")
    return RecordFilter(states, **texts, **numbers, crashed=bool(given.get("crashed")))


# -- selected keys, with the status that the page showed ------------------------------------------


def seen_value(status: LeaseStatus) -> str:
    """A status as the value of a form field; an action requires that it is still the same.

    The key is quoted because browsers send each line break in a field as CR LF.
    """
    stored = quote(status.stored_key or status.key, safe="/:|", errors="replace")
    return f"{status.fence}:{status.state}:{stored}"


def seen_of(given: Fields) -> list[LeaseStatus]:
    """The statuses of the selected keys, as the page showed them."""
    found = {status.key: status for status in map(_seen, given.all("seen"))}
    if len(found) > MAX_SELECTED:
        raise bad_request(f"Select at most {MAX_SELECTED} keys.")
    return [*found.values()]


def _seen(value: str) -> LeaseStatus:
    fence, _, rest = value.partition(":")
    state, _, quoted = rest.partition(":")
    stored = unquote(quoted)
    number = int(fence) if fence.isascii() and fence.isdigit() and len(fence) < 20 else _INT_MAX
    if number >= _INT_MAX or state not in KNOWN_STATES or not is_stored_key(stored):
        raise bad_request("The selection cannot be read.")
    return LeaseStatus(stored, None, state, fence=number, stored_key=stored)


def is_stored_key(text: str) -> bool:
    """Whether *text* can be the key of a record."""
    return text.startswith("t:") and "|" in text and len(text) <= STORED_KEY_MAX


def action_of(given: Fields) -> ActionName:
    """The action that a form asks for."""
    found = given.get("action")
    if found not in ACTIONS:
        raise bad_request("There is no such action.")
    return found  # type: ignore[return-value]
