"""Converts rows of the records table to values of the protocol and back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from celery_leases.protocol.records import Ended, Outcome, Record, State
from celery_leases.stores.sql import table_versions
from celery_leases.stores.sql.compiled_statements import Row
from celery_leases.stores.sql.values import (
    MICROSECONDS,
    SHORT_TEXT,
    Reading,
    failure_in,
    microseconds,
    progress_in,
    written,
)

__all__ = [
    "MICROSECONDS",
    "failure_in",
    "group_of",
    "microseconds",
    "of_attempt",
    "of_guard",
    "to_record",
    "without_texts",
    "written",
]

RESULT_REFUSED: Final = "result_refused"
"""Why a result is missing: the database has refused its text."""
TEXT_REFUSED: Final = "(the database has refused the text of the error)"

_INTEGERS: Final = ("fence", "attempt", "crashes", "created_at", "started_at")
_OR_NULL: Final = (
    "lease_until",
    "retry_at",
    "finished_at",
    "expires_at",
    "publish_at",
    "published_at",
)


def group_of(error: str | None) -> str | None:
    """The cooldown group of a stored error, if it has one."""
    try:
        failure = failure_in(error) if error else None
    except Exception:  # noqa: BLE001 - an unreadable error has no known group
        return None
    return failure.group if failure is not None else None


def of_guard(record: Record) -> dict[str, Any]:
    """The condition and parameters for the row of a running attempt, and its ttl."""
    return of_attempt(record) | {"ttl": microseconds(record.lease_ttl)}


def of_attempt(record: Record) -> dict[str, Any]:
    """The condition for the row of a running attempt."""
    return {"for_key": record.stored_key, "for_fence": record.fence, "for_owner": record.owner}


def without_texts(outcome: Outcome) -> Outcome:
    """*outcome* without its texts, one of which the database has refused; state, counts and times
    stay.
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


def to_record(found: Row, *, lenient: bool = False) -> Record:
    """A record from the row *found*, which has ``now`` and all columns of the table, in any layout.

    Raises :class:`RecordUnreadable` for a value that cannot be read, unless its loss changes no
    decision. *lenient*, for operators: such a value counts as absent, an unknown state as
    ``uncertain``, and ``unreadable`` says why.
    """
    reading = Reading(found, lenient)
    reading.integers(_INTEGERS, _OR_NULL)
    more = table_versions.details_in(reading)
    row = reading.row
    state = reading.of("state", State) or State.UNCERTAIN
    return Record(
        stored_key=row["stored_key"],
        task=row["task"],
        key=row["key"],
        state=state,
        fence=row["fence"],
        owner=row["owner"],
        call_id=row["call_id"],
        holder=row["holder"],
        attempt=row["attempt"],
        crashes=row["crashes"],
        created_at=row["created_at"],
        started_at=row["started_at"],
        lease_store=row["lease_store"],
        now=int(row["now"]),
        lease_until=row["lease_until"],
        retry_at=row["retry_at"],
        result=row["result"],
        reason=row["reason"],
        ended=reading.of("ended", Ended)
        if row["ended"]
        else Ended.RETURNED
        if state is State.DONE
        else None,
        failure=reading.of("error", failure_in, needed=False),
        finished_at=row["finished_at"],
        expires_at=row["expires_at"] if state is not State.RUNNING else None,
        resumes=bool(row["resumes"]),
        progress=reading.of("progress", progress_in),
        message=row["message"],
        publish_at=row["publish_at"],
        published_at=row["published_at"],
        **more,
        unreadable=reading.trouble,
    )
