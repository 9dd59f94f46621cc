"""The rows of the records table: a record as the columns that each statement writes, and back.

Fields that SQL neither compares nor sorts are in one column as a JSON document. Those with their
default are left out; if all have it, the column is NULL. Which field is where says
:class:`~celery_leases.record.Record`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from operator import attrgetter
from types import NoneType
from typing import Any, Final

from celery_leases.decide import attempt_history
from celery_leases.decide.repairs import settled
from celery_leases.errors import RecordUnreadable
from celery_leases.keys import FINGERPRINT_LENGTH, fingerprint_of
from celery_leases.record import FIELDS, SETTLED, Attempt, Ended, Failure, Outcome, Record, State
from celery_leases.results import decode, unreadable
from celery_leases.text.cleaning import storable
from celery_leases.text.notices import logger

Row = Mapping[Any, Any]
"""A row of a result: values by column name."""
MICROSECONDS: Final = 1e6
"""The stored times and spans are integers: microseconds."""
DETAILS: Final = "details"
"""The column of the document."""
SAME_AS_FINISHED_AT: Final = True
"""Stands for ``failed_at`` if the failure is the end of this attempt: only the database knows that
time when it writes ``finished_at``.
"""
EXPIRY_STEPS: Final = 100
"""``expires_at`` is not written if the record would expire at most this fraction (1/100) of its
retention earlier.
"""
FIRST_DERIVED: Final = 2**30
"""The first of the generations that are derived from a fence. Counted generations are lower."""
SHORT_TEXT: Final = 255
RESULT_REFUSED: Final = "result_refused"
"""The reason of an outcome whose result the database has refused."""
TEXT_REFUSED: Final = "(the database has refused the text of the error)"

# -- the fields, from the table in Record ----------------------------------------------------------

_COLUMNS: Final = {
    name: each.metadata.get("column") or name
    for name, each in FIELDS.items()
    if "details" not in each.metadata and name not in ("now", "unreadable")
}
"""The column of each field that has one."""
_IN_DETAILS: Final = {
    each.metadata["details"]: each for each in FIELDS.values() if "details" in each.metadata
}
"""The fields in the document, by their names there."""
_DERIVED: Final = ("args", "print")
_SHORT: Final = tuple(short for short in _IN_DETAILS if short not in _DERIVED)
_NAMES: Final = tuple(_IN_DETAILS[short].name for short in _SHORT)
_DEFAULTS: Final = tuple(_IN_DETAILS[short].default for short in _SHORT)
_details_of: Final = attrgetter(*_NAMES)
_columns_of: Final = attrgetter(*_COLUMNS)

WHEN_NEW: Final = (
    *("stored_key", "task", "key", "state", "owner", "call_id", "holder", "attempt", "message"),
    *("lease_until", "lease_store", "expires_at", DETAILS),
)
"""The columns that an insert sets, besides the time of the insert. The others are NULL or 0."""
_NOT_CLAIMED: Final = (*("stored_key", "key", "created_at", "resumes", "publish_at", "progress"),)
WHEN_CLAIMED: Final = (*(c for c in _COLUMNS.values() if c not in _NOT_CLAIMED), DETAILS)
"""The columns that a claim changes; see :func:`celery_leases.decide.claim.claimed`."""
WHEN_SETTLED: Final = tuple(_COLUMNS[name] for name in SETTLED if name in _COLUMNS)
"""The columns that an outcome sets to its own values, besides the document. Two outcomes differ in
one of them, or in the document.
"""
COMPARED: Final = (
    "fence",
    "state",
    "owner",
    "lease_until",
    "ended",
    "resumes",
    "crashes",
    "publish_at",
)
"""The columns that a compare-and-set compares: a row is replaced only if they are unchanged.

A claim, an operator, a renewal and an outcome each change one of the first four columns. The others
change when a call is given up, when an attempt saves its progress, and when a message becomes due.
"""
_unless_ended: Final = attrgetter("attempt", "crashes", "resumes")
_counts: Final = attrgetter(*(name for name in SETTLED if name not in _COLUMNS))
"""The fields of the document that an outcome sets, of an outcome or a record."""


def microseconds(seconds: float) -> int:
    """The stored form of a span of *seconds*."""
    return round(seconds * MICROSECONDS)


def column_values(record: Record) -> dict[str, Any]:
    """All columns of *record*.

    A running row has the ``expires_at`` that a success would write: its retention counts from the
    claim. A success then changes no indexed column, so PostgreSQL need not write the indexes.
    """
    values = dict(zip(_COLUMNS.values(), _columns_of(record), strict=True))
    if record.state is State.RUNNING and record.retention:
        values["expires_at"] = record.started_at + microseconds(record.retention)
    return values | {
        "resumes": int(record.resumes),
        "ended": _ended(record.state, record.ended),
        "error": written(record.failure),
        DETAILS: details_of(record),
    }


def insert_parameters(record: Record) -> dict[str, Any]:
    """The parameters of the insert of *record*, which is running, and whose times are relative to
    the insert.

    Builds only the columns of the insert, because each first run needs them.
    """
    keep = record.retention
    return {
        "new_stored_key": record.stored_key,
        "new_task": record.task,
        "new_key": record.key,
        "new_state": record.state,
        "new_owner": record.owner,
        "new_call_id": record.call_id,
        "new_holder": record.holder,
        "new_attempt": record.attempt,
        "new_message": record.message,
        "new_lease_until": record.lease_until,
        "new_lease_store": record.lease_store,
        "new_expires_at": record.started_at + round(keep * MICROSECONDS) if keep else None,
        f"new_{DETAILS}": details_of(record),
    }


def success_parameters(record: Record, outcome: Outcome) -> dict[str, Any] | None:
    """The parameters of the statement that writes an *outcome* which changes nothing but ``state``,
    ``result`` and the times of the end; ``None`` for any other outcome.
    """
    if not (
        outcome.ended is Ended.RETURNED  # which is NULL in a done row, as the claim wrote it
        and outcome.retention is not None
        and not outcome.retry_after
        and _unless_ended(outcome) == _unless_ended(record)
        and outcome.reason is None
        and outcome.failure is None
        and outcome.progress is None
        and _keeps_details(record, outcome)
    ):
        return None
    keep = int(outcome.retention * MICROSECONDS)
    return {
        "for_key": record.stored_key,
        "for_fence": record.fence,
        "for_owner": record.owner,
        "new_state": outcome.state,
        "new_result": outcome.result,
        "keep": keep,
        "keep_at_least": keep - keep // EXPIRY_STEPS,
    }


def settle_parameters(record: Record, outcome: Outcome) -> dict[str, Any]:
    """The parameters of the statement that writes *outcome* for the attempt on *record*. The
    document is left out if it does not change.
    """
    wait, keep = outcome.retry_after or 0.0, outcome.retention
    expiry = int((keep + wait) * MICROSECONDS) if keep is not None else None
    columns = {_COLUMNS[name]: getattr(outcome, name) for name in SETTLED if name in _COLUMNS}
    columns |= {
        "ended": _ended(outcome.state, outcome.ended),
        "resumes": int(outcome.resumes),
        "reason": storable(outcome.reason, SHORT_TEXT) if outcome.reason else None,
        "error": written(outcome.failure),
        "progress": outcome.progress,
    }
    if not _keeps_details(record, outcome):
        columns[DETAILS] = details_of(settled(record, outcome, 0), failed=outcome.failed)
    return attempt_parameters(record) | {
        **{f"new_{name}": value for name, value in columns.items()},
        "wait": int(wait * MICROSECONDS) if wait else None,
        "keep": expiry,
        "keep_at_least": expiry - expiry // EXPIRY_STEPS if expiry is not None else None,
    }


def attempt_parameters(record: Record) -> dict[str, Any]:
    """The parameters that select the row of a running attempt."""
    return {"for_key": record.stored_key, "for_fence": record.fence, "for_owner": record.owner}


def guard_parameters(record: Record) -> dict[str, Any]:
    """The same, and its ttl."""
    return attempt_parameters(record) | {"ttl": microseconds(record.lease_ttl)}


def without_texts(outcome: Outcome) -> Outcome:
    """*outcome* without its texts, because the database has refused one of them. State, counts and
    times stay.
    """
    failure = outcome.failure
    if failure is not None:
        failure = replace(failure, type=failure.type[:SHORT_TEXT], message=TEXT_REFUSED, group=None)
    return replace(
        outcome,
        result=None,
        reason=RESULT_REFUSED if outcome.result is not None else None,
        failure=failure,
        progress=None,
        finished=dict.fromkeys(outcome.finished) if outcome.finished is not None else None,
    )


def _ended(state: State, ended: Ended | None) -> Ended | None:
    """The stored form of ``ended``: NULL for the usual end of a done row."""
    return None if state is State.DONE and ended is Ended.RETURNED else ended


def _keeps_details(record: Record, outcome: Outcome) -> bool:
    """Whether the outcome does not change the document that the claim wrote. A first success does
    not.
    """
    return _counts(outcome) == _counts(record) and outcome.finished is None and not outcome.failed


# -- reading ---------------------------------------------------------------------------------------


def to_record(found: Row, *, lenient: bool = False) -> Record:
    """The record in the row *found*, which has all columns of the table, and ``now``.

    Raises :class:`RecordUnreadable` for an unreadable value, unless no decision depends on it.
    *lenient*, for operators: an unreadable value counts as absent, an unknown state as
    ``uncertain``, and ``unreadable`` says why.
    """
    reader = _Reader(found, lenient)
    reader.check_integers()
    values = reader.details()
    row = reader.row
    values |= {name: row[column] for name, column in _COLUMNS.items()}
    state = reader.of("state", State) or State.UNCERTAIN
    usual = Ended.RETURNED if state is State.DONE else None
    values |= {
        "state": state,
        "ended": reader.of("ended", Ended) if row["ended"] else usual,
        "failure": reader.of("error", failure_in, needed=False),
        "expires_at": row["expires_at"] if state is not State.RUNNING else None,
        "resumes": bool(row["resumes"]),
        "progress": reader.of("progress", _progress),
        "now": int(row["now"]),
    }
    return Record(**values, unreadable=reader.problem)


@dataclass
class _Reader:
    """Reads columns of *row* whose values may be unreadable, for example because somebody
    changed them by hand.
    """

    row: Row
    lenient: bool
    problem: str | None = field(default=None, init=False)

    def check_integers(self) -> None:
        """Check the columns of integers, because SQLite stores text in them too."""
        for name, kinds in _INTEGERS.items():
            if type(self.row[name]) not in kinds:
                self._refuse(name, ValueError("not an integer"))
                self.row = {**self.row, name: None if NoneType in kinds else 0}

    def details(self) -> dict[str, Any]:
        """The fields in the document."""
        row = self.row
        values, _ = read_details(None, None)
        found = self.of(DETAILS, lambda text: read_details(text, row["finished_at"]))
        if found is None:
            if row[DETAILS] is not None:
                generation = _generation_in(row[DETAILS])
                values["generation"] = _derived(row) if generation is None else generation
            return values
        if found[1] is not None:
            self._warn(DETAILS, ValueError(found[1]))
        values.update(found[0])
        return values

    def of(self, column: str, convert: Callable[[Any], Any], *, needed: bool = True) -> Any:
        """The value of *column*, converted by *convert*. ``None`` for NULL, and for an unreadable
        value if it is not *needed*.
        """
        value = self.row[column]
        if value is None:
            return None
        try:
            return convert(value)
        except Exception as error:  # noqa: BLE001 - a decoder may raise anything
            if needed:
                self._refuse(column, error)
            else:
                self._warn(column, error)
            return None

    def _warn(self, column: str, error: Exception) -> None:
        """Log that an unreadable column counts as empty."""
        _warn(_problem(self.row, column, error))

    def _refuse(self, column: str, error: Exception) -> None:
        problem = _problem(self.row, column, error)
        if not self.lenient:
            raise RecordUnreadable(problem, False, self.row["key"], column) from None
        self.problem = self.problem or problem


def _problem(row: Row, column: str, error: Exception) -> str:
    return unreadable(row["key"], row["task"], column, row[column], error)


@lru_cache(1000)
def _warn(problem: str) -> None:
    logger.warning("%s; it counts as empty", problem, code="column-unreadable")


def _progress(text: str) -> str:
    """*text*, after checking that it is saved progress which the body can read."""
    saved = _mapping(json.loads(text))
    decode(saved.get("value"))
    _mapping(saved.get("positions") or {})
    return text


# -- failures --------------------------------------------------------------------------------------


def written(failure: Failure | None) -> str | None:
    """The stored form of a failure: JSON."""
    return _encode(_failure_to(failure)) if failure is not None else None


def failure_in(text: str) -> Failure:
    """The failure whose stored form is *text*; unknown fields are ignored."""
    return _failure_from(json.loads(text))


def group_of(error: str | None) -> str | None:
    """The cooldown group in the stored *error*; ``None`` without one."""
    try:
        return failure_in(error).group if error else None
    except Exception:  # noqa: BLE001 - the group of an unreadable error is not known
        return None


def _failure_to(failure: Failure) -> dict[str, Any]:
    return {name: value for name, value in asdict(failure).items() if value}


def _failure_from(value: Any) -> Failure:
    known = {name: value for name, value in _mapping(value).items() if name in _FAILURE}
    return Failure(**{"type": "", "message": "", **known})


# -- the document ----------------------------------------------------------------------------------


def details_of(record: Record, *, failed: bool = False) -> str | None:
    """The document of *record*; ``None`` if all fields have their defaults.

    *failed*: the last failure is the outcome that is being written, so ``failed_at`` is
    :data:`SAME_AS_FINISHED_AT`.
    """
    values, digests, fingerprint = _details_of(record), record.digests, record.fingerprint
    length = len(fingerprint) if fingerprint is not None else 0
    follows = length == (0 if digests is None else FINGERPRINT_LENGTH)
    found: dict[str, Any] = {}
    if values != _DEFAULTS:
        for short, default, value in zip(_SHORT, _DEFAULTS, values, strict=True):
            if value != default:
                write = _WRITERS.get(_IN_DETAILS[short].type)
                found[short] = write(value) if write is not None else value
    elif digests is not None and follows and not failed:
        # The usual document, which each first run writes.
        pairs = ",".join([f"{_quoted(name)}:{_quoted(digests[name])}" for name in digests])
        return f'{{"args":{{{pairs}}}}}'
    if failed:
        found["failed_at"] = SAME_AS_FINISHED_AT
    # Fields that rarely change come last: PostgreSQL logs the part of an updated row that differs.
    if digests is not None:
        found["args"] = digests
    if not follows:  # from the digests
        found["print"] = fingerprint
    return _encode(found) if found else None


def read_details(text: str | None, finished_at: int | None) -> tuple[dict[str, Any], str | None]:
    """The fields of a record by their names, and the name in the document of a field that cannot be
    read.

    Raises any exception for a document that cannot be read. A field that no decision needs (such as
    the history or the traceback) is left out and named instead.
    """
    document = _mapping(json.loads(text)) if text else {}
    found: dict[str, Any] = {each.name: each.default for each in _IN_DETAILS.values()}
    not_needed = None
    for short, value in document.items():
        each = _IN_DETAILS.get(short)
        if each is None:
            continue  # a field of a later release
        try:
            if short == "failed_at" and value is SAME_AS_FINISHED_AT:
                found[each.name] = finished_at
            else:
                found[each.name] = _READERS[each.type](value)
        except Exception:
            if each.metadata["needed"]:
                raise
            not_needed = short
    if found["digests"] is not None and "print" not in document:
        found["fingerprint"] = fingerprint_of(found["digests"])
    return found, not_needed


def _generation_in(text: str) -> int | None:
    """The generation in a document that cannot be read; ``None`` if it cannot be read either."""
    try:
        generation: int = _READERS["int"](_mapping(json.loads(text)).get("generation", 0))
    except (TypeError, ValueError, RecursionError):
        return None
    return generation


def _derived(row: Row) -> int:
    """A generation for a row whose own cannot be read. It is derived from the fence, or from the
    time if the fence cannot be read either.

    It is higher than every counted generation, and is repeated only by fences that are a multiple
    of nine minutes apart. So effects of an earlier generation are not found after the row is
    repaired.
    """
    return FIRST_DERIVED + int(row["fence"] or row["now"]) % (FIRST_DERIVED // 2)


def _previous_to(previous: Attempt) -> dict[str, Any]:
    written: dict[str, Any] = {"ended": previous.ended}
    if previous.error is not None:
        written["error"] = _failure_to(previous.error)
    if previous.host is not None:
        written["host"] = previous.host
    return written


def _previous_from(value: Any) -> Attempt:
    found = _mapping(value)
    error = found.get("error")
    failure = _failure_from(error) if error is not None else None
    return Attempt(Ended(found["ended"]), failure, found.get("host"))


def _is(*kinds: type) -> Callable[[Any], Any]:
    """A reader of values of these types."""

    def read(value: Any) -> Any:
        if type(value) not in kinds:
            raise TypeError(f"{type(value).__name__}, not {kinds[0].__name__}")
        return value

    return read


def _mapping(found: Any) -> Mapping[str, Any]:
    if not isinstance(found, dict):
        raise TypeError(f"{type(found).__name__}, not an object")
    return found


def _texts_by_name(found: Any) -> Mapping[str, str]:
    "".join(_mapping(found).values())  # raises TypeError for a value that is no text
    return found  # type: ignore[no-any-return]


def _counts_by_name(found: Any) -> Mapping[str, int]:
    if any(type(count) is not int for count in _mapping(found).values()):
        raise TypeError("not an object of integers")
    return found  # type: ignore[no-any-return]


def _texts(found: Any) -> tuple[str, ...]:
    if not isinstance(found, list):
        raise TypeError(f"{type(found).__name__}, not a list")
    "".join(found)
    return tuple(found)


_READERS: Final[Mapping[Any, Callable[[Any], Any]]] = {
    "int": _is(int),
    "int | None": _is(int),
    "float": _is(float, int),
    "float | None": _is(float, int, NoneType),
    "bool": _is(bool),
    "str | None": _is(str, NoneType),
    "tuple[str, ...]": _texts,
    "Mapping[str, str] | None": _texts_by_name,
    "Mapping[str, str | None] | None": _mapping,
    "Mapping[str, int] | None": _counts_by_name,
    "Attempt | None": _previous_from,
    "tuple[PastAttempt, ...]": attempt_history.load,
}
"""What reads a field of the document, by its type."""
_WRITERS: Final[Mapping[Any, Callable[[Any], Any]]] = {
    "Attempt | None": _previous_to,
    "tuple[PastAttempt, ...]": attempt_history.dump,
}
_INTEGERS: Final = {
    column: (int, NoneType) if FIELDS[name].type == "int | None" else (int,)
    for name, column in _COLUMNS.items()
    if FIELDS[name].type in ("int", "int | None")
}
_FAILURE: Final = frozenset(each.name for each in fields(Failure))
_quoted: Final = json.encoder.encode_basestring_ascii
_encode: Final = json.JSONEncoder(separators=(",", ":"), default=dict).encode
