"""The JSON document of a record: the fields that SQL neither compares nor sorts, in one column.
Pure.

Fields with their default are left out; if all have it, the column is NULL. A new field of
:class:`~celery_leases.record.Record` needs one line in ``_FIELDS``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from operator import attrgetter
from typing import Any, Final

from celery_leases.decide import attempt_history
from celery_leases.keys import fingerprint_of, is_fingerprint
from celery_leases.record import Attempt, Ended, Failure, Record

SAME_AS_FINISHED_AT: Final = True
"""Stands for ``failed_at`` if the failure is the end of this attempt: only the database knows that
time when it writes ``finished_at``.
"""
TTL: Final = 15.0
RETENTION: Final = 7 * 86_400.0
"""A document without these fields has these values. They are part of the stored form, and do not
change when the defaults of the options do.
"""
_FAILURE: Final = frozenset(field.name for field in fields(Failure))


def failure_from(value: Any) -> Failure:
    """The failure that :func:`failure_to` has written; unknown fields are ignored."""
    known = {name: value for name, value in _mapping(value).items() if name in _FAILURE}
    return Failure(**{"type": "", "message": "", **known})


def failure_to(failure: Failure) -> dict[str, Any]:
    """*failure* for a JSON document; empty fields are left out."""
    return {name: value for name, value in asdict(failure).items() if value}


def dump(record: Record, *, failed: bool = False) -> str | None:
    """The document of *record*; ``None`` if all fields have their defaults.

    *failed*: the last failure is the outcome that is being written, so ``failed_at`` is
    :data:`SAME_AS_FINISHED_AT`.
    """
    values, digests = _values(record), record.digests
    found: dict[str, Any] = {}
    if values != _DEFAULTS:
        named = zip(_SHORT, _DEFAULTS, values, strict=True)
        found = {short: value for short, default, value in named if value != default}
    fingerprint = record.fingerprint
    if digests is None:
        follows = fingerprint is None
    else:
        found["args"], follows = digests, is_fingerprint(fingerprint)
    if not follows:  # from the digests
        found["print"] = fingerprint
    if record.previous is not None:
        found["before"] = _previous_to(record.previous)
    # Fields that rarely change come last: PostgreSQL logs the part of an updated row that differs.
    if record.history:
        found["past"] = attempt_history.dump(record.history)
    if record.traceback is not None:
        found["trace"] = record.traceback
    if failed:
        found["failed_at"] = SAME_AS_FINISHED_AT
    if found.keys() == _ONLY_DIGESTS:
        # The usual document, which each first run writes.
        digests = found["args"]
        pairs = ",".join([f"{_quoted(name)}:{_quoted(digests[name])}" for name in digests])
        return f'{{"args":{{{pairs}}}}}'
    return _encode(found) if found else None


def load(text: str | None, finished_at: int | None) -> tuple[dict[str, Any], str | None]:
    """The fields of a record by their names, and the name in the document of a field that cannot be
    read.

    Raises any exception for a document that cannot be read. A field that no decision needs (such as
    the history or the traceback) is left out and named instead.
    """
    document = _mapping(json.loads(text)) if text else {}
    unreadable, found = None, dict(zip(_NAMES, _DEFAULTS, strict=True))
    found |= {
        "digests": None,
        "fingerprint": None,
        "previous": None,
        "history": (),
        "traceback": None,
    }
    for short, value in document.items():
        name, read = _READ.get(short, (None, None))
        if name is None or read is None:
            continue  # a field of a later release
        try:
            found[name] = read(value)
        except Exception:
            if name not in _NOT_NEEDED:
                raise
            unreadable = short
    if found["digests"] is not None and "print" not in document:
        found["fingerprint"] = fingerprint_of(found["digests"])
    if document.get("failed_at") is SAME_AS_FINISHED_AT:
        found["failed_at"] = finished_at
    return found, unreadable


def generation_in(text: str) -> int | None:
    """The generation in a document that :func:`load` cannot read; ``None`` if it cannot be read
    either.
    """
    try:
        return _integer(_mapping(json.loads(text)).get("generation", 0))
    except (TypeError, ValueError, RecursionError):
        return None


def _previous_to(previous: Attempt) -> dict[str, Any]:
    written: dict[str, Any] = {"ended": previous.ended}
    if previous.error is not None:
        written["error"] = failure_to(previous.error)
    if previous.host is not None:
        written["host"] = previous.host
    return written


def _previous_from(value: Any) -> Attempt:
    found = _mapping(value)
    error = found.get("error")
    return Attempt(
        Ended(found["ended"]), failure_from(error) if error is not None else None, found.get("host")
    )


def _mapping(found: Any) -> Mapping[str, Any]:
    if not isinstance(found, dict):
        raise TypeError(f"{type(found).__name__}, not an object")
    return found


def _integer(found: Any) -> int:
    if type(found) is not int:
        raise TypeError(f"{type(found).__name__}, not an integer")
    return found


def _moment(found: Any) -> int | None:
    return None if found is SAME_AS_FINISHED_AT else _integer(found)


def _seconds(found: Any) -> float:
    if type(found) not in (int, float):
        raise TypeError(f"{type(found).__name__}, not a number")
    return float(found)


def _span(found: Any) -> float | None:
    return None if found is None else _seconds(found)


def _truth(found: Any) -> bool:
    if not isinstance(found, bool):
        raise TypeError(f"{type(found).__name__}, not true or false")
    return found


def _text(found: Any) -> str:
    if not isinstance(found, str):
        raise TypeError(f"{type(found).__name__}, not a text")
    return found


def _text_or_none(found: Any) -> str | None:
    return None if found is None else _text(found)


def _digests(found: Any) -> dict[str, str]:
    digests: dict[str, str] = found
    "".join(_mapping(found).values())  # raises TypeError for a value that is no text
    return digests


def _texts(found: Any) -> tuple[str, ...]:
    if not isinstance(found, list):
        raise TypeError(f"{type(found).__name__}, not a list")
    return tuple(_text(each) for each in found)


_FIELDS: Final[Mapping[str, tuple[str, Any, Callable[[Any], Any]]]] = {
    "retries": ("retries", 0, _integer),
    "generation": ("generation", 0, _integer),
    "failures": ("failures", 0, _integer),
    "quick": ("quick_retries", 0, _integer),
    "cooldowns": ("cooldowns", 0, _integer),
    "failed_at": ("failed_at", None, _moment),
    "crashed_at": ("crashed_at", None, _integer),
    "crashed_call": ("crashed_call", None, _text),
    "ttl": ("lease_ttl", TTL, _seconds),
    "keep": ("retention", RETENTION, _span),
    "finished": ("finished_calls", (), _texts),
    "results": ("finished_results", None, _mapping),
    "unrun": ("unrun", False, _truth),
}
"""By the name in the document: the field of a record, its default, and the reader of its value."""
_SHORT: Final = tuple(_FIELDS)
_NAMES: Final = tuple(name for name, _, _ in _FIELDS.values())
_DEFAULTS: Final = tuple(default for _, default, _ in _FIELDS.values())
_values: Final = attrgetter(*_NAMES)
_READ: Final[Mapping[str, tuple[str, Callable[[Any], Any]]]] = {
    **{short: (name, read) for short, (name, _, read) in _FIELDS.items()},
    "args": ("digests", _digests),
    "print": ("fingerprint", _text_or_none),
    "before": ("previous", _previous_from),
    "past": ("history", attempt_history.load),
    "trace": ("traceback", _text),
}
_NOT_NEEDED: Final = {"previous", "unrun", "history", "traceback"}
"""Fields without which every decision can still be made."""
_ONLY_DIGESTS: Final = {"args"}
_quoted: Final = json.encoder.encode_basestring_ascii
_encode: Final = json.JSONEncoder(separators=(",", ":"), default=dict).encode
