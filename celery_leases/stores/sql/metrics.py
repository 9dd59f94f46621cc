"""The counts of all processes, in the records database.

They are rows of the effects table with an empty key: one for each process that counts, and one for
the total of the processes that have ended. So they need no table and no migration, and they work
with every version of the tables. Effects are always read by their key, so these rows are never read
as effects. They do not expire, so they are never purged.

A process writes its sums, not increments, so a statement may be repeated if its reply was lost. Any
process folds a row into the total if the row is closed, or was not written for a long time. Each
step is one statement that may be repeated, so folding may be interrupted anywhere:

1. Mark a row that was not written for a long time. Its process, if it still lives, can no longer
   write the row.
2. Write the total by compare-and-set. It includes the sums of the rows, and the names of their
   processes.
3. Delete the rows. A reader skips the row of a process that the total names.

What a killed process counted but did not write is computed from the records: each outcome stores
its process and a number in its row, and each process writes which numbers its counts include.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import BigInteger, and_, bindparam, delete, func, or_, select, update

from celery_leases.metrics_totals import MICROSECONDS, Tally, Total, Written, summed
from celery_leases.record import Ended, State
from celery_leases.stores.sql import rows
from celery_leases.stores.sql.database import Database
from celery_leases.stores.sql.schema import Tables
from celery_leases.stores.sql.values import Row

NAME: Final = "celery_leases.metrics"
"""The value of the column ``name`` in these rows."""
TOTAL: Final = "total"
LIVE: Final = "live"
CLOSED: Final = "closed"
FOLDING: Final = "folding"
SILENT_AFTER: Final = 90.0
"""A process counts as dead this many seconds after its last write."""
BATCH_SIZE: Final = 200
"""How many rows are folded at once."""
BATCHES: Final = 25
"""The maximum number of batches in one call. There are many rows if each child runs only one
task.
"""
TAG: Final = "#"
"""The first character of a tag, with which no name of a lease store begins."""
ID_LENGTH: Final = 12
_EARLIER: Final = 600 * MICROSECONDS
"""An uncounted outcome may be this much older than the last write of its process, because the
outcome waited for the commit of the user's transaction.
"""


@dataclass(frozen=True, slots=True)
class Counts:
    """The counts of all processes. ``processes``: how many processes are counting now. ``begun``:
    whether a process has ever counted.
    """

    tally: Tally
    processes: int
    begun: bool


def tag(process: str, number: int) -> str:
    """The tag of outcome *number* of *process*, which is stored in the outcome's row."""
    return f"{TAG}{process}:{number}"


class SqlMetrics:
    """Reads and writes the counts, in the database of *tables*."""

    def __init__(self, database: Database, tables: Tables) -> None:
        self.database = database
        self._records = tables.records
        self._table = table = tables.effects
        now = database.now
        place = (table.c.stored_key == "", table.c.name == NAME)
        self._is_count = and_(*place)
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
        # A closed row may be written again, because the reply to the last write may be lost.
        own = table.c.state != FOLDING
        self._insert_or_update = database.dialect.upsert(table, key, fresh, where=own)
        self._update = update(table).where(mine, own).values(written)
        self._mark_folding = (
            update(table)
            .where(mine, live, table.c.done_at == bindparam("seen", type_=BigInteger))
            .values(state=FOLDING)
        )
        self._select_all = select(table.c.scope, table.c.result, table.c.state).where(
            self._is_count
        )

    def write(self, process: str, written: Written, *, first: bool, closed: bool) -> bool:
        """Write what *process* has counted; returns ``False`` if its row is being folded.

        *first*: this is the first write of the process. *closed*: this is its last write. Raises
        :class:`~celery_leases.errors.StoreUnavailable`.
        """
        values = {
            "for_process": process,
            "new_state": CLOSED if closed else LIVE,
            "document": written.dump(),
        }
        if first:
            return self.database.touch(self._insert_or_update, values)
        return self.database.count(self._update, values) == 1

    def read(self) -> Counts:
        """The counts of all processes, by one statement."""
        found = self.database.all(self._select_all, {})
        total = next((Total.load(row["result"]) for row in found if row["scope"] == TOTAL), Total())
        others = [
            row for row in found if row["scope"] != TOTAL and row["scope"] not in total.folded
        ]
        tallies = [Written.load(row["result"]).tally for row in others]
        live = sum(row["state"] == LIVE for row in others)
        return Counts(summed([total.tally, *tallies]), live, bool(found))

    def fold(self, silent: float = SILENT_AFTER) -> int:
        """Add the counts of ended processes to the total; returns their number.

        A process counts as dead after *silent* seconds without a write.
        """
        folded = 0
        for _ in range(BATCHES):
            some = self._fold_some(silent)
            folded += some
            if some < BATCH_SIZE:
                break
        return folded

    def _fold_some(self, silent: float) -> int:
        """As :meth:`fold`, for at most :data:`AT_ONCE` processes."""
        found = self._rows_to_fold(silent)
        killed = [row["scope"] for row in found if row["state"] != CLOSED and self._marked(row)]
        over = killed + [row["scope"] for row in found if row["state"] == CLOSED]
        if not over:
            return 0
        before = self._read_total()
        texts = self._read_rows([*over, *before[1].folded])
        new = [process for process in over if process in texts and process not in before[1].folded]
        if new and not self._add_to_total(before, new, killed, texts):
            return 0  # another process has folded at the same time; the next call tries again
        gone = delete(self._table).where(
            self._is_count, self._table.c.scope.in_(over), self._table.c.state != LIVE
        )
        self.database.count(gone, {})
        return len(new)

    def _rows_to_fold(self, silent: float) -> Sequence[Row]:
        table = self._table
        quiet = table.c.done_at <= self.database.now - int(silent * MICROSECONDS)
        query = (
            select(table.c.scope, table.c.state, table.c.done_at)
            .where(self._is_count, table.c.scope != TOTAL, or_(table.c.state != LIVE, quiet))
            .order_by(table.c.scope)
            .limit(BATCH_SIZE)
        )
        return self.database.all(query, {})

    def _marked(self, row: Row) -> bool:
        """Mark a row, so that its process can no longer write it; returns whether it is marked."""
        if row["state"] == FOLDING:
            return True  # by a process that was interrupted
        values = {"for_process": row["scope"], "seen": row["done_at"]}
        return self.database.count(self._mark_folding, values) == 1

    def _read_total(self) -> tuple[int | None, Total]:
        """The version of the total (``None`` if there is no total yet), and the total."""
        table = self._table
        query = select(table.c.fence, table.c.result).where(self._is_count, table.c.scope == TOTAL)
        row = self.database.first(query, {})
        return (
            (int(row["fence"]), Total.load(row["result"])) if row is not None else (None, Total())
        )

    def _read_rows(self, processes: Sequence[str]) -> Mapping[str, Row]:
        table = self._table
        query = select(table.c.scope, table.c.result, table.c.done_at).where(
            self._is_count, table.c.scope.in_(processes)
        )
        return {row["scope"]: row for row in self.database.all(query, {})}

    def _add_to_total(
        self,
        before: tuple[int | None, Total],
        new: Sequence[str],
        killed: Sequence[str],
        found: Mapping[str, Row],
    ) -> bool:
        """Add the counts of the *new* processes to the total; returns ``False`` if the total is no
        longer *before*.
        """
        version, total = before
        written = {process: Written.load(found[process]["result"]) for process in new}
        dead = {process: found[process] for process in new if process in killed}
        rest = self._counted_from_records(dead, written)
        tallies = [total.tally, *(each.tally for each in written.values()), rest]
        still_there = total.folded & found.keys()
        after = Total(summed(tallies), frozenset(still_there | set(new))).dump()
        table, now = self._table, self.database.now
        if version is None:
            key: dict[str, Any] = {"stored_key": "", "name": NAME, "scope": TOTAL}
            values = {"state": CLOSED, "fence": 1, "idempotency_key": "", "sent_at": now}
            made = key | values | {"result": after, "done_at": now}
            return self.database.touch(
                self.database.dialect.insert_absent(table, list(key), made), {}
            )
        same = and_(self._is_count, table.c.scope == TOTAL, table.c.fence == version)
        changed = update(table).where(same).values(fence=version + 1, result=after, done_at=now)
        return self.database.count(changed, {}) == 1

    def _counted_from_records(
        self, dead: Mapping[str, Row], written: Mapping[str, Written]
    ) -> Tally:
        """The outcomes of *dead* processes that their *written* counts do not include.

        Scans all records.
        """
        tally = Tally()
        if not dead:
            return tally
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
                _count_outcome(tally, row)
        return tally


def _count_outcome(tally: Tally, row: Row) -> None:
    """Count the outcome in *row*, as its process would have done."""
    took = max(0, row["finished_at"] - row["started_at"]) / MICROSECONDS
    rule = None
    if row["error"]:
        try:
            rule = rows.failure_in(row["error"]).rule
        except (ValueError, TypeError, RecursionError, json.JSONDecodeError):
            rule = None
    tally.closed(row["task"], row["ended"] or Ended.RETURNED.value, rule, took, took)
    if row["state"] == State.COOLING and row["retry_at"]:
        tally.span(
            "cooldown", row["task"], max(0, row["retry_at"] - row["finished_at"]) / MICROSECONDS
        )
