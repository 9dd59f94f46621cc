"""The servers of a simulated cluster: the database, the lease store, the broker, the outside world.

A request to a server may wait, fail, be executed late, or be executed without a reply.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import Engine, Executable

from celery_leases.call import Call
from celery_leases.concurrency import wait_limit
from celery_leases.concurrency.shared_trips import SharedTrips
from celery_leases.errors import StoreUnavailable
from celery_leases.groups.slots import Slots, load
from celery_leases.record import State
from celery_leases.stores.sql.connections import engine_for
from celery_leases.stores.sql.database import Availability, Database, _count, _first
from celery_leases.stores.sql.effects import SqlEffectStore
from celery_leases.stores.sql.leases import DatabaseLeaseStore
from celery_leases.stores.sql.records import SqlRecordStore
from tests.distributions.toy_leases import Memory, ToyGroups, ToyLeaseStore
from tests.simulation import work
from tests.simulation.faults import pause
from tests.simulation.history import Row

if TYPE_CHECKING:
    from tests.simulation.world import World

T = TypeVar("T")
EPOCH = 1_700_000_000.0
"""What wall clocks show when a simulation begins, in seconds since 1970."""
QUICK = 0.002
"""Seconds of half a round trip, on average."""


class Server:
    """One server, and what happens to requests to it.

    ``up``: it answers. ``frozen_until``: it executes nothing before. ``cut``: the names of the
    hosts that cannot reach it.
    """

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.clock = world.kernel.clock
        self.alive = True
        self.paused_until = -math.inf
        self.has_threads = False
        self.up = True
        self.frozen_until = -math.inf
        self.cut: set[str] = set()
        #: Whose late request it executes.
        self.client: Any = None
        #: How far its wall clock is ahead of the true time.
        self.ahead = 0.0

    def stop(self) -> None:
        """Accept no connections."""
        self.up = False

    def now(self) -> float:
        """What its wall clock shows, in seconds since 1970."""
        return EPOCH + self.world.scheduler.now + self.ahead

    def request(
        self, what: str, do: Callable[[], T], error: Callable[[bool | None], Exception], wait: float
    ) -> T:
        """Execute *do* for the running thread.

        *error* makes the error for a request that failed; its argument says whether the request was
        executed, as far as the client knows. *wait*: seconds until the client gives up.
        """
        world, scheduler = self.world, self.world.scheduler
        # The checker, before or after the run; a transaction, which is one step; and what a server
        # does of itself, such as the parts of a late request.
        strand = scheduler.current
        if strand is None or strand is world.writer or strand.process is self:
            return do()
        process: Any = strand.process
        who = {"server": self.name, "op": what, "process": process.name}
        fate = world.faults.fate(self, what)
        scheduler.sleep(world.latency(QUICK))
        if fate == "refused" or not self.up:
            world.note("refused", **who)
            raise error(False)
        if fate == "lost request" or process.host in self.cut:
            world.note("lost request", span=wait, **who)
            scheduler.sleep(wait)
            raise error(None)
        frozen = max(0.0, self.frozen_until - scheduler.now)
        if fate == "late" or frozen > wait:
            late = max(frozen, world.random.uniform(0, 10) if fate == "late" else 0.0)
            world.note("late request", late=late, span=wait, **who)
            work = partial(self._execute_late, do, process)
            scheduler.spawn(self, work, f"{self.name} {what}", late)
            scheduler.sleep(wait)
            raise error(None)
        if frozen:
            world.note("slow request", span=frozen, **who)
        while (frozen := self.frozen_until - scheduler.now) > 0:
            scheduler.sleep(frozen)  # another freeze may follow
        if world.writer is not None:
            self._wait_for_transaction(process, who)
        result = do()
        if fate == "lost reply":
            span = world.random.choice((wait, QUICK))
            world.note("lost reply", span=span, **who)
            scheduler.sleep(span)
            raise error(None)
        if fate == "paused":
            pause(world, process)
        scheduler.sleep(world.latency(QUICK))
        return result

    def _wait_for_transaction(self, process: Any, who: dict[str, Any]) -> None:
        """SQLite has one connection, so others wait for a transaction that is open; of a process
        with one body, nothing but the renewal of its own row can come meanwhile.
        """
        world, since = self.world, self.world.scheduler.now
        while (
            self is world.database
            and world.writer is not None
            and (world.writer.process is not process or process.has_threads)
        ):
            world.scheduler.sleep(QUICK)
        if (span := world.scheduler.now - since) > QUICK:
            world.note("slow request", span=span, **who)

    def _execute_late(self, do: Callable[[], object], client: Any) -> None:
        if self.up:
            self._wait_for_transaction(self, {"server": self.name, "process": self.name})
            self.client = client
            try:
                do()
            except Exception as error:  # noqa: BLE001 - nobody reads its reply
                self.world.note("late error", server=self.name, error=str(error))
            finally:
                self.client = None


def shared(
    server: Server,
    do: Callable[[Any], Any],
    error: Callable[[bool | None], Exception],
    wait: Callable[[], float],
) -> SharedTrips[Any, Any]:
    """Trips in which the steps of a process go to *server* together; some are left out, as if their
    row were locked, or the server refused them. Some wait for more, as if many calls ran.
    """

    def one(given: Any) -> Any:
        with suppress(Exception):
            return (do(given) or None) if server.world.random.random() < 0.9 else None

    def together(steps: Sequence[Any]) -> list[Any]:
        return server.request("shared", lambda: [one(given) for given in steps], error, wait())

    return SharedTrips(together, lambda: server.world.random.choice((0, 100)))


# -- the database ----------------------------------------------------------------------------------

STATEMENT_WAIT = 5.0
"""Seconds until a statement without a reply fails."""


class SimulatedDatabase(Database):
    """SQLite in memory behind a server that may fail."""

    server: Server | None = None
    waits = STATEMENT_WAIT

    def _run(self, statement: Executable, values: Mapping[str, Any], read: Any) -> Any:
        run = super()._run
        if self.server is None:
            return run(statement, values, read)
        return self.server.request(
            _names().get(id(statement)) or type(statement).__name__.lower(),
            lambda: run(statement, values, read),
            _database_error,
            wait_limit.bounded(self.waits),
        )


@cache
def _names() -> dict[int, str]:
    """What the statements of a call are called; others are called after their kind."""
    statements, effects, leases = _base_records().statements, _base_effects(), _base_leases()
    claims = (*statements.insert_or_read.values(), statements.swap)
    named = {
        "claim": claims,
        "settle": (statements.settle, statements.settle_success),
        "read": (statements.select_row,),
        "renew": (leases._renew_all, leases._renew_one),
        "effect": (effects._begin,),
    }
    return {id(each): name for name, several in named.items() for each in several}


def _database_error(executed: bool | None) -> StoreUnavailable:
    return StoreUnavailable("the simulated database does not answer", executed)


@cache
def _base_records() -> SqlRecordStore:
    """The one record store of this Python process: building its statements takes a while."""
    store = SqlRecordStore(engine_for("sqlite://"))
    store.database.__class__ = SimulatedDatabase
    store.migrate()
    with store.database.engine.connect() as connection:
        driver: Any = connection.connection.dbapi_connection
        driver.create_function("row_changed", -1, _row_changed)
        old, new = (", ".join(f"{which}.{name}" for name in _COLUMNS) for which in ("OLD", "NEW"))
        none = ", ".join(["NULL"] * len(_COLUMNS))
        for verb, before, after in (
            ("INSERT", none, new),
            ("UPDATE", old, new),
            ("DELETE", old, none),
        ):
            connection.exec_driver_sql(
                f"CREATE TRIGGER note_{verb} AFTER {verb} ON {store.tables.records} "
                f"BEGIN SELECT row_changed({before}, {after}); END"
            )
        driver.create_function("group_changed", 2, _group_changed)
        for verb in ("INSERT", "UPDATE"):
            connection.exec_driver_sql(
                f"CREATE TRIGGER note_group_{verb} AFTER {verb} ON {store.tables.groups} "
                "BEGIN SELECT group_changed(NEW.name, NEW.slots); END"
            )
    return store


_COLUMNS = (
    *("key", "task", "state", "fence", "owner", "call_id", "ended", "result", "retry_at"),
    *("resumes", "reason", "crashes", "expires_at", "details", "lease_until"),
)


def _row_changed(*values: Any) -> None:
    size = len(_COLUMNS)
    if work.current is not None and _is_in_use():
        work.current.row_changed(_noted_row(values[:size]), _noted_row(values[size:]))


def _group_changed(name: str, text: str) -> None:
    if work.current is not None and _is_in_use():
        _note_group(work.current, name, load(text), EPOCH)


def _is_in_use() -> bool:
    """Whether the rows are those of the running simulation, not of the one before."""
    database: Any = _base_records().database
    return database.server is not None


def _note_group(world: World, name: str, slots: Slots, epoch: float) -> None:
    """Note the slots of a group in true time; *epoch*: what the clock of their store shows at its
    beginning.
    """
    held = {token: until / 1000 - epoch for token, (until, _) in slots.held.items()}
    closed, began = slots.closed, slots.began / 1000 - epoch
    ends = None if closed is None else closed.ends / 1000 - epoch
    alone = "" if closed is None else closed.alone
    places = {
        worker: (since / 1000 - epoch, until / 1000 - epoch)
        for worker, (since, until) in slots.places.items()
    }
    state = {"held": held, "closed_until": ends, "alone": alone, "began": began, "places": places}
    world.note("group", group=name, **state)


def _noted_row(values: Sequence[Any]) -> Row | None:
    if values[0] is None:
        return None
    key, task, state, fence, owner, call, ended, result, retry_at, resumes, *more = values
    at, name = retry_at / 1e6 - EPOCH if retry_at else 0.0, work.named(task, key)
    reason, crashes, expires, details, lease = more
    until = expires / 1e6 - EPOCH if expires else math.inf
    told = any(each in details for each in ("crashed_call", "past", "unrun"))
    read = json.loads(details) if told else {}
    counts: dict[str, int] = read.get("other_crashes", {})
    if "crashed_call" in read:
        counts |= {read["crashed_call"]: crashes}
    latest = () if state == State.RUNNING or ended is None or "unrun" in read else (ended,)
    ends = (*(past[2] for past in read.get("past", ())), *latest)
    return Row(
        *(name, task, state, fence, owner, call, ended, result, at, bool(resumes)),
        *(reason, crashes, until, counts, ends, None if lease is None else lease / 1e6 - EPOCH),
    )


@cache
def _base_leases() -> DatabaseLeaseStore:
    return DatabaseLeaseStore(_base_records())


@cache
def _base_effects() -> SqlEffectStore:
    return SqlEffectStore(_base_records().database, _base_records().tables)


class DatabaseServer(Server):
    """The database with all tables."""

    def __init__(self, world: World) -> None:
        super().__init__(world, "database")
        self.records = _base_records()
        database: Any = self.records.database
        database.server = None
        with database.engine.connect() as connection:
            for table in ("records", "effects", "marks", "groups"):
                connection.exec_driver_sql(f"DELETE FROM {getattr(self.records.tables, table)}")  # noqa: S608
        self.records.identity()
        self._driver: Any = database.engine.raw_connection().dbapi_connection
        database.server, database.host_now = self, lambda: round(self.now() * 1e6)

    def rows(self) -> list[Row]:
        """All records."""
        with self.records.database.engine.connect() as connection:
            found = connection.exec_driver_sql(
                f"SELECT {', '.join(_COLUMNS)} FROM {self.records.tables.records}"  # noqa: S608
            )
            return [row for values in found if (row := _noted_row(tuple(values))) is not None]

    def transactional(self) -> Engine:
        """What callers and bodies use for transactions of their own; the records commit each
        statement.
        """
        engine = self.records.database.engine
        return engine.execution_options(isolation_level="SERIALIZABLE")

    def roll_back(self) -> None:
        """Forget what the open transaction has written."""
        self._driver.rollback()

    def has_due_messages(self) -> bool:
        """Whether a record has a message that is to be published."""
        return self.has_messages("publish_at")

    def has_messages(self, column: str = "message") -> bool:
        """Whether a record has a message."""
        query = f"SELECT 1 FROM {self.records.tables.records} WHERE {column} IS NOT NULL"  # noqa: S608
        return self._first(query) is not None

    def effect_state(self, idempotency_key: str) -> str | None:
        """What is stored of an effect."""
        query = f"SELECT state FROM {self.records.tables.effects} WHERE idempotency_key = ?"  # noqa: S608
        found = self._first(query, idempotency_key)
        return found[0] if found is not None else None

    def has_expired(self, at: float) -> bool:
        """Whether the retention of a record is over."""
        query = f"SELECT 1 FROM {self.records.tables.records} WHERE expires_at <= ? AND state <> 'running'"  # noqa: S608
        return self._first(query, round((at + EPOCH) * 1e6)) is not None

    def left_effects(self) -> list[str]:
        """The effects of keys that are left without a record."""
        effects, records = self.records.tables.effects, self.records.tables.records
        without = f"stored_key NOT IN (SELECT stored_key FROM {records})"  # noqa: S608
        query = f"SELECT name FROM {effects} WHERE expires_at IS NULL AND {without}"  # noqa: S608
        return [name for (name,) in self._driver.execute(query).fetchall()]

    def lease_until(self, stored_key: str, token: str) -> float | None:
        """When the lease of *token* ends, in true time."""
        query = f"SELECT lease_until FROM {self.records.tables.records} WHERE stored_key = ? AND owner = ?"  # noqa: S608
        found = self._first(query, stored_key, token)
        return found[0] / 1e6 - EPOCH - self.ahead if found is not None and found[0] else None

    def _first(self, query: str, *values: object) -> Any:
        """What a query of the simulation itself finds first, by the driver alone."""
        return self._driver.execute(query, values).fetchone()

    def record_store(self) -> SqlRecordStore:
        """The store of one process, which notes by itself when the database answers."""
        store = copy(self.records)
        store.availability = Availability()
        return store

    def share_trips(self, records: SqlRecordStore) -> None:
        """Let the calls of a process share statements, as on PostgreSQL; see :func:`shared`."""
        database, statements = records.database, records.statements

        executed: dict[str, tuple[Executable, Any]] = {
            "claims": (statements.insert_or_read[False], _first),
            "successes": (statements.settle_success, _count),
        }

        def execute(step: tuple[str, Mapping[str, Any]]) -> Any:
            statement, read = executed[step[0]]
            return Database._run(database, statement, step[1], read)

        wait = partial(wait_limit.bounded, STATEMENT_WAIT)
        records._trips = shared(self, execute, _database_error, wait)

    def lease_store(self, records: SqlRecordStore) -> DatabaseLeaseStore:
        """Leases in the rows of *records*."""
        store = copy(_base_leases())
        store.records = records
        return store

    def effects(self) -> SqlEffectStore:
        """The effect store."""
        return _base_effects()


# -- the lease store -------------------------------------------------------------------------------

_STEPS = (
    "acquire",
    "release",
    "cool",
    "end_cooldown",
    "holder",
    "reassert",
    "mark",
    "swap_mark",
    "new_order",
    "note_order",
    "burst",
    "end_burst",
    "age",
)
_SHARED_STEPS = ("acquire", "release")
_GROUP_STEPS = ("get", "close", "open", "release_slot", "room")


class LeaseServer(Server):
    """A lease store in memory that loses what it has when it is emptied."""

    def __init__(self, world: World) -> None:
        super().__init__(world, "leases")
        self.memory = Memory(now=self.now, began=-math.inf)
        #: It has evicted keys.
        self.evicts = False

    def lease_store(self, wait: float, *, shares: bool = False) -> SimulatedLeases:
        """The store of one process, whose calls take at most *wait* seconds. It *shares* trips."""
        return SimulatedLeases(self, wait, shares=shares)

    def lease_until(self, stored_key: str, token: str) -> float | None:
        """When the lease of *token* ends, in true time."""
        found = self.memory.leases.get(stored_key)
        if found is None or found.call is None or found.token != token:
            return None
        return found.until - EPOCH - self.ahead

    def held_keys(self, later: float) -> list[str]:
        """The keys that are still held in *later* seconds if nothing happens."""
        now = self.now() + later
        leases = self.memory.leases.items()
        return [key for key, found in leases if found.call is not None and found.until > now]

    def evict(self, stored_key: str) -> Call | None:
        """Lose one lease, as a server with too little memory; returns the call that held it."""
        self.evicts = True
        return self.memory.leases.pop(stored_key).call

    def replica(self) -> tuple[Any, ...]:
        """What a replica has now."""
        leases = {key: copy(lease) for key, lease in self.memory.leases.items()}
        memory = self.memory
        return leases, dict(memory.marks), dict(memory.bursts), dict(memory.groups)

    def restore(self, replica: tuple[Any, ...]) -> None:
        """Go on with what a replica has."""
        memory = self.memory
        memory.leases, memory.marks, memory.bursts, memory.groups = replica
        self.memory.began = self.now()

    def empty(self) -> None:
        """Lose all data, as a server without persistence that restarts."""
        self.memory.leases.clear()
        self.memory.marks.clear()
        self.memory.bursts.clear()
        self.memory.groups.clear()
        self.memory.began = self.now()


class SimulatedGroups(ToyGroups):
    """The groups of :class:`SimulatedLeases`, which executes its requests."""

    request: Callable[..., Any]

    def __init__(self, server: LeaseServer) -> None:
        super().__init__(server.memory)
        self._server = server

    def note(self, group: str, slots: Slots) -> None:
        """Store the slots of *group*, and note them."""
        super().note(group, slots)
        _note_group(self._server.world, group, slots, EPOCH + self._server.ahead)


class SimulatedLeases(ToyLeaseStore):
    """The client of a :class:`LeaseServer`."""

    def __init__(self, server: LeaseServer, wait: float, *, shares: bool = False) -> None:
        super().__init__(server.memory, "simulated")
        self.groups = SimulatedGroups(server)
        self.groups.request = self.request
        self._server = server
        self._wait = wait
        self._trips = shared(server, self._do, self._error, lambda: wait) if shares else None

    def request(self, name: str, do: Callable[[], T]) -> T:
        """Execute *do*."""
        return self._server.request(name, do, self._error, self._wait)

    def _do(self, step: tuple[str, tuple[Any, ...]]) -> tuple[Any]:
        return (getattr(ToyLeaseStore, step[0])(self, *step[1]),)

    def _error(self, executed: bool | None) -> StoreUnavailable:
        return StoreUnavailable("the simulated lease store does not answer", executed)

    def renew(self, renewals: Sequence[Any]) -> list[Any]:
        """Renew each, in one request."""
        do = super().renew
        return self._server.request("renew", lambda: do(renewals), self._error, self._wait)

    def bounded(self, timeout: float, longest_wait: float) -> SimulatedLeases:
        """The same store with another *timeout*."""
        return SimulatedLeases(self._server, timeout)

    def may_have_lost_leases(self, stored_key: str, seconds: float) -> bool:
        """Whether the server lost data within the last *seconds*, or has evicted keys."""
        return self._server.evicts or self.age(stored_key) < seconds


def _requested(name: str, do: Callable[..., Any]) -> Callable[..., Any]:
    def requested(self: Any, *given: Any) -> Any:
        return self.request(name, lambda: do(self, *given))

    return requested


def _together(name: str, alone: Callable[..., Any]) -> Callable[..., Any]:
    def together(self: Any, *given: Any) -> Any:
        if self._trips is None:
            return alone(self, *given)
        (answer,) = self._trips.run((name, given), lambda: (alone(self, *given),))
        return answer

    return together


for _name in _GROUP_STEPS:
    setattr(SimulatedGroups, _name, _requested(_name, getattr(ToyGroups, _name)))
for _name in _STEPS:
    setattr(SimulatedLeases, _name, _requested(_name, getattr(ToyLeaseStore, _name)))
for _name in _SHARED_STEPS:
    setattr(SimulatedLeases, _name, _together(_name, getattr(SimulatedLeases, _name)))
