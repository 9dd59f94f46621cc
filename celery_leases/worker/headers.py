"""The message header of celery_leases, its fields on requests, and the identity of a call: id, key
and group.
"""

from __future__ import annotations

import binascii
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from celery_leases.decide.copies import UNCOPIED, Copy
from celery_leases.errors import KeyUnusable
from celery_leases.groups.group import GROUP_NAME_MAX, stored_group
from celery_leases.keys import (
    STORED_KEY_MAX,
    CallKey,
    bounded,
    call_group,
    call_key,
    is_short_form,
    may_be_stored,
    stored_key,
    unfit,
)
from celery_leases.options import LeaseOptions
from celery_leases.text.cleaning import text_of
from celery_leases.text.notices import logger
from celery_leases.value_class import value_class
from celery_leases.worker.waiting_log import LONGEST_CAUSE

OURS: Final = "celery_leases"
"""The prefix of every name that celery_leases writes into a message."""

TOKEN: Final = "celery_leases_token"  # noqa: S105 - the name of a field, not a password
"""The field of the request, and so of ``task.request``, that carries the owner token to the pool
child.
"""

TASK_EVENTS: Final = "celery_leases_watched"
"""The field of the request that says, in the same way, whether the worker sends task events."""

WOKEN: Final = "celery_leases_woken"
"""The field of the request that says, in the same way, whether this worker begins calls that wait
for a held key as soon as the key is free.
"""

SINCE: Final = "celery_leases_since"
"""The field of the request that says, in the same way, since when a call waits in this worker for
its turn in its group.
"""

LIMITS: Final = "celery_leases_limits"
"""The field of the request that says, in the same way, the hard and the soft time limit of the call
in seconds: those of its message, its task, or its worker.
"""

ARRIVED: Final = "celery_leases_arrived"
"""The field of the request that says, in the same way, the order of a call by its arrival, if its
publisher has given it none; see :mod:`~celery_leases.worker.arrivals`.
"""

CAME: Final = "celery_leases_came"
"""The field of the request that says, in the same way, when the message of a call with
``lease_runs="latest"`` came to this worker, by :func:`os_threads.boot_clock`.
"""

ENDED_UNDER: Final = "celery_leases_ended_under"
"""The attribute of an exception that has passed through a delivery, with the owner token: the main
process need not look at the record.
"""

HEADER: Final = OURS
"""The name of the message header, which a call has after its first delivery."""

ORDER: Final = "celery_leases_order"
"""The name of the message header with the id and the order of a call with ``lease_runs="latest"``,
from its publisher.
"""

HEADER_VERSION: Final = 1
LONGEST_KEY: Final = 1000
"""The longest key that a header carries, in characters. AMQP needs all headers of a message in one
frame of 128 KB.
"""

MAX_PRIOR: Final = 8
MAX_COUNT: Final = 10**6
"""The highest count that a header may contain."""

_NESTED: Final = "~replaced~"
"""Joins Celery's id and the nesting, in the id of a call. People choose ids that look like any
shorter mark.
"""
_TOKEN: Final = re.compile("[0-9A-Za-z+/]{16}", re.ASCII)
_OWNER: Final = re.compile("[0-9A-Za-z+/]{16,32}-[0-9a-f]{1,8}", re.ASCII)
_FINGERPRINT: Final = re.compile("v[0-9]{1,3}:[0-9A-Za-z+/]{22}", re.ASCII)


class HeaderUnusable(Exception):
    """A header was not written by celery_leases; the text says why."""


@value_class(frozen=True, slots=True)
class Header:
    """The header of a call after its first delivery. All fields have a bounded length.

    ``key`` is empty if it is too long for a header; ``stored``, its stored form, is empty
    otherwise. ``reschedules``: how often the call was rescheduled; ``store_failures``: how often in
    a row because a store did not answer. ``prior``: the owners of attempts that may still be open.
    ``failure_fence``: see :class:`~celery_leases.call.Call`. ``held``: the call waits
    because another call holds its key; ``full``: because its group is full, ``since`` then, in
    milliseconds by the clock of the store. ``due``: the user's countdown ends then, in seconds
    since 1970; the call waits for it in hops. ``arrived`` and
    ``waited_for_newer``: see :class:`~celery_leases.call.Call`. ``cause``: what the call waits for,
    see :func:`~celery_leases.worker.waiting_log.cause_after`.
    """

    task: str
    id: str
    key: str = ""
    stored: str = ""
    fingerprint: str | None = None
    group: str | None = None
    copy: Copy = UNCOPIED
    reschedules: int = 0
    store_failures: int = 0
    prior: tuple[str, ...] = ()
    started: bool = False
    failure_fence: int | None = None
    held: bool = False
    full: bool = False
    since: float | None = None
    due: float | None = None
    cause: str = ""
    arrived: int = 0
    waited_for_newer: float = 0.0

    def of_key(self, key: CallKey, group: str | None) -> Self:
        """This header for a call of that key and cooldown group."""
        short = len(key.key) <= LONGEST_KEY
        return replace(
            self,
            key=key.key if short else "",
            stored="" if short else key.stored,
            fingerprint=key.fingerprint,
            group=stored_group(group) if group is not None else None,
        )

    def begun(self, key: CallKey, group: str | None, arrived: int) -> Header:
        """The header of the call once its body begins: the counts of earlier reschedules start
        again at 0.
        """
        short = len(key.key) <= LONGEST_KEY
        return Header(
            self.task,
            self.id,
            key=key.key if short else "",
            stored="" if short else key.stored,
            fingerprint=key.fingerprint,
            group=stored_group(group) if group is not None else None,
            copy=self.copy,
            started=True,
            arrived=arrived,
        )

    def write(self, request: Any) -> None:
        """Write the header into the headers of *request*, which Celery's retries and copies carry.

        The request gets headers of its own, because members of a group share one dictionary.
        """
        request.headers = {**(request.headers or {}), HEADER: self.written()}

    def written(self) -> dict[str, Any]:  # noqa: C901, PLR0912 - a line for each field is quicker than a loop
        """The form in a message: without empty fields."""
        # A delivery writes one before its body, so this is quicker than a loop over the fields.
        written: dict[str, Any] = {"v": HEADER_VERSION, "task": self.task, "id": self.id}
        if self.key:
            written["key"] = self.key
        if self.stored:
            written["stored"] = self.stored
        if self.fingerprint:
            written["fingerprint"] = self.fingerprint
        if self.group:
            written["group"] = self.group
        if self.copy.number:
            written["copy"] = str(self.copy)
        if self.reschedules:
            written["tries"] = self.reschedules
            written["cause"] = self.cause
        if self.store_failures:
            written["away"] = self.store_failures
        if self.prior:
            written["prior"] = list(self.prior)
        if self.started:
            written["started"] = True
        if self.held:
            written["held"] = True
        if self.full:
            written["full"] = True
        if self.since is not None:
            written["since"] = self.since
        if self.due is not None:
            written["due"] = self.due
        if self.failure_fence is not None:
            written["met"] = self.failure_fence
        if self.arrived:
            written["arrived"] = self.arrived
        if self.waited_for_newer:
            written["waited"] = self.waited_for_newer
        return written

    @classmethod
    def read(cls, value: object) -> Self:
        """The header from the value that :meth:`written` returned; raises :class:`HeaderUnusable`
        for any other value.
        """
        if not isinstance(value, Mapping):
            raise HeaderUnusable(f"it is a {type(value).__name__}")
        if value.get("v") != HEADER_VERSION:
            raise HeaderUnusable(
                f"its version is {str(value.get('v'))[:20]!r}, not {HEADER_VERSION}"
            )
        found = _Reader(value)
        return cls(
            task=found.text("task", 255),
            id=found.text("id"),
            key=found.text("key", LONGEST_KEY, ""),
            stored=found.text("stored", 255, ""),
            fingerprint=found.matching("fingerprint", _FINGERPRINT),
            group=found.text("group", GROUP_NAME_MAX, "") or None,
            copy=found.copy("copy"),
            reschedules=found.count("tries"),
            store_failures=found.count("away"),
            prior=found.owners("prior"),
            started=found.flag("started"),
            failure_fence=found.fence("met"),
            held=found.flag("held"),
            full=found.flag("full"),
            since=found.time("since", 2**44),
            due=found.time("due"),
            cause=found.text("cause", LONGEST_CAUSE, ""),
            arrived=found.fence("arrived") or 0,
            waited_for_newer=found.time("waited") or 0.0,
        )


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads the fields of a received header; raises :class:`HeaderUnusable` for a wrong value."""

    found: Mapping[str, Any]

    def text(self, name: str, longest: int | None = None, default: str | None = None) -> str:
        value = self.found.get(name, default)
        if not isinstance(value, str) or (longest is not None and len(value) > longest):
            raise self._wrong(
                name, "a text" if longest is None else f"a text of at most {longest} characters"
            )
        if reason := unfit(value):
            raise self._wrong(name, f"a text that a store can save: {reason}")
        return value

    def matching(self, name: str, form: re.Pattern[str]) -> str | None:
        value = self.found.get(name)
        if value is not None and not (isinstance(value, str) and form.fullmatch(value)):
            raise self._wrong(name, f"a text like {form.pattern}")
        return value

    def copy(self, name: str) -> Copy:
        value = self.found.get(name)
        copy = Copy() if value is None else Copy.read(value)
        if copy is None:
            raise self._wrong(name, "a number and a nonce")
        return copy

    def count(self, name: str) -> int:
        value = self.found.get(name, 0)
        if type(value) is not int or value < 0:
            raise self._wrong(name, "a count")
        return min(value, MAX_COUNT)

    def fence(self, name: str) -> int | None:
        value = self.found.get(name)
        if value is not None and (type(value) is not int or not 0 <= value < 2**63):
            raise self._wrong(name, "a fence")
        return value

    def flag(self, name: str) -> bool:
        value = self.found.get(name, False)
        if type(value) is not bool:
            raise self._wrong(name, "true or false")
        return value

    def time(self, name: str, latest: float = 2**37) -> float | None:
        value = self.found.get(name)
        if value is not None and not (type(value) in (int, float) and 0 <= value < latest):
            raise self._wrong(name, "a time")
        return value

    def owners(self, name: str) -> tuple[str, ...]:
        value = self.found.get(name, [])
        if not isinstance(value, list | tuple) or len(value) > MAX_PRIOR:
            raise self._wrong(name, f"a list of at most {MAX_PRIOR} owners")
        if not all(isinstance(owner, str) and _OWNER.fullmatch(owner) for owner in value):
            raise self._wrong(name, "a list of owners")
        return tuple(value)

    def _wrong(self, name: str, wanted: str) -> HeaderUnusable:
        return HeaderUnusable(f"its field {name!r} is not {wanted}")


def read_header(headers: object, task: str, call_id: str) -> Header | None:
    """The header that an earlier delivery of this call has written; ``None`` if the message does
    not have one.

    The header of another call is ignored: members of a group share one dictionary of headers. A
    header that celery_leases cannot have written is ignored with a warning.
    """
    if (
        not (type(headers) is dict or isinstance(headers, Mapping))
        or (value := headers.get(HEADER)) is None
    ):
        return None
    try:
        header = Header.read(value)
    except HeaderUnusable as error:
        logger.warning(
            "%s[%s]: its message header %r is ignored: %s",
            task,
            call_id,
            HEADER,
            error,
            code="header-ignored",
        )
        return None
    return header if (header.task, header.id) == (task, call_id) else None


def order_of(headers: Mapping[str, Any], call_id: str) -> int:
    """The order that the publisher has given this call; 0 without one, or if it is that of another
    call, whose headers were passed on.
    """
    value = headers.get(ORDER)
    if not isinstance(value, list | tuple) or len(value) != 2 or value[0] != call_id:
        return 0
    return value[1] if type(value[1]) is int and 0 < value[1] < 2**62 else 0


def retries_of(given: object, task: str, call_id: str) -> int:
    """How often Celery has retried a call, according to its message; 0 if that is not a count, with
    a warning.
    """
    if given is None:
        return 0
    if type(given) is not int or given < 0:
        logger.warning(
            "%s[%s]: its message header 'retries' is ignored: it is not a count",
            task,
            call_id,
            code="header-ignored",
        )
        return 0
    return min(given, MAX_COUNT)


def new_token() -> str:
    """A random token for a delivery, of 96 bits. Each first run writes it into its record."""
    return binascii.b2a_base64(os.urandom(12), newline=False).decode()


def owner_of(token: str, pid: int) -> str:
    """The owner token of one attempt: the token of its delivery, and the process id.

    When several children die at once, billiard may give a delivery that has begun to another child.
    Without the process id, two processes would have the same owner token, and one could take the
    other's row for its own.
    """
    return f"{token}-{pid:x}"


def token_of(request: Any) -> str | None:
    """The token that the worker's main process made for a delivery; ``None`` for an eager call."""
    token = request.__dict__.get(TOKEN)
    return token if type(token) is str and _TOKEN.fullmatch(token) else None


def call_id_of(request_id: str, nesting: int | None) -> str:
    """The id of a call, in at most 255 characters: that of Celery, unless that is longer. Two calls
    never have one id.

    A task that replaces itself continues under the same Celery id, so the nesting distinguishes
    the calls.
    """
    if (
        not nesting
        and type(request_id) is str
        and _NESTED not in request_id
        and not request_id[STORED_KEY_MAX - 1 :]
    ):
        return request_id
    text = str(request_id)
    return bounded(f"{text}{_NESTED}{nesting or 0}" if nesting or _NESTED in text else text)


def celery_id_of(call_id: str) -> str:
    """Celery's id of a call, with more than 255 characters its short form."""
    request_id, mark, _ = call_id.rpartition(_NESTED)
    return request_id if mark else call_id


def key_of(
    task: Any,
    header: Header | None,
    call_id: str,
    args: Any,
    kwargs: Any,
    retries: int,
    headers: Mapping[str, Any] | None = None,
) -> CallKey:
    """The key of a call of a leased *task*: from its arguments, or from its *header* if the call
    has begun. *headers* are those of its message.

    A retry may have other arguments, and still has the key of its header. Raises
    :class:`~celery_leases.errors.KeyUnusable` if there is no key.
    """
    options = task.lease_options
    carried = (
        _carried_key(task.name, options, header)
        if header is not None and _has_begun(header, retries)
        else None
    )
    try:
        made = call_key(task.name, options, task.lease_signature, call_id, args, kwargs, headers)
    except KeyUnusable:
        if carried is None:
            raise
        return carried
    except Exception:
        raise
    except BaseException as error:
        if carried is None:
            raise _ended_by(task, error) from error
        return carried
    if carried is None or (
        carried.stored == made.stored and carried.fingerprint in (None, made.fingerprint)
    ):
        return made
    return carried


def carried_stored_key(task: Any, header: Header) -> str:
    """The stored form of the key in *header*; empty if the header has no key."""
    if not header.key:
        return header.stored
    return stored_key(task.name, header.key)


def group_of(task: Any, header: Header | None, args: Any, kwargs: Any, retries: int) -> str | None:
    """The cooldown group of a call: from its arguments, or from its header if the call has begun
    and its arguments give no group.
    """
    try:
        return call_group(task.name, task.lease_options, task.lease_signature, args, kwargs)
    except KeyUnusable:
        if header is None or not _has_begun(header, retries):
            raise
        return header.group
    except Exception:
        raise
    except BaseException as error:
        raise _ended_by(task, error) from error


def _ended_by(task: Any, error: BaseException) -> KeyUnusable:
    """The error of a call whose function for the key, the fingerprint or the group raised
    *error*, which would end the worker's process with each delivery.
    """
    return KeyUnusable(
        f"task {task.name}: lease_key, lease_fingerprint or lease_group raised "
        f"{type(error).__name__}: {text_of(error)}"
    )


def _has_begun(header: Header, retries: int) -> bool:
    return header.started or retries > 0


def _carried_key(task: str, options: LeaseOptions, header: Header) -> CallKey | None:
    """The key in a header; ``None`` if it cannot be a key of that task with these options, so that
    the arguments decide.

    Where fingerprints are compared, a header without a fingerprint is not used, because its call
    would get a result whatever its arguments are. Without ``lease_key``, the key is always the id
    of the call.
    """
    if options.key is None or (options.compares and header.fingerprint is None):
        return None
    fingerprint = header.fingerprint if options.compares else None
    if header.key.strip():
        key = CallKey(header.key, stored_key(task, header.key), fingerprint)
    elif is_short_form(header.stored):
        key = CallKey(header.stored.partition("|")[2], header.stored, fingerprint)
    else:
        return None
    return key if may_be_stored(key.stored, task, options) else None
