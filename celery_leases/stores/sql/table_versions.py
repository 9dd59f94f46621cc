"""The layouts of the records table: the columns of each version, and the fields of a record in
them.

Most columns are in both layouts. Version 1 has a column for each field of a record. Version 2 has a
JSON document for the fields that only decisions read; see
:mod:`celery_leases.protocol.record_document`. A worker supports both versions: first deploy the
workers of a new release, then run ``leases migrate`` while they run.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote, unquote

from celery_leases.protocol import record_document
from celery_leases.protocol.keys import older_fingerprint_of
from celery_leases.protocol.records import Attempt, Ended, Outcome, Record, State
from celery_leases.protocol.repairs import settled
from celery_leases.stores.sql.values import (
    MICROSECONDS,
    ColumnReader,
    failure_in,
    mapping,
    microseconds,
    short,
    written,
)

DOCUMENT: Final = "details"
"""The document's column. Only version 2 has it, so it distinguishes the two versions."""

EXPIRY_STEPS: Final = 100
"""``expires_at`` is not written if the record would expire at most this fraction (1/100) of its
retention earlier.
"""
FIRST_DERIVED: Final = 2**30
"""The first of the generations that are derived from a fence. Counted generations are lower."""
DELIMITER: Final = "!"
"""Delimits the ids in ``finished_calls``. It is quoted inside an id."""

_INSERTED: Final = (
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
)
_SWAPPED: Final = (
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
)
_SETTLED: Final = ("state", "ended", "attempt", "crashes", "resumes", "result", "reason", "error")


@dataclass(frozen=True, slots=True)
class Migrated:
    """The result of a migration. ``before`` is ``None`` if there were no tables; ``rows`` is the
    number of converted rows.
    """

    before: int | None
    after: int
    rows: int = 0


class Layout(ABC):
    """The stored form of records in the table of one version."""

    version: int
    #: The columns that an insert sets, besides the time of the insert. The others are NULL or 0.
    inserted: tuple[str, ...]
    #: The columns that a claim changes; see :func:`celery_leases.protocol.claim_rules.claimed`.
    swapped: tuple[str, ...]
    #: The columns that an outcome sets to its own values. Two outcomes differ in one of them.
    settled: tuple[str, ...]

    def column_values(self, record: Record) -> dict[str, Any]:
        """The values of all columns for *record*; :func:`celery_leases.stores.sql.rows.to_record`
        is the inverse.
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
            "ended": record.ended,
            "reason": record.reason,
            "result": record.result,
            "error": written(record.failure),
            "lease_store": record.lease_store,
            "lease_until": record.lease_until,
            "retry_at": record.retry_at,
            "finished_at": record.finished_at,
            "expires_at": record.expires_at,
            "publish_at": record.publish_at,
            "published_at": record.published_at,
            "progress": record.progress,
            "message": record.message,
            **self.details_values(record),
        }

    def insert_parameters(self, record: Record) -> dict[str, Any]:
        """The parameters of the insert of *record*, whose times are relative to the insert."""
        values = self.column_values(record)
        return {f"new_{name}": values[name] for name in self.inserted}

    def only_succeeds(self, record: Record, outcome: Outcome) -> bool:
        """Whether *outcome* changes nothing but ``state``, ``result`` and the times of the end."""
        return False

    def success_parameters(self, record: Record, outcome: Outcome) -> dict[str, Any]:
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

    def settle_parameters(self, record: Record, outcome: Outcome) -> dict[str, Any]:
        """The parameters of the statement that writes *outcome* for the attempt on *record*."""
        wait, keep = outcome.retry_after or 0.0, outcome.retention
        expiry = int((keep + wait) * MICROSECONDS) if keep is not None else None
        return {
            "for_key": record.stored_key,
            "for_fence": record.fence,
            "for_owner": record.owner,
            "new_state": outcome.state,
            "new_ended": outcome.ended,
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
            **self.details_parameters(record, outcome),
        }

    @abstractmethod
    def details_values(self, record: Record) -> dict[str, Any]:
        """The values of the columns that only this layout has."""

    @abstractmethod
    def details_parameters(self, record: Record, outcome: Outcome) -> dict[str, Any]:
        """The parameters of :meth:`settle_parameters` for those columns."""


class Wide(Layout):
    """Version 1: a column for each field."""

    version = 1
    columns = (
        "retries",
        "generation",
        "failures",
        "quick_retries",
        "cooldowns",
        "failed_at",
        "counted",
        "fingerprint",
        "digests",
        "lease_ttl",
        "retention",
        "previous_ended",
        "previous_error",
        "previous_host",
        "finished_calls",
        "finished_results",
        "crashed_at",
        "crashed_call",
    )
    inserted = (
        *_INSERTED,
        "retries",
        "fingerprint",
        "digests",
        "lease_ttl",
        "finished_calls",
        "retention",
        "generation",
        "counted",
    )
    swapped = (*_SWAPPED, *(name for name in columns if name != "finished_results"))
    settled = (
        *_SETTLED,
        "retries",
        "failures",
        "quick_retries",
        "cooldowns",
        "counted",
        "crashed_call",
        "finished_calls",
        "finished_results",
    )

    def details_values(self, record: Record) -> dict[str, Any]:
        """See :class:`Layout`."""
        before, results = record.previous, record.finished_results
        return {
            "retries": record.retries,
            "generation": record.generation,
            "failures": record.failures,
            "quick_retries": record.quick_retries,
            "cooldowns": record.cooldowns,
            "failed_at": record.failed_at,
            "counted": record.generation,
            "fingerprint": record.fingerprint,
            "digests": json.dumps(dict(record.digests)) if record.digests is not None else None,
            "lease_ttl": microseconds(record.lease_ttl),
            "retention": microseconds(record.retention) if record.retention else None,
            "previous_ended": before.ended if before is not None else None,
            "previous_error": written(before.error) if before is not None else None,
            "previous_host": before.host if before is not None else None,
            "finished_calls": "".join(map(_delimited, record.finished_calls)),
            "finished_results": json.dumps(dict(results)) if results is not None else None,
            "crashed_at": record.crashed_at,
            "crashed_call": record.crashed_call,
        }

    def details_parameters(self, record: Record, outcome: Outcome) -> dict[str, Any]:
        """See :class:`Layout`."""
        written_now = self.details_values(settled(record, outcome, 0))
        names = (name for name in self.settled if name in written_now)
        return {f"new_{name}": written_now[name] for name in names} | {
            "failed": outcome.failed,
            "last_failed": record.failed_at,
        }


class Narrow(Layout):
    """Version 2: one document for the fields that only decisions read."""

    version = 2
    columns = (DOCUMENT,)
    inserted = (*_INSERTED, "expires_at", DOCUMENT)
    swapped = (*_SWAPPED, DOCUMENT)
    settled = (*_SETTLED, DOCUMENT)

    def column_values(self, record: Record) -> dict[str, Any]:
        """See :class:`Layout`. A running row already has the ``expires_at`` that it would get after
        a quick success.

        A quick success then changes no indexed column, so PostgreSQL need not write the indexes.
        """
        values = super().column_values(record)
        values["ended"] = _ended(record.state, record.ended)
        values["expires_at"] = _expires_at(record)
        return values

    def insert_parameters(self, record: Record) -> dict[str, Any]:
        """See :class:`Layout`. Builds only the columns of the insert, because each first run needs
        them.
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

    def only_succeeds(self, record: Record, outcome: Outcome) -> bool:
        """See :class:`Layout`."""
        return (
            outcome.ended is Ended.RETURNED  # which is NULL here, as the claim wrote it
            and outcome.retention is not None
            and not (record.resumes or outcome.resumes or outcome.retry_after)
            and (outcome.attempt, outcome.crashes) == (record.attempt, record.crashes)
            and outcome.reason is None
            and outcome.failure is None
            and outcome.progress is None
            and _keeps_details(record, outcome)
        )

    def details_values(self, record: Record) -> dict[str, Any]:
        """See :class:`Layout`."""
        return {DOCUMENT: record_document.dump(record)}

    def details_parameters(self, record: Record, outcome: Outcome) -> dict[str, Any]:
        """See :class:`Layout`."""
        ended = {"new_ended": _ended(outcome.state, outcome.ended)}
        if _keeps_details(record, outcome):
            return ended
        document = record_document.dump(settled(record, outcome, 0), failed=outcome.failed)
        return ended | {f"new_{DOCUMENT}": document}


WIDE: Final = Wide()
NARROW: Final = Narrow()
LAYOUTS: Final[Mapping[int, Layout]] = {layout.version: layout for layout in (WIDE, NARROW)}
OLDEST: Final = min(LAYOUTS)
NEWEST: Final = max(LAYOUTS)


def layout_of(columns: Collection[str]) -> Layout:
    """The layout of a table with these columns, also during a migration."""
    return NARROW if DOCUMENT in columns else WIDE


def details_in(reader: ColumnReader) -> dict[str, Any]:
    """The fields of a record whose columns differ between the layouts. *reader* has a row of either
    layout.
    """
    return _narrow(reader) if DOCUMENT in reader.row else _wide(reader)


def _narrow(reader: ColumnReader) -> dict[str, Any]:
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

    It is higher than every counted generation, fits into the column of version 1, and is repeated
    only by fences that are a multiple of nine minutes apart. So effects of an earlier generation
    are not found after the row is repaired.
    """
    return FIRST_DERIVED + int(row["fence"] or row["now"]) % (FIRST_DERIVED // 2)


def _wide(reader: ColumnReader) -> dict[str, Any]:
    integers = (
        "retries",
        "generation",
        "failures",
        "counted",
        "quick_retries",
        "cooldowns",
        "lease_ttl",
    )
    lost = type(reader.row["generation"]) is not int
    reader.integers(integers, ("crashed_at", "failed_at", "retention"))
    row = reader.row
    listed, counts = row["finished_calls"], row["counted"] == row["generation"]
    digests, fingerprint = reader.of("digests", mapping, needed=False), row["fingerprint"]
    # The first releases wrote another fingerprint, of 256 bits. The digests give one of 128.
    whole = fingerprint is not None and len(fingerprint) == len("v1:") + 64
    ended = reader.of("previous_ended", Ended, needed=False) if row["previous_ended"] else None
    before_error = reader.of("previous_error", failure_in, needed=False)
    return {
        "retries": row["retries"],
        "generation": _derived_generation(row) if lost else row["generation"],
        "failures": row["failures"] if counts else 0,
        "quick_retries": row["quick_retries"] if counts else 0,
        "cooldowns": row["cooldowns"] if counts else 0,
        "failed_at": row["failed_at"] if counts else None,
        "fingerprint": older_fingerprint_of(digests)
        if digests is not None and whole
        else fingerprint,
        "digests": digests,
        "lease_ttl": row["lease_ttl"] / MICROSECONDS,
        "retention": row["retention"] / MICROSECONDS if row["retention"] else None,
        "previous": Attempt(ended, before_error, row["previous_host"]) if ended else None,
        "finished_calls": tuple(map(unquote, listed.strip(DELIMITER).split(DELIMITER * 2)))
        if listed
        else (),
        "finished_results": reader.of("finished_results", mapping),
        "crashed_at": row["crashed_at"],
        "crashed_call": row["crashed_call"],
    }


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


def _delimited(call_id: str) -> str:
    return f"{DELIMITER}{quote(call_id, safe='')}{DELIMITER}"
