"""The columns of the records table: the fields of a record in them, and the columns that each write
changes.

One column has the JSON document of the fields that only decisions read; see
:mod:`celery_leases.stores.sql.record_document`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from celery_leases.decide.repairs import settled
from celery_leases.record import Ended, Outcome, Record, State
from celery_leases.stores.sql import record_document
from celery_leases.stores.sql.values import MICROSECONDS, ColumnReader, microseconds, short, written

DOCUMENT: Final = "details"
"""The document's column."""

EXPIRY_STEPS: Final = 100
"""``expires_at`` is not written if the record would expire at most this fraction (1/100) of its
retention earlier.
"""
FIRST_DERIVED: Final = 2**30
"""The first of the generations that are derived from a fence. Counted generations are lower."""

INSERTED: Final = (
    "stored_key",
    "task",
    "key",
    "state",
    "owner",
    "call_id",
    "holder",
    "attempt",
    "message",
    "lease_until",
    "lease_store",
    "expires_at",
    DOCUMENT,
)
"""The columns that an insert sets, besides the time of the insert. The others are NULL or 0."""
SWAPPED: Final = (
    "task",
    "state",
    "fence",
    "owner",
    "call_id",
    "holder",
    "attempt",
    "crashes",
    "lease_until",
    "retry_at",
    "result",
    "reason",
    "ended",
    "error",
    "message",
    "started_at",
    "finished_at",
    "expires_at",
    "lease_store",
    DOCUMENT,
)
"""The columns that a claim changes; see :func:`celery_leases.decide.claim.claimed`."""
SETTLED_PLAIN: Final = (
    "state",
    "ended",
    "attempt",
    "crashes",
    "resumes",
    "result",
    "reason",
    "error",
)
SETTLED: Final = (*SETTLED_PLAIN, DOCUMENT)
"""The columns that an outcome sets to its own values. Two outcomes differ in one of them."""


def column_values(record: Record) -> dict[str, Any]:
    """The values of all columns for *record*; :func:`celery_leases.stores.sql.rows.to_record` is
    the inverse.

    A running row already has the ``expires_at`` that it would get after a quick success. A quick
    success then changes no indexed column, so PostgreSQL need not write the indexes.
    """
    return {
        "stored_key": record.stored_key,
        "task": record.task,
        "key": record.key,
        "call_id": record.call_id,
        "owner": record.owner,
        "holder": record.holder,
        "fence": record.fence,
        "created_at": record.created_at,
        "started_at": record.started_at,
        "attempt": record.attempt,
        "crashes": record.crashes,
        "resumes": int(record.resumes),
        "state": record.state,
        "ended": _ended(record.state, record.ended),
        "reason": record.reason,
        "result": record.result,
        "error": written(record.failure),
        "lease_store": record.lease_store,
        "lease_until": record.lease_until,
        "retry_at": record.retry_at,
        "finished_at": record.finished_at,
        "expires_at": _expires_at(record),
        "publish_at": record.publish_at,
        "published_at": record.published_at,
        "progress": record.progress,
        "message": record.message,
        DOCUMENT: record_document.dump(record),
    }


def insert_parameters(record: Record) -> dict[str, Any]:
    """The parameters of the insert of *record*, whose times are relative to the insert.

    Builds only the columns of the insert, because each first run needs them.
    """
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
        "new_expires_at": _expires_at(record),
        f"new_{DOCUMENT}": record_document.dump(record),
    }


def only_succeeds(record: Record, outcome: Outcome) -> bool:
    """Whether *outcome* changes nothing but ``state``, ``result`` and the times of the end."""
    return (
        outcome.ended is Ended.RETURNED  # which is NULL in a done row, as the claim wrote it
        and outcome.retention is not None
        and not (record.resumes or outcome.resumes or outcome.retry_after)
        and (outcome.attempt, outcome.crashes) == (record.attempt, record.crashes)
        and outcome.reason is None
        and outcome.failure is None
        and outcome.progress is None
        and _keeps_details(record, outcome)
    )


def success_parameters(record: Record, outcome: Outcome) -> dict[str, Any]:
    """The parameters of the statement that writes such an outcome."""
    keep = int((outcome.retention or 0.0) * MICROSECONDS)
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
    values = {
        "for_key": record.stored_key,
        "for_fence": record.fence,
        "for_owner": record.owner,
        "new_state": outcome.state,
        "new_ended": _ended(outcome.state, outcome.ended),
        "new_attempt": outcome.attempt,
        "new_crashes": outcome.crashes,
        "new_resumes": int(outcome.resumes),
        "new_result": outcome.result,
        "new_reason": short(outcome.reason),
        "new_error": written(outcome.failure),
        "new_progress": outcome.progress,
        "wait": int(wait * MICROSECONDS) if wait else None,
        "keep": expiry,
        "keep_at_least": expiry - expiry // EXPIRY_STEPS if expiry is not None else None,
    }
    if not _keeps_details(record, outcome):
        after = settled(record, outcome, 0)
        values[f"new_{DOCUMENT}"] = record_document.dump(after, failed=outcome.failed)
    return values


def details_in(reader: ColumnReader) -> dict[str, Any]:
    """The fields of a record in the document of its row."""
    row = reader.row
    if row[DOCUMENT] is None:
        return record_document.load(None, None)[0]
    found = reader.of(DOCUMENT, lambda text: record_document.load(text, row["finished_at"]))
    if found is None:
        generation = record_document.generation_in(row[DOCUMENT])
        return {
            **record_document.load(None, None)[0],
            "generation": _derived_generation(row) if generation is None else generation,
        }
    fields: dict[str, Any] = found[0]
    spared: str | None = found[1]
    if spared is not None:
        reader.warn(DOCUMENT, ValueError(spared))
    return fields


def _derived_generation(row: Mapping[Any, Any]) -> int:
    """A generation for a row whose own cannot be read. It is derived from the fence, or from the
    time if the fence cannot be read either.

    It is higher than every counted generation, and is repeated only by fences that are a multiple
    of nine minutes apart. So effects of an earlier generation are not found after the row is
    repaired.
    """
    return FIRST_DERIVED + int(row["fence"] or row["now"]) % (FIRST_DERIVED // 2)


def _ended(state: State, ended: Ended | None) -> Ended | None:
    """The stored form of ``ended``: NULL for the usual end of a done row."""
    return None if state is State.DONE and ended is Ended.RETURNED else ended


def _expires_at(record: Record) -> int | None:
    if record.state is State.RUNNING and record.retention:
        return record.started_at + microseconds(record.retention)
    return record.expires_at


def _keeps_details(record: Record, outcome: Outcome) -> bool:
    """Whether the outcome does not change the document that the claim wrote. A first success does
    not.
    """
    # Each field of the document that an outcome may change must be compared here.
    before = (
        record.retries,
        record.failures,
        record.quick_retries,
        record.cooldowns,
        record.crashed_call,
    )
    after = (
        outcome.retries,
        outcome.failures,
        outcome.quick_retries,
        outcome.cooldowns,
        outcome.crashed_call,
    )
    return before == after and outcome.finished is None and not outcome.failed and not outcome.unrun
