"""One run of a simulated cluster: everything follows from its seed."""

from __future__ import annotations

import json
import os
import random as random_module
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from functools import cache, partial
from itertools import count
from random import Random
from typing import Any
from unittest.mock import Mock, patch

from celery.worker import state as worker_state
from celery.worker import strategy

from celery_leases.attempt.held_lease import HeldLease
from celery_leases.concurrency import os_threads, wait_limit
from celery_leases.events import LeaseAcquired, LeaseLost, LeaseRenewed
from celery_leases.worker import child_exit, delivery, processes, request, requeue
from celery_leases.worker.app_settings import settings_of
from tests.simulation import broker as broker_module
from tests.simulation import work
from tests.simulation.broker import Broker
from tests.simulation.faults import ACCIDENTS, Accident, Faults
from tests.simulation.history import Note, Row
from tests.simulation.processes import Child, SimulatedProcess, Worker
from tests.simulation.scheduler import Scheduler, Strand
from tests.simulation.servers import EPOCH, DatabaseServer, LeaseServer, Server

TASKS = ("once", "each", "latest", "limited", "killed", "charged")
HORIZON = 60.0
"""Seconds in which calls are published and accidents happen."""
PATIENCE = 4 * 3600.0
"""Seconds after which everything must be quiet."""


@dataclass
class Plan:
    """What one body does: it works for some seconds in each of its steps, then ends."""

    steps: list[float]
    ending: str
    checks: bool


@dataclass
class Kernel:
    """The owner of what belongs to no process."""

    name: str = "kernel"
    host: str = "nowhere"
    alive: bool = True
    paused_until: float = float("-inf")


@dataclass
class Shape:
    """What a cluster is made of."""

    workers: int
    children: int
    keys: int
    calls: int
    accidents: int
    database_leases: bool
    visibility: float | None
    tasks: tuple[str, ...]

    @classmethod
    def drawn(cls, random: Random) -> Shape:
        """The cluster of one seed."""
        tasks = tuple(random.sample(TASKS, random.choice((1, 1, 2))))
        # The lease store in memory has no slots, so that limits are those of the database.
        return cls(
            workers=random.choice((1, 2, 3)),
            children=random.choice((1, 2, 3)),
            keys=random.choice((1, 1, 2, 4)),
            calls=random.choice((4, 8, 12)),
            accidents=random.choice((0, 2, 5, 10)),
            database_leases=random.random() < 0.5 or "limited" in tasks,
            visibility=random.choice((None, None, 10.0, 60.0)),
            tasks=tasks,
        )


@dataclass
class World:
    """A cluster, its history, and the observer of the library's events."""

    seed: int
    shape: Shape = field(init=False)
    history: list[Note] = field(default_factory=list)
    processes: dict[int, Any] = field(default_factory=dict)
    results: dict[bytes, Any] = field(default_factory=dict)
    workers: list[Worker] = field(default_factory=list)
    #: Calls and accidents that are left out, such as ``"call 3"``.
    without: frozenset[str] = frozenset()
    given: Shape | None = None
    accidents: tuple[Accident, ...] = ACCIDENTS

    def __post_init__(self) -> None:
        self.random = Random(self.seed)
        self.shape = self.given or Shape.drawn(self.random)
        self.scheduler = Scheduler(self.random)
        self.kernel = Kernel()
        self.faults = Faults.drawn(self.random)
        self.outside = work.Outside()
        self.app = work.app()
        self.shortest_ttl = work.TTL
        self._numbers: dict[str, Iterator[int]] = {}
        self._published = 0
        self._bytes = Random(self.seed)
        self._recording = True

    # -- what happens ------------------------------------------------------------------------------

    def run(self) -> list[Note]:
        """Run the cluster until it is quiet; returns its history."""
        _warm_up()
        return self._run()

    def _run(self) -> list[Note]:
        with simulated(self):
            self.settings = settings_of(self.app)
            self.database = DatabaseServer(self)
            self.history.clear()  # of the rows of another run
            self.leases = None if self.shape.database_leases else LeaseServer(self)
            self.broker = broker_module.current = Broker(self, self.shape.visibility)
            self.servers: list[Server] = [self.database, self.broker]
            if self.leases is not None:
                self.servers.append(self.leases)
            self.tasks = [self.app.tasks[name] for name in self.shape.tasks]
            self.client = SimulatedProcess(self, "client", "client")
            for number in range(self.shape.workers):
                self.workers.append(Worker(self, f"worker-{number}", self.shape.children))
            self._plan_calls_and_accidents()
            self.later(HORIZON, self._heal)
            self.scheduler.run(self._is_over)
            self._note_final()
            self._recording = False
            self.scheduler.end()
            if self.scheduler.failure is not None:
                raise self.scheduler.failure
        return self.history

    def _plan_calls_and_accidents(self) -> None:
        at = 0.0
        for number in range(1, self.shape.calls + 1):
            if self.random.random() < 0.6:  # otherwise it comes together with the call before
                at = self.random.uniform(0, HORIZON * 0.8)
            task, key = self.random.choice(self.shape.tasks), self.random.randrange(self.shape.keys)
            if f"call {number}" not in self.without:
                self.later(at, partial(self._call, number, task, f"k{key}"), self.client)
        for number in range(1, self.shape.accidents + 1):
            accident, at = self.random.choice(self.accidents), self.random.uniform(0, HORIZON)
            if f"accident {number}" not in self.without:
                self.later(at, partial(accident, self))

    def _call(self, number: int, name: str, key: str) -> None:
        task, call_id = self.app.tasks[name], f"call-{number}"
        who = {"task": task.name, "key": f"{task.name} {key}", "call": call_id, "number": number}
        self.note("calls", **who)
        try:
            task.apply_async((key, number), task_id=call_id)
        except Exception as error:  # noqa: BLE001 - the caller learns that it was not confirmed
            self.note("unconfirmed", error=type(error).__name__, **who)
        else:
            self.note("published", **who)

    def _heal(self) -> None:
        self.faults.active = False
        self.faults.reorder = 0.0
        for server in self.servers:
            server.up, server.frozen_until = True, -1.0
            server.cut.clear()
        for process in self.processes.values():
            process.paused_until = -1.0
        self.broker.wake_all()
        self.note("healed")

    def _is_over(self) -> bool:
        # Leases of dead processes end by themselves.
        quiet = self.scheduler.now > HORIZON + 10 * self.shortest_ttl and self._is_quiet()
        return quiet or self.scheduler.now > PATIENCE

    def _is_quiet(self) -> bool:
        return self.broker.is_empty() and not any(
            child.request for worker in self.workers for child in worker.children
        )

    def _note_final(self) -> None:
        answers, values = {}, {}
        for key, stored in self.results.items():
            meta = json.loads(stored)
            call_id = key.decode().removeprefix("celery-task-meta-")
            answers[call_id] = meta["status"]
            if meta["status"] == "SUCCESS":
                values[call_id] = meta["result"]
        self.note(
            "final",
            rows=self.database.rows(),
            held=[] if self.leases is None else self.leases.held_keys(),
            answers=answers,
            values=values,
            quiet=self._is_quiet(),
        )

    def row_changed(self, old: Row | None, new: Row | None) -> None:
        """Note a write of the database to a record."""
        row, by = new or old, self.here
        assert row is not None
        by = getattr(by, "client", None) or by
        self.note("row", key=row.key, old=old, new=new, by=by.name, pid=getattr(by, "pid", None))

    def plan(self) -> Plan:
        """What the next body does."""
        random = self.random
        endings = ("return",) * 12 + ("retry", "retry", "cooldown", "later", "snooze", "permanent")
        lengths = random.choice(((0.01,), (0.2, 0.3), (1.0, 1.0, 1.0), (2.0,) * 5, (8.0,)))
        ending = random.choice(endings) if self.scheduler.now < HORIZON else "return"
        return Plan(list(lengths), ending, random.random() < 0.7)

    # -- what bodies do ----------------------------------------------------------------------------

    def body_began(self, stored_key: str, **who: Any) -> None:
        """A body begins."""
        until = self._lease_until(stored_key, who["token"])
        self.note("body", process=self.here.name, store_until=until, **who)

    def body_ended(self, **who: Any) -> None:
        """A body has ended."""
        self.note("body ended", process=self.here.name, **who)

    def charge(self, idempotency_key: str) -> str:
        """Call the outside world, which takes a moment."""
        self.scheduler.sleep(self.latency(0.05))
        drawn = self.random.random() if self.scheduler.now < HORIZON else 1.0
        if drawn < 0.05:
            raise ConnectionRefusedError("simulated")
        reply = self.outside.charge(idempotency_key)
        self.note("charged", effect=idempotency_key, process=self.here.name)
        if drawn < 0.15:
            raise TimeoutError("simulated")
        self.scheduler.sleep(self.latency(0.05))
        return reply

    def find_charge(self, idempotency_key: str) -> str | None:
        """Ask the outside world what has become of a charge."""
        self.scheduler.sleep(self.latency(0.05))
        return self.outside.find(idempotency_key)

    # -- the observer ------------------------------------------------------------------------------

    def wants(self, kind: type[Any]) -> bool:
        """All events."""
        return True

    def observe(self, event: Any) -> None:
        """Note an event of the library."""
        given = {each.name: getattr(event, each.name) for each in fields(event)}
        self.note(f"event {type(event).__name__}", **given)
        if isinstance(event, LeaseAcquired | LeaseRenewed | LeaseLost):
            for held_lease in self.here.library.renewer.held_leases:
                if held_lease.call.call_id == event.call_id:
                    self._note_lease(held_lease, event)

    def _note_lease(self, held_lease: HeldLease, event: Any) -> None:
        """Note until when a process counts on a lease, and until when its store does."""
        call, clock, token = held_lease.call, self.here.clock, held_lease.call.token
        if isinstance(event, LeaseLost):
            key = f"{call.task} {call.key.key}"
            self.note("lost", key=key, token=token, process=self.here.name)
            return
        until = self._lease_until(call.key.stored, token)
        if until is not None:
            hard, stop = held_lease.hard_deadline, held_lease.stop_deadline
            self.note(
                "holds",
                key=f"{call.task} {call.key.key}",
                token=token,
                until=clock.true_time(max(hard, stop)),
                store_until=until,
            )

    def _lease_until(self, stored_key: str, token: str) -> float | None:
        """When the lease of *token* ends for its store, in true time."""
        server = self.leases or self.database
        strand, self.scheduler.current = self.scheduler.current, None  # this is no request
        try:
            return server.lease_until(stored_key, token)
        finally:
            self.scheduler.current = strand

    # -- processes ---------------------------------------------------------------------------------

    @property
    def here(self) -> Any:
        """The process of the running thread."""
        strand = self.scheduler.current
        return strand.process if strand is not None else self.kernel

    def end_child(self, child: SimulatedProcess) -> None:
        """Kill a child, or the process that a kill timer ends."""
        for worker in self.workers:
            if isinstance(child, Child) and child in worker.children:
                worker.child_died(child)

    def replace_worker(self, worker: Worker) -> None:
        """Kill a worker; another one starts in a while."""
        worker.kill()
        self.workers.remove(worker)
        name = f"worker-{self.shape.workers + self.numbered('worker')}"

        def start() -> None:
            self.workers.append(Worker(self, name, self.shape.children))

        if self.workers:
            self.later(self.random.uniform(0.5, 5.0), start)
        else:
            start()

    def later(self, after: float, what: Callable[[], object], process: Any = None) -> Strand:
        """Do *what* in *after* seconds."""
        return self.scheduler.spawn(process or self.kernel, what, "later", after)

    def latency(self, usual: float) -> float:
        """Seconds that something takes which usually takes *usual*."""
        drawn = self.random.random()
        return usual * (drawn if drawn < 0.9 else drawn * 20 if drawn < 0.99 else drawn * 100)

    def wall_time(self) -> float:
        """What wall clocks of processes show."""
        return EPOCH + self.scheduler.now

    def new_pid(self) -> int:
        """The number of a new process."""
        return 10_000 + self.numbered("pid")

    def numbered(self, what: str) -> int:
        """The next number of its kind."""
        return next(self._numbers.setdefault(what, count(1)))

    def random_bytes(self, size: int) -> bytes:
        """What the system's random generator gives."""
        return self._bytes.randbytes(size)

    def note(self, what: str, **details: Any) -> None:
        """Add to the history."""
        if self._recording:
            self.history.append(Note(self.scheduler.now, what, details))


@cache
def _warm_up() -> None:
    """Run what happens once in a Python process, so that all seeds of it meet the same."""
    for database_leases in (False, True):
        everything = Shape(2, 2, 2, 20, 10, database_leases, None, TASKS)
        if not database_leases:
            everything.tasks = tuple(name for name in TASKS if name != "limited")
        World(0, given=everything)._run()


# -- what the simulation replaces ------------------------------------------------------------------


class Lock:
    """A lock between simulated threads."""

    def __init__(self) -> None:
        self._held = False
        self._waiting: list[Strand] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        scheduler = work.world().scheduler
        while self._held:
            if not blocking or scheduler.current is None:
                return False
            self._waiting.append(scheduler.current)
            scheduler.park(1.0)
        self._held = True
        return True

    def release(self) -> None:
        self._held = False
        waiting, self._waiting = self._waiting, []
        for strand in waiting:
            work.world().scheduler.wake(strand)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Wakeup:
    """Wakes one waiting simulated thread."""

    def __init__(self) -> None:
        self._notified = False
        self._waiting: Strand | None = None

    def notify(self) -> None:
        self._notified = True
        if self._waiting is not None:
            work.world().scheduler.wake(self._waiting)

    def wait(self, timeout: float | None) -> None:
        scheduler = work.world().scheduler
        if not self._notified:
            self._waiting = scheduler.current
            scheduler.park(min(3600.0 if timeout is None else timeout, 3600.0))
            self._waiting = None
        self._notified = False


@contextmanager
def simulated(world: World) -> Iterator[None]:
    """Replace clocks, randomness, threads and processes by those of *world*."""

    def now() -> float:
        here = world.here
        return here.clock.now() if hasattr(here, "clock") else world.scheduler.now

    def start_thread(target: Callable[[], object]) -> None:
        world.scheduler.spawn(world.here, target, "thread")

    def order(app: Any) -> int:
        return int(world.here.arrivals.order(app))

    replaced: list[tuple[Any, str, Any]] = [
        (os, "urandom", world.random_bytes),
        (random_module, "_urandom", world.random_bytes),
        (os, "getpid", lambda: getattr(world.here, "pid", 1)),
        (time, "time", world.wall_time),
        (time, "monotonic", now),
        (time, "sleep", world.scheduler.sleep),
        (os_threads, "allocate_lock", Lock),
        (os_threads, "Wakeup", Wakeup),
        (os_threads, "start_thread", start_thread),
        (os_threads, "boot_clock", now),
        (wait_limit, "boot_clock", now),
        (processes, "process_of", lambda *_, **__: world.here.library),
        (processes, "current_worker", lambda: None),
        (delivery, "interrupt_guard_here", lambda _, token=None: world.here.guard(token)),
        (child_exit, "_exists", lambda pid: pid in world.processes),
        (child_exit, "watch", lambda _: None),
        (child_exit, "_stores_lock", Lock()),
        (child_exit, "_unfinished", []),
        (requeue, "_requeued", OrderedDict()),
        (strategy, "to_timestamp", lambda moment: moment.timestamp()),
        (request, "arrivals", Mock(order=order)),
        (request, "waiting_calls", Mock(by_key={}, **{"begins_early.return_value": False})),
        (work, "current", world),
    ]
    worker_state.reset_state()
    with ExitStack() as stack:
        for target, name, value in replaced:
            stack.enter_context(patch.object(target, name, value))
        yield
