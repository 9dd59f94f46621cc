"""Converts rows of the records table to records, and values of the protocol to parameters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from celery_leases.record import Ended, Outcome, Record, State
from celery_leases.stores.sql import record_columns
from celery_leases.stores.sql.values import (
    SHORT_TEXT,
    ColumnReader,
    Row,
    failure_in,
    microseconds,
    progress_in,
    written,
)

__all__ = [
    "attempt_parameters",
    "failure_in",
    "group_of",
    "guard_parameters",
    "microseconds",
    "to_record",
    "without_texts",
    "written",
]

RESULT_REFUSED: Final = "result_refused"
"""The reason of an outcome whose result the database has refused."""
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
    """The cooldown group in the stored *error*; ``None`` without one."""
    try:
        failure = failure_in(error) if error else None
    except Exception:  # noqa: BLE001 - the group of an unreadable error is not known
        return None
    return failure.group if failure is not None else None


def guard_parameters(record: Record) -> dict[str, Any]:
    """The parameters that select the row of a running attempt, and its ttl."""
    return attempt_parameters(record) | {"ttl": microseconds(record.lease_ttl)}


def attempt_parameters(record: Record) -> dict[str, Any]:
    """The parameters that select the row of a running attempt."""
    return {"for_key": record.stored_key, "for_fence": record.fence, "for_owner": record.owner}


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


def to_record(found: Row, *, lenient: bool = False) -> Record:
    """The record in the row *found*, which has all columns of the table, and ``now``.

    Raises :class:`RecordUnreadable` for an unreadable value, unless no decision depends on it.
    *lenient*, for operators: an unreadable value counts as absent, an unknown state as
    ``uncertain``, and ``unreadable`` says why.
    """
    reader = ColumnReader(found, lenient)
    reader.integers(_INTEGERS, _OR_NULL)
    more = record_columns.details_in(reader)
    row = reader.row
    state = reader.of("state", State) or State.UNCERTAIN
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
        ended=reader.of("ended", Ended)
        if row["ended"]
        else Ended.RETURNED
        if state is State.DONE
        else None,
        failure=reader.of("error", failure_in, needed=False),
        finished_at=row["finished_at"],
        expires_at=row["expires_at"] if state is not State.RUNNING else None,
        resumes=bool(row["resumes"]),
        progress=reader.of("progress", progress_in),
        message=row["message"],
        publish_at=row["publish_at"],
        published_at=row["published_at"],
        **more,
        unreadable=reader.problem,
    )
