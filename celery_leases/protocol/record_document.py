"""The details of a record: what only decisions read, as one JSON document in one column. Pure.

Fields that have their defaults are left out; where all have, the column is NULL. A new field of
:class:`~celery_leases.protocol.records.Record` that SQL neither compares nor sorts belongs here:
one line in ``_FIELDS``.
"""

from __future__ import annotations

import binascii
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from operator import attrgetter
from typing import Any, Final

from celery_leases.protocol import history
from celery_leases.protocol.records import Attempt, Ended, Failure, Record

AT_THE_END: Final = True
"""Stands for ``failed_at`` in the document of an attempt whose own end it is, by the clock of the
database.
"""
TTL: Final = 15.0
RETENTION: Final = 7 * 86_400.0
"""The values of most tasks. They are part of the form of the documents: a document that leaves them
out means these. They do not change with ``DEFAULT_TTL``.
"""
VERSION: Final = "v1:"
_DIGEST: Final = 43
"""The length of a SHA-256 digest in base64, without its padding."""

_FAILURE: Final = frozenset(field.name for field in fields(Failure))


def failure_from(said: Any) -> Failure:
    """The failure that *said* describes, the mapping in a JSON document; an unknown field is left
    out.
    """
    known = {name: value for name, value in _mapping(said).items() if name in _FAILURE}
    return Failure(**{"type": "", "message": "", **known})


def failure_to(failure: Failure) -> dict[str, Any]:
    """What describes *failure* in a JSON document."""
    return {name: value for name, value in asdict(failure).items() if value}


def dump(record: Record, *, failed: bool = False) -> str | None:
    """The details of *record* as text; ``None`` where all of them have their defaults.

    *failed*: the moment of the last failure is that of the write, which the database adds as
    ``finished_at``.
    """
    values = _values(record)
    if values == _DEFAULTS and record.fingerprint is not None and _is_first(record, failed=failed):
        # The document of most new rows, in a fraction of the time.
        return f'{{"print":{_quoted(_packed(record.fingerprint))}}}'
    named = zip(_SHORT, _DEFAULTS, values, strict=True)
    found: dict[str, Any] = {short: value for short, default, value in named if value != default}
    if record.fingerprint is not None:
        found["print"] = _packed(record.fingerprint)
    if record.previous is not None:
        found["before"] = _before(record.previous)
    # What stays as it is from write to write comes last: PostgreSQL logs of an update what differs.
    if record.history:
        found["past"] = history.dump(record.history)
    if record.traceback is not None:
        found["trace"] = record.traceback
    if failed:
        found["failed_at"] = AT_THE_END
    return _encode(found) if found else None


def _is_first(record: Record, *, failed: bool) -> bool:
    return not (failed or record.previous or record.history or record.traceback is not None)


def load(text: str | None, finished_at: int | None) -> tuple[dict[str, Any], str | None]:
    """The fields of a record by their names, as :func:`dump` was given them, and what of them
    cannot be read.

    Raises an error of any kind for a document that cannot be read. What decides nothing (digests,
    the attempts before, the traceback) is left out instead, and named.
    """
    document = _mapping(json.loads(text)) if text else {}
    spared, found = None, dict(zip(_NAMES, _DEFAULTS, strict=True))
    found |= {"fingerprint": None, "previous": None, "history": (), "traceback": None}
    for short, value in document.items():
        name, read = _READ.get(short, (None, None))
        if name is None or read is None:
            continue  # of a later release
        try:
            found[name] = read(value)
        except Exception:
            if name not in _SPARED:
                raise
            spared = short
    if document.get("failed_at") is AT_THE_END:
        found["failed_at"] = finished_at
    return found, spared


def generation_in(text: str) -> int | None:
    """The generation in a document that :func:`load` does not take for another field; ``None``
    where it is lost too.
    """
    try:
        return _integer(_mapping(json.loads(text)).get("generation", 0))
    except (TypeError, ValueError, RecursionError):
        return None


def is_readable(short: str, value: Any) -> bool:
    """Whether :func:`load` takes *value* for the field of that name in a document."""
    try:
        _READ[short][1](value)
    except Exception:  # noqa: BLE001 - a name that is unknown, or whatever a reader raises
        return False
    return True


def _before(previous: Attempt) -> dict[str, Any]:
    said: dict[str, Any] = {"ended": previous.ended}
    if previous.error is not None:
        said["error"] = failure_to(previous.error)
    if previous.host is not None:
        said["host"] = previous.host
    return said


def _previous(said: Any) -> Attempt:
    found = _mapping(said)
    error = found.get("error")
    return Attempt(
        Ended(found["ended"]), failure_from(error) if error is not None else None, found.get("host")
    )


def _packed(fingerprint: str) -> str:
    """*fingerprint* in fewer characters; one of a form that is not known as it is."""
    if fingerprint[:3] != VERSION or len(fingerprint) != 67:
        return fingerprint
    try:
        digest = binascii.unhexlify(fingerprint[3:])
    except ValueError:
        return fingerprint
    packed = binascii.b2a_base64(digest, newline=False)[:_DIGEST].decode()
    return packed if digest.hex() == fingerprint[3:] else fingerprint


def _unpacked(said: Any) -> str:
    if not isinstance(said, str):
        raise TypeError(f"{type(said).__name__}, not a text")
    if len(said) != _DIGEST or ":" in said:
        return said
    return VERSION + binascii.a2b_base64(f"{said}=").hex()


def _mapping(found: Any) -> Mapping[str, Any]:
    if not isinstance(found, dict):
        raise TypeError(f"{type(found).__name__}, not an object")
    return found


def _integer(found: Any) -> int:
    if type(found) is not int:
        raise TypeError(f"{type(found).__name__}, not an integer")
    return found


def _moment(found: Any) -> int | None:
    return None if found is AT_THE_END else _integer(found)


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
    "digests": ("digests", None, _mapping),
    "finished": ("finished_calls", (), _texts),
    "results": ("finished_results", None, _mapping),
    "unrun": ("unrun", False, _truth),
}
"""By its name in the document: the field of a record, its default, and how its value is read."""
_SHORT: Final = tuple(_FIELDS)
_NAMES: Final = tuple(name for name, _, _ in _FIELDS.values())
_DEFAULTS: Final = tuple(default for _, default, _ in _FIELDS.values())
_values: Final = attrgetter(*_NAMES)
_READ: Final[Mapping[str, tuple[str, Callable[[Any], Any]]]] = {
    **{short: (name, read) for short, (name, _, read) in _FIELDS.items()},
    "print": ("fingerprint", _unpacked),
    "before": ("previous", _previous),
    "past": ("history", history.load),
    "trace": ("traceback", _text),
}
_SPARED: Final = {"digests", "previous", "unrun", "history", "traceback"}
_quoted: Final = json.encoder.encode_basestring_ascii
_encode: Final = json.JSONEncoder(separators=(",", ":"), default=dict).encode
