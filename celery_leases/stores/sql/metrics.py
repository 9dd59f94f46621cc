"""The counts of all processes, in the records database.

They are rows of the effects table with an empty key: one for each process that counts, and one for
the total of the processes that have ended. So they need no table and no migration, and they work on
every version of the tables. Effects are always read by their key, so no reader of effects finds
these rows. They never expire, so no purge deletes them.

A process writes its sums, never increments, so repeating a statement whose reply was lost changes
nothing. Any process folds a closed row, or a row that was not written for long, into the total, by
single statements that may be repeated and interrupted anywhere:

1. A silent row is marked. Its process, if it is still alive, can then no longer write the row.
2. The total is written by compare-and-set. It contains the sums of the rows and their names.
3. The rows are deleted. A reader skips a row that the total names.

The counts that a killed process had not written yet are computed from the records: an outcome
leaves the process and a number in its row, and the process writes which numbers its counts include.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import BigInteger, and_, bindparam, delete, func, or_, select, update

from celery_leases.protocol.metrics import MICROSECONDS, Tally, Total, Written, summed
from celery_leases.protocol.records import Ended, State
from celery_leases.stores.sql import rows
from celery_leases.stores.sql.compiled_statements import Row
from celery_leases.stores.sql.database import Database
from celery_leases.stores.sql.schema import Tables
from celery_leases.stores.sql.upserts import insert_absent, upsert

NAME: Final = "celery_leases.metrics"
"""Stands where an effect has its name."""
TOTAL: Final = "total"
LIVE: Final = "live"
CLOSED: Final = "closed"
FOLDING: Final = "folding"
SILENT: Final = 90.0
"""Seconds after its last write after which a process counts as dead."""
AT_ONCE: Final = 200
"""How many rows are folded at once."""
BATCHES: Final = 25
"""How many batches one call folds: children that run one task each leave many rows."""
TAG: Final = "#"
"""The first character of a tag; no name of a lease store begins with it."""
ID_LENGTH: Final = 12
_EARLIER: Final = 600 * MICROSECONDS
"""An outcome that is not counted yet may have finished this much earlier than its process's last
write, because it waited for the commit of the user's transaction.
"""


@dataclass(frozen=True, slots=True)
class Counts:
    """The counts of all processes; ``processes``: how many of them count at this time.

    ``begun``: whether any process has ever counted.
    """

    tally: Tally
    processes: int
    begun: bool


def tag(process: str, number: int) -> str:
    """The tag that outcome *number* of *process* leaves in its row."""
    return f"{TAG}{process}:{number}"


class SqlMetrics:
    """Reads and writes the counts, in the database of *tables*."""

    def __init__(self, database: Database, tables: Tables) -> None:
        self.database = database
        self._records = tables.records
        self._table = table = tables.effects
        now = database.now
        place = (table.c.stored_key == "", table.c.name == NAME)
        self._place = and_(*place)
        mine = and_(*place, table.c.scope == bindparam("for_process"))
        live = table.c.state == LIVE
        written: dict[str, Any] = {
            "state": bindparam("new_state", type_=table.c.state.type),
            "result": bindparam("document", type_=table.c.result.type),
            "done_at": now,
        }
        key: dict[str, Any] = {
            "stored_key": "",
            "name": NAME,
            "scope": bindparam("for_process", type_=table.c.scope.type),
        }
        fresh = {**written, "fence": 0, "idempotency_key": "", "sent_at": now}
        # The last write must be repeatable, because its reply may be lost.
        own = table.c.state != FOLDING
        self._first = upsert(table, database.engine.dialect, key, fresh, where=own)
        self._again = update(table).where(mine, own).values(written)
        self._mark = (
            update(table)
            .where(mine, live, table.c.done_at == bindparam("seen", type_=BigInteger))
            .values(state=FOLDING)
        )
        self._all = select(table.c.scope, table.c.result, table.c.state).where(self._place)

    def write(self, process: str, written: Written, *, first: bool, closed: bool) -> bool:
        """Write what *process* has counted so far; returns ``False`` if its row is being folded.

        *first*: the process has written nothing yet. *closed*: this is its last write. Raises
        :class:`~celery_leases.errors.StoreUnavailable`.
        """
        values = {
            "for_process": process,
            "new_state": CLOSED if closed else LIVE,
            "document": written.dump(),
        }
        if first:
            return self.database.touch(self._first, values)
        return self.database.count(self._again, values) == 1

    def read(self) -> Counts:
        """The counts of all processes, by one statement."""
        found = self.database.all(self._all, {})
        total = next((Total.load(row["result"]) for row in found if row["scope"] == TOTAL), Total())
        others = [
            row for row in found if row["scope"] != TOTAL and row["scope"] not in total.folded
        ]
        tallies = [Written.load(row["result"]).tally for row in others]
        live = sum(row["state"] == LIVE for row in others)
        return Counts(summed([total.tally, *tallies]), live, bool(found))

    def fold(self, silent: float = SILENT) -> int:
        """Add the counts of ended processes to the total; returns the number of processes.

        A process counts as dead after *silent* seconds without a write.
        """
        folded = 0
        for _ in range(BATCHES):
            some = self._fold_some(silent)
            folded += some
            if some < AT_ONCE:
                break
        return folded

    def _fold_some(self, silent: float) -> int:
        """As :meth:`fold`, for at most :data:`AT_ONCE` processes."""
        found = self._over(silent)
        killed = [row["scope"] for row in found if row["state"] != CLOSED and self._marked(row)]
        over = killed + [row["scope"] for row in found if row["state"] == CLOSED]
        if not over:
            return 0
        before = self._total()
        texts = self._written([*over, *before[1].folded])
        new = [process for process in over if process in texts and process not in before[1].folded]
        if new and not self._added(before, new, killed, texts):
            return 0  # another process has folded meanwhile; the next round is soon
        gone = delete(self._table).where(
            self._place, self._table.c.scope.in_(over), self._table.c.state != LIVE
        )
        self.database.count(gone, {})
        return len(new)

    def _over(self, silent: float) -> Sequence[Row]:
        table = self._table
        quiet = table.c.done_at <= self.database.now - int(silent * MICROSECONDS)
        query = (
            select(table.c.scope, table.c.state, table.c.done_at)
            .where(self._place, table.c.scope != TOTAL, or_(table.c.state != LIVE, quiet))
            .order_by(table.c.scope)
            .limit(AT_ONCE)
        )
        return self.database.all(query, {})

    def _marked(self, row: Row) -> bool:
        """Mark a row, so that its process can no longer write it; returns whether it is marked."""
        if row["state"] == FOLDING:
            return True  # by one that was interrupted
        values = {"for_process": row["scope"], "seen": row["done_at"]}
        return self.database.count(self._mark, values) == 1

    def _total(self) -> tuple[int | None, Total]:
        """The total and the number of its version; ``None`` if there is none yet."""
        table = self._table
        query = select(table.c.fence, table.c.result).where(self._place, table.c.scope == TOTAL)
        row = self.database.first(query, {})
        return (
            (int(row["fence"]), Total.load(row["result"])) if row is not None else (None, Total())
        )

    def _written(self, processes: Sequence[str]) -> Mapping[str, Row]:
        table = self._table
        query = select(table.c.scope, table.c.result, table.c.done_at).where(
            self._place, table.c.scope.in_(processes)
        )
        return {row["scope"]: row for row in self.database.all(query, {})}

    def _added(
        self,
        before: tuple[int | None, Total],
        new: Sequence[str],
        killed: Sequence[str],
        found: Mapping[str, Row],
    ) -> bool:
        """Add the counts of the *new* processes to the total; returns ``False`` if the total has
        changed since *before*.
        """
        version, total = before
        written = {process: Written.load(found[process]["result"]) for process in new}
        dead = {process: found[process] for process in new if process in killed}
        rest = self._told_from_records(dead, written)
        tallies = [total.tally, *(each.tally for each in written.values()), rest]
        still_there = total.folded & found.keys()
        after = Total(summed(tallies), frozenset(still_there | set(new))).dump()
        table, now = self._table, self.database.now
        if version is None:
            key: dict[str, Any] = {"stored_key": "", "name": NAME, "scope": TOTAL}
            values = {"state": CLOSED, "fence": 1, "idempotency_key": "", "sent_at": now}
            made = key | values | {"result": after, "done_at": now}
            return self.database.touch(
                insert_absent(table, self.database.engine.dialect, list(key), made), {}
            )
        same = and_(self._place, table.c.scope == TOTAL, table.c.fence == version)
        changed = update(table).where(same).values(fence=version + 1, result=after, done_at=now)
        return self.database.count(changed, {}) == 1

    def _told_from_records(self, dead: Mapping[str, Row], written: Mapping[str, Written]) -> Tally:
        """The outcomes of *dead* processes that their *written* counts do not include.

        It scans all records, once for each killed process.
        """
        told = Tally()
        if not dead:
            return told
        columns = self._records.c
        tags = [f"{TAG}{process}" for process in dead]
        since = min(int(row["done_at"]) for row in dead.values()) - _EARLIER
        query = select(
            *(columns[name] for name in ("task", "state", "ended", "error", "lease_store")),
            *(columns[name] for name in ("started_at", "finished_at", "retry_at")),
        ).where(
            columns.state != State.RUNNING,
            columns.finished_at >= since,
            func.substr(columns.lease_store, 1, ID_LENGTH + len(TAG)).in_(tags),
        )
        for row in self.database.all(query, {}):
            process, _, number = row["lease_store"].removeprefix(TAG).partition(":")
            if number.isdecimal() and not written[process].has(int(number)):
                _tell(told, row)
        return told


def _tell(told: Tally, row: Row) -> None:
    """Count the outcome of *row*, as its process would have."""
    took = max(0, row["finished_at"] - row["started_at"]) / MICROSECONDS
    rule = None
    if row["error"]:
        try:
            rule = rows.failure_in(row["error"]).rule
        except (ValueError, TypeError, RecursionError, json.JSONDecodeError):
            rule = None
    told.closed(row["task"], row["ended"] or Ended.RETURNED.value, rule, took, took)
    if row["state"] == State.COOLING and row["retry_at"]:
        told.span(
            "cooldown", row["task"], max(0, row["retry_at"] - row["finished_at"]) / MICROSECONDS
        )
