"""The stores of the product in memory, with a manual clock.

Every step is recorded; a test can make it fail, or do something before it.

The published contracts hold for them: records, effects and database leases are those of SQLite,
and the leases beside them are in the store of :mod:`tests.distributions.toy_leases`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from copy import copy
from functools import cache
from typing import Any, TypeVar

from sqlalchemy import delete, insert, select

from celery_leases.decide.claim import ALWAYS
from celery_leases.errors import StoreUnavailable
from celery_leases.events import Event
from celery_leases.record import Record
from celery_leases.stores.sql.connections import engine_for
from celery_leases.stores.sql.database import NEVER
from celery_leases.stores.sql.leases import DatabaseLeaseStore
from celery_leases.stores.sql.records import SqlRecordStore
from celery_leases.stores.sql.rows import column_values

T = TypeVar("T")
E = TypeVar("E", bound=Event)
SECOND = 1_000_000
EPOCH = 1_000_000 * SECOND


class ManualClock:
    """A clock that advances only when it is set or when a caller sleeps."""

    def __init__(self) -> None:
        self.time = 1000.0

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds


class Journal(list[str]):
    """The steps of all stores in their order, by name."""

    def __init__(self) -> None:
        super().__init__()
        self._away: dict[str, tuple[int, bool]] = {}
        self._before: dict[str, Callable[[], object]] = {}

    def away(self, *names: str, times: int = 10**9, done: bool = False) -> None:
        """Make steps fail *times* times; with *done* they are executed and the reply is lost."""
        self._away |= dict.fromkeys(names, (times, done))

    def before(self, name: str, what: Callable[[], object]) -> None:
        """Do something just before the next step of this name, as another worker would."""
        self._before[name] = what

    def step(self, name: str, do: Callable[[], T]) -> T:
        self._before.pop(name, lambda: None)()
        self.append(name)
        times, done = self._away.get(name, (0, False))
        if not times:
            return do()
        self._away[name] = (times - 1, done)
        if done:
            do()
        raise StoreUnavailable(f"{name} is away", done)


class Seen(list[Event]):
    """An observer that stores all events."""

    def wants(self, kind: type[Event]) -> bool:
        return True

    def observe(self, event: Event) -> None:
        self.append(event)

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self if isinstance(event, kind)]


class FixedAvailability:
    """Whether the database counts as available to the holders of lapsed leases."""

    def __init__(self) -> None:
        self.answering = True

    def takeover_until(self, sent: float) -> int:
        return ALWAYS if self.answering else NEVER

    def answered(self, sent: float, at: float, now: int) -> int:
        return self.takeover_until(sent)

    def failed(self, at: float) -> None:
        """Ignore it."""


def noted(store: object, journal: Journal, **steps: str) -> None:
    """Make each of these methods of *store* a step of *journal*, with the given name."""

    def as_step(name: str, do: Callable[..., T]) -> Callable[..., T]:
        return lambda *given, **more: journal.step(name, lambda: do(*given, **more))

    for method, name in steps.items():
        setattr(store, method, as_step(name, getattr(store, method)))


@cache
def _in_memory() -> SqlRecordStore:
    store = SqlRecordStore(engine_for("sqlite://"))
    store.migrate()
    return store


@cache
def _leases_in_memory() -> DatabaseLeaseStore:
    return DatabaseLeaseStore(_in_memory())


class Rows(MutableMapping[str, Record]):
    """The rows of all keys, to read and to set."""

    def __init__(self, store: SqlRecordStore) -> None:
        self._store = store
        self._table = store.tables.records

    def __getitem__(self, stored_key: str) -> Record:
        found = self._store.read(stored_key)
        if found is None:
            raise KeyError(stored_key)
        return found

    def __setitem__(self, stored_key: str, record: Record) -> None:
        self.pop(stored_key, None)
        self._store.database.count(insert(self._table), column_values(record))

    def __delitem__(self, stored_key: str) -> None:
        deleting = delete(self._table).where(self._table.c.stored_key == stored_key)
        self._store.database.count(deleting, {})

    def __iter__(self) -> Iterator[str]:
        return iter(
            [row["stored_key"] for row in self._store.database.all(select(self._table), {})]
        )

    def __len__(self) -> int:
        return len(list(iter(self)))


class MemoryRecords(SqlRecordStore):
    """Empty records in SQLite in memory; each step is recorded. *look* is the name of the step that
    inserts or reads. Only the latest store may use the database.
    """

    def __init__(self, clock: ManualClock, journal: Journal, look: str = "claim") -> None:
        # It shares the statements of the first store, because building them takes 30 times as long.
        vars(self).update(vars(_in_memory()))
        self.availability: Any = FixedAvailability()
        self.database.host_now = lambda: EPOCH + round(clock.now() * SECOND)
        with self.database.engine.connect() as connection:
            for table in ("records", "effects", "marks", "groups"):
                connection.exec_driver_sql(f"DELETE FROM {getattr(self.tables, table)}")  # noqa: S608
        #: The same records, for steps of others that are not recorded.
        self.others = copy(_in_memory())
        self.others.availability = self.availability
        self.rows = Rows(self.others)
        noted(self, journal, insert_or_read=look, swap="swap", read="read", settle="settle")

    def row(self, stored_key: str) -> Record | None:
        """The row, without a recorded step."""
        return self.rows.get(stored_key)

    def retry(self, stored_key: str) -> None:
        """An operator's retry: a new fence, no wait, and all counts zero."""
        self.others.reset(stored_key, keep=True, forgive=True)

    def leases(self) -> DatabaseLeaseStore:
        found = copy(_leases_in_memory())
        found.records, found.groups = self, copy(found.groups)
        return found
