"""Records in memory, claimed by the core's rule and settled as their port says, under a clock that
stands still.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from celery_leases.protocol import repairs
from celery_leases.protocol.claims import ALWAYS
from celery_leases.protocol.groups import Gate
from celery_leases.protocol.records import Outcome, Record, State
from celery_leases.stores.claiming import COMPARED, Claiming, Met
from celery_leases.stores.evidence import NEVER

T = TypeVar("T")
KEPT = ("created_at", "resumes", "progress", "publish_at", "published_at", "finished_results")
"""The fields of a record that no claim writes."""
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


def swapped(row: Record | None, seen: Record, new: Record) -> Record | None:
    """The row after a swap, as in SQL: what no claim writes stays. ``None`` if the row is not as it
    was seen.
    """
    if row is None or any(getattr(row, name) != getattr(seen, name) for name in COMPARED):
        return None
    return replace(new, **{name: getattr(row, name) for name in KEPT})


class AsTold:
    """Evidence that is given: whether the database is known to have been there for the holders of
    lapsed leases.
    """

    def __init__(self) -> None:
        self.answering = True

    def takes_until(self, sent: float) -> int:
        """Always, or never."""
        return ALWAYS if self.answering else NEVER

    def answered(self, sent: float, at: float, now: int) -> None:
        """Nothing to learn."""

    def failed(self, at: float) -> None:
        """Nothing to learn."""


class MemoryRecords(Claiming):
    """Rows by their keys, and the two steps of a claim."""

    def __init__(self, clock: StillClock, rows: dict[str, Record]) -> None:
        self.clock = clock
        self.rows = rows
        self.evidence: Any = AsTold()
        #: The gate of a group, where the claim asks at it.
        self.gate: Callable[[str], Gate | None] = lambda _: None

    @property
    def now(self) -> int:
        """Microseconds."""
        return EPOCH + round(self.clock.now() * SECOND)

    def row(self, stored_key: str) -> Record | None:
        """The row, read by nobody."""
        found = self.rows.get(stored_key)
        return replace(found, now=self.now) if found is not None else None

    def insert_or_read(self, new: Record, group: str | None) -> Met:
        """Insert the row, or read it and the gate."""
        row, gate = self.row(new.stored_key), self.gate(group) if group is not None else None
        if row is not None or gate is not None:
            return Met(self.now, row=row, gate=gate)
        until = self.now + new.lease_until if new.lease_until is not None else None
        moments: dict[str, Any] = dict.fromkeys(
            ("fence", "created_at", "started_at", "now"), self.now
        )
        self.rows[new.stored_key] = replace(new, lease_until=until, **moments)
        return Met(self.now, inserted=True)

    def swap(self, seen: Record, new: Record) -> bool:
        """Write the row, unless it has changed."""
        written = swapped(self.rows.get(seen.stored_key), seen, new)
        if written is not None:
            self.rows[seen.stored_key] = written
        return written is not None

    def see_columns(self) -> None:
        """There are none."""

    def await_lock(self, row: Record) -> None:
        """No transaction locks it."""


class FakeRecords(MemoryRecords):
    """One row for each key; each step is noted. *look* is the name of the step that inserts or
    reads.
    """

    def __init__(self, clock: StillClock, journal: Steps, look: str = "claim") -> None:
        super().__init__(clock, {})
        self.journal = journal
        self.look = look
        self.written: dict[tuple[int, str], Outcome] = {}
        #: The same rows, for what others do without a note.
        self.others = MemoryRecords(clock, self.rows)

    def insert_or_read(self, new: Record, group: str | None) -> Met:
        """As one step."""
        return self.journal.step(
            self.look, lambda: super(FakeRecords, self).insert_or_read(new, group)
        )

    def swap(self, seen: Record, new: Record) -> bool:
        """As one step."""
        return self.journal.step("swap", lambda: super(FakeRecords, self).swap(seen, new))

    def read(self, stored_key: str) -> Record | None:
        """The row."""
        return self.journal.step("read", lambda: self.row(stored_key))

    def identity(self) -> str:
        """The word that names the database."""
        return "db"

    def settle(self, record: Record, outcome: Outcome) -> bool:
        """Write the outcome under the record's fence and owner."""
        return self.journal.step("settle", lambda: self._settle(record, outcome))

    def reset(self, stored_key: str) -> None:
        """What an operator's retry does: a new fence, nothing to wait for, nothing counted."""
        row = self.rows[stored_key]
        self.rows[stored_key] = repairs.reset(replace(row, now=self.now), keep=True, forgive=True)

    def _settle(self, record: Record, outcome: Outcome) -> bool:
        row = self.row(record.stored_key)
        if row is None or (row.fence, row.owner) != (record.fence, record.owner):
            return False
        if row.state is not State.RUNNING:
            return (
                self.written.get((row.fence, row.owner)) == outcome
            )  # the reply to the first try was lost
        self.written[row.fence, row.owner] = outcome
        self.rows[record.stored_key] = repairs.settled(row, outcome, self.now)
        return True
