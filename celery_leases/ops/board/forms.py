"""Parsing of queries and forms; malformed or too large ones are refused."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC
from typing import Any, Final, Literal, get_args
from urllib.parse import parse_qsl, quote, unquote, urlencode

from starlette.exceptions import HTTPException
from starlette.requests import Request

from celery_leases.client import Write
from celery_leases.errors import LeaseConfigurationError
from celery_leases.keys import STORED_KEY_MAX
from celery_leases.ops.actions import ACTIONS
from celery_leases.ops.filters import CONDITIONS, filter_of
from celery_leases.record_filters import KNOWN_STATES, Position, RecordFilter
from celery_leases.status import LeaseStatus
from celery_leases.text.cleaning import printable

MAX_BODY: Final = 4_000_000
"""Bytes of a form; 500 selected keys take at most two thirds, because they are quoted twice."""
MAX_FIELDS: Final = 1_000
MAX_SELECTED: Final = 500
MAX_FIELD_LENGTH: Final = 100_000
TIME_MAX: Final = 253_402_300_799_000_000
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

    def number(self, name: str, most: int = 2**63 - 1) -> int | None:
        """The integer value of a field, 0 to *most*; ``None`` if it is empty."""
        text = self.get(name)
        if text and not _is_number(text, most):
            raise bad_request(f"{name} is not a number.")
        return int(text) if text else None


def _is_number(text: str, most: int = 2**63 - 1) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= most


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


def entered(given: Fields) -> dict[str, Any]:
    """The conditions of a filter as they were entered in a query or form."""
    return {
        name: tuple(given.all("state")) if kind == "states" else given.get(name)
        for name, kind, *_ in CONDITIONS
    }


def filter_of_form(conditions: Mapping[str, Any]) -> RecordFilter:
    """The filter with the entered conditions; a time without a time zone is UTC."""
    try:
        return filter_of(conditions, UTC)
    except LeaseConfigurationError as error:
        raise bad_request(f"{printable(str(error))} (times are in UTC)") from None


def filter_query(conditions: dict[str, Any], **more: str | None) -> str:
    """Entered conditions as the query of a URL; empty if there are none."""
    rest = {name: value for name, value in (conditions | more).items() if value}
    pairs = [*(("state", state) for state in rest.pop("states", ())), *rest.items()]
    return f"?{urlencode(pairs)}" if pairs else ""


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
    if place is None or abs(place.value) >= 2**63 or "\x00" in place.stored_key:
        raise bad_request("There is no such page: start with the first one.")
    return token


# -- the filter in the form that confirms an action -----------------------------------------------

_TIMES: Final = (*(name for name, kind, *_ in CONDITIONS if kind == "time"), "unmoved_since")
_TEXTS: Final = tuple(name for name, kind, *_ in CONDITIONS if kind == "text")


def hidden(wanted: RecordFilter) -> list[tuple[str, str]]:
    """A filter as hidden fields; its times are absolute, so it selects the same records later."""
    values = [(name, getattr(wanted, name)) for name in (*_TEXTS, *_TIMES)]
    return [
        *(("state", str(state)) for state in wanted.states),
        *((name, str(value)) for name, value in values if value is not None),
        *([("crashed", "1")] if wanted.crashed else []),
    ]


def is_time(name: str) -> bool:
    """Whether a hidden field has microseconds since the epoch."""
    return name in _TIMES


def confirmed(given: Fields) -> RecordFilter:
    """The filter in the fields that :func:`hidden` made."""
    states = tuple(given.all("state"))
    found: dict[str, Any] = {name: given.get(name) or None for name in _TEXTS}
    found |= {name: given.number(name, TIME_MAX) for name in _TIMES}
    if found["unmoved_since"] is None or set(states).difference(KNOWN_STATES):
        raise bad_request("The form cannot be read.")
    return RecordFilter(states, **found, crashed=bool(given.get("crashed")))


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
    if not (_is_number(fence) and state in KNOWN_STATES and is_stored_key(stored)):
        raise bad_request("The selection cannot be read.")
    return LeaseStatus(stored, None, state, fence=int(fence), stored_key=stored)


def is_stored_key(text: str) -> bool:
    """Whether *text* can be the key of a record."""
    return text.startswith("t:") and "|" in text and len(text) <= STORED_KEY_MAX


def action_of(given: Fields) -> Write:
    """The action that a form asks for."""
    found = given.get("action")
    if found not in ACTIONS:
        raise bad_request("There is no such action.")
    return found  # type: ignore[return-value]
