"""Between rows of the records table and the values of the core."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any
from urllib.parse import quote, unquote

from sqlalchemy import RowMapping

from celery_leases.core.records import Attempt, Bid, Ended, Failure, Outcome, Record, State
from celery_leases.stores.claims import DATABASE

LISTED = "!"
"""Stands around each id in ``finished_calls``, and never inside one as it is written there."""

SETTLED = (
    *("state", "ended", "retries", "attempt", "failures", "quick_retries", "cooldowns", "counted", "crashes"),
    *("crashed_call", "resumes", "result", "reason", "error", "finished_calls", "finished_results"),
)
"""The columns that :func:`of_outcome` has a value for as it is written; two outcomes differ in one of them."""

MICROSECONDS = 1e6

_FAILURE = frozenset(field.name for field in fields(Failure))


def of_bid(bid: Bid, lease_store: str) -> dict[str, Any]:
    """The parameters of the claim statement."""
    return {
        "stored_key": bid.stored_key,
        "task": bid.task,
        "key": bid.key,
        "owner": bid.token,
        "call": bid.call_id,
        "holder": bid.holder,
        "fingerprint": bid.fingerprint,
        "digests": written_digests(bid.digests),
        "message": bid.message,
        "store": lease_store,
        "ttl": int(bid.ttl * MICROSECONDS),
        "rerun": bid.rerun,
        "repeat": bid.repeat,
        "prior": " ".join(bid.prior),
        "listed": _listed(bid.call_id),
        "retries": bid.retries,
        "retention": int(bid.retention * MICROSECONDS) if bid.retention else None,
        "in_records": lease_store == DATABASE,
    }


def written_digests(digests: Mapping[str, str] | None) -> str | None:
    """Digests of arguments as they are stored."""
    return json.dumps(dict(digests)) if digests is not None else None


def group_of(error: str | None) -> str | None:
    """The cooldown group whose failure a stored error was, if it was one."""
    group: str | None = json.loads(error).get("group") if error else None
    return group


def of_guard(record: Record) -> dict[str, Any]:
    """What finds the row of a running attempt, and nothing else."""
    return {"for_key": record.stored_key, "for_fence": record.fence, "for_owner": record.owner}


def of_outcome(record: Record, outcome: Outcome) -> dict[str, Any]:
    """The parameters of the settle statement."""
    finished = outcome.finished
    results = finished if finished is not None else record.finished_results
    wait = outcome.retry_after or 0.0
    keep = outcome.retention
    return of_guard(record) | {
        "new_state": outcome.state,
        "new_ended": outcome.ended,
        "new_attempt": outcome.attempt,
        "new_failures": outcome.failures,
        "new_crashes": outcome.crashes,
        "new_crashed_call": outcome.crashed_call,
        "new_result": outcome.result,
        "new_reason": outcome.reason[:255] if outcome.reason else None,
        "new_error": _written(outcome.failure),
        "new_quick_retries": outcome.quick_retries,
        "new_cooldowns": outcome.cooldowns,
        "new_counted": record.generation,
        "new_resumes": int(outcome.resumes),
        "new_finished_calls": "".join(map(_listed, finished if finished is not None else record.finished_calls)),
        "new_retries": outcome.retries,
        "new_finished_results": json.dumps(dict(results)) if results is not None else None,
        "failed": outcome.failed,
        "last_failed": record.failed_at,
        "wait": int(wait * MICROSECONDS) if wait else None,
        "keep": int((keep + wait) * MICROSECONDS) if keep is not None else None,
        "new_progress": outcome.progress,
    }


def to_record(row: RowMapping) -> Record:
    """A record from a row that has all columns of the table and ``now``."""
    ended = row["previous_ended"]
    before = Attempt(Ended(ended), _failure(row["previous_error"]), row["previous_host"]) if ended else None
    listed = row["finished_calls"]
    counts = row["counted"] == row["generation"]
    return Record(
        stored_key=row["stored_key"],
        task=row["task"],
        key=row["key"],
        state=State(row["state"]),
        fence=row["fence"],
        owner=row["owner"],
        call_id=row["call_id"],
        holder=row["holder"],
        retries=row["retries"],
        attempt=row["attempt"],
        generation=row["generation"],
        failures=row["failures"] if counts else 0,
        crashes=row["crashes"],
        lease_store=row["lease_store"],
        lease_ttl=row["lease_ttl"] / MICROSECONDS,
        created_at=row["created_at"],
        started_at=row["started_at"],
        now=int(row["now"]),
        fingerprint=row["fingerprint"],
        digests=_json(row["digests"]),
        lease_until=row["lease_until"],
        retry_at=row["retry_at"],
        result=row["result"],
        reason=row["reason"],
        ended=Ended(row["ended"]) if row["ended"] else None,
        failure=_failure(row["error"]),
        previous=before,
        crashed_at=row["crashed_at"],
        crashed_call=row["crashed_call"],
        finished_at=row["finished_at"],
        expires_at=row["expires_at"],
        retention=row["retention"] / MICROSECONDS if row["retention"] else None,
        quick_retries=row["quick_retries"] if counts else 0,
        cooldowns=row["cooldowns"] if counts else 0,
        failed_at=row["failed_at"] if counts else None,
        resumes=bool(row["resumes"]),
        progress=row["progress"],
        message=row["message"],
        publish_at=row["publish_at"],
        published_at=row["published_at"],
        finished_calls=tuple(map(unquote, listed.strip(LISTED).split(LISTED * 2))) if listed else (),
        finished_results=_json(row["finished_results"]),
    )


def _listed(call_id: str) -> str:
    return f"{LISTED}{quote(call_id, safe='')}{LISTED}"


def _written(failure: Failure | None) -> str | None:
    if failure is None:
        return None
    return json.dumps({name: value for name, value in asdict(failure).items() if value}, separators=(",", ":"))


def _failure(text: str | None) -> Failure | None:
    if text is None:
        return None
    said = {name: value for name, value in json.loads(text).items() if name in _FAILURE}
    return Failure(**{"type": "", "message": "", **said})


def _json(text: str | None) -> Mapping[str, Any] | None:
    return json.loads(text) if text is not None else None
