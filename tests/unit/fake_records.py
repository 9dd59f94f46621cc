"""Records in memory, claimed and settled as their port says, under a clock that stands still."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from celery_leases.core.records import Attempt, Bid, Ended, Outcome, Record, Refused, State, Won
from celery_leases.core.waiting import grace_of

T = TypeVar("T")
SECOND = 1_000_000
EPOCH = 1_000_000 * SECOND


class StillClock:
    """Stands still until it is told otherwise, or somebody waits."""

    def __init__(self) -> None:
        self.time = 1000.0

    def now(self) -> float:
        """The time it stands at."""
        return self.time

    def sleep(self, seconds: float) -> None:
        """Let the time pass."""
        self.time += seconds


class Steps(Protocol):
    """Notes each step, and may let it fail."""

    def step(self, name: str, do: Callable[[], T]) -> T:
        """Take it."""
        ...


@dataclass
class FakeRecords:
    """One row for each key."""

    clock: StillClock
    journal: Steps
    rows: dict[str, Record] = field(default_factory=dict)
    written: dict[tuple[int, str], Outcome] = field(default_factory=dict)

    @property
    def now(self) -> int:
        """Microseconds."""
        return EPOCH + round(self.clock.now() * SECOND)

    def claim(self, bid: Bid, lease_store: str) -> Won | Refused:
        """Make the row ours, or leave it as it is."""
        return self.journal.step("claim", lambda: self.claim_now(bid, lease_store))

    def read(self, stored_key: str) -> Record | None:
        """The row."""
        return self.journal.step("read", lambda: self.row(stored_key))

    def settle(self, record: Record, outcome: Outcome) -> bool:
        """Write the outcome under the record's fence and owner."""
        return self.journal.step("settle", lambda: self._settle(record, outcome))

    def row(self, stored_key: str) -> Record | None:
        """The row, read by nobody."""
        found = self.rows.get(stored_key)
        return replace(found, now=self.now) if found is not None else None

    def reset(self, stored_key: str) -> None:
        """What an operator's retry does: a new fence, nothing to wait for, nothing counted."""
        row = self.rows[stored_key]
        free: dict[str, Any] = {"state": State.PENDING, "ended": Ended.RELEASED, "retry_at": None, "owner": ""}
        free |= {"failures": 0, "quick_retries": 0, "cooldowns": 0, "failed_at": None, "crashes": 0}
        self.rows[stored_key] = replace(row, fence=max(row.fence + 1, self.now), **free)

    # -- the claim -----------------------------------------------------------------------------------------

    def claim_now(self, bid: Bid, lease_store: str, *, in_records: bool = False) -> Won | Refused:
        """The claim, as one step of somebody else's."""
        row = self.row(bid.stored_key)
        if row is not None and row.state is State.RUNNING and row.owner == bid.token:
            return Won(row)
        if row is not None and not self._open(row, bid, lease_store):
            return Refused(row)
        ours: dict[str, Any] = {"call_id": bid.call_id, "holder": bid.holder, "retries": bid.retries, "task": bid.task}
        ours |= {"owner": bid.token, "lease_store": lease_store, "lease_ttl": bid.ttl, "state": State.RUNNING}
        ours |= {"lease_until": self.now + round(bid.ttl * SECOND) if in_records else None, "started_at": self.now}
        if row is None:
            made = Record(
                stored_key=bid.stored_key,
                key=bid.key,
                fence=self.now,
                attempt=1,
                generation=0,
                failures=0,
                crashes=0,
                created_at=self.now,
                now=self.now,
                fingerprint=bid.fingerprint,
                digests=bid.digests,
                **ours,
            )
        else:
            made = self._taken(row, bid, ours)
        self.rows[bid.stored_key] = made
        return Won(made)

    def would_win(self, bid: Bid, lease_store: str) -> bool:
        """Whether nothing but a gate can keep the bid from the row."""
        row = self.row(bid.stored_key)
        return row is None or self._open(row, bid, lease_store)

    def _open(self, row: Record, bid: Bid, lease_store: str) -> bool:
        same = row.call_id == bid.call_id
        if row.expired:
            return True
        if bid.call_id in row.finished_calls:
            return False
        if bid.rerun and row.state in (State.DONE, State.FAILED) and not same:
            return True
        over = row.ended is Ended.FAILED and not row.resumes
        agrees = same or bid.rerun or bid.fingerprint is None or row.fingerprint in (None, bid.fingerprint) or over
        told = bid.repeat and row.state in (State.PENDING, State.COOLING) and over
        retried = row.retries > bid.retries and (row.state is State.RUNNING or row.ended is Ended.RETRIED)
        if not agrees or (same and (told or retried)):
            return False
        if row.state in (State.PENDING, State.COOLING):
            return row.waits <= grace_of(row, bid.call_id)
        gone = row.lease_until is None or row.lease_until <= self.now or row.owner in bid.prior
        return row.state is State.RUNNING and row.lease_store == lease_store and gone

    def _taken(self, row: Record, bid: Bid, ours: dict[str, Any]) -> Record:
        anew = row.expired or (bid.rerun and row.call_id != bid.call_id)
        crashed = row.state is State.RUNNING and row.owner not in bid.prior
        ended = Ended.CRASHED if crashed else Ended.LOST if row.state is State.RUNNING else row.ended
        crashes = 0 if row.expired else row.crashes + crashed
        if crashed and bid.rerun and row.crashed_call not in (None, row.call_id):
            crashes = 1
        if anew:
            ours |= {"failures": 0, "quick_retries": 0, "cooldowns": 0, "failed_at": None}
        keeps = row.call_id == bid.call_id and row.fingerprint is not None
        return replace(
            row,
            fence=max(row.fence + 1, self.now),
            attempt=1 if anew else row.attempt + 1,
            generation=row.generation + anew,
            crashes=crashes,
            crashed_call=row.call_id if crashed else row.crashed_call,
            crashed_at=self.now if crashed else None,
            previous=Attempt(ended, row.failure, row.holder) if ended is not None and (crashed or not anew) else None,
            fingerprint=row.fingerprint if keeps else bid.fingerprint,
            digests=row.digests if keeps else bid.digests,
            finished_calls=() if row.expired else row.finished_calls,
            **(ours | dict.fromkeys(("retry_at", "result", "reason", "ended", "failure", "finished_at", "expires_at"))),
        )

    def _settle(self, record: Record, outcome: Outcome) -> bool:
        row = self.row(record.stored_key)
        if row is None or (row.fence, row.owner) != (record.fence, record.owner):
            return False
        if row.state is not State.RUNNING:
            return self.written.get((row.fence, row.owner)) == outcome  # the reply to the first try was lost
        self.written[row.fence, row.owner] = outcome
        finished = outcome.finished
        names = ["state", "ended", "attempt", "failures", "crashes", "retries", "result", "reason", "failure"]
        names += ["quick_retries", "cooldowns", "resumes", "crashed_call"]
        written: dict[str, Any] = {name: getattr(outcome, name) for name in names}
        self.rows[record.stored_key] = replace(
            row,
            retry_at=None if outcome.retry_after is None else self.now + round(outcome.retry_after * SECOND),
            expires_at=None if outcome.retention is None else self.now + round(outcome.retention * SECOND),
            finished_at=self.now,
            failed_at=self.now if outcome.failed else row.failed_at,
            lease_until=None,
            progress=outcome.progress if outcome.progress is not None else row.progress,
            finished_calls=tuple(finished) if finished is not None else row.finished_calls,
            finished_results=finished if finished is not None else row.finished_results,
            **written,
        )
        return True
