"""One run of a simulated cluster: everything follows from its seed."""

from __future__ import annotations

import json
import math
import os
import random as random_module
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from functools import cache, cached_property, partial
from itertools import count
from random import Random
from types import SimpleNamespace
from typing import Any

from billiard import einfo
from celery.local import Proxy
from celery.worker import request as celery_request
from celery.worker import state as worker_state
from celery.worker import strategy
from sqlalchemy.orm import Session

from celery_leases.attempt import renewal
from celery_leases.attempt.held_lease import HeldLease
from celery_leases.concurrency import os_threads, shared_trips
from celery_leases.errors import StoreUnavailable
from celery_leases.events import LeaseAcquired, LeaseLost, LeaseRenewed
from celery_leases.ops.client import OperatorClient
from celery_leases.options import LONGEST_COUNTDOWN
from celery_leases.outbox.calls import relay, rescue
from celery_leases.record import Ended
from celery_leases.stores.redis import workers as redis_workers
from celery_leases.stores.sql import database
from celery_leases.worker import (
    app_settings,
    child_exit,
    database_watch,
    delivery,
    interrupts,
    processes,
    request,
    requeue,
    takeover,
    waiting_calls,
)
from celery_leases.worker.app_settings import settings_of
from celery_leases.worker.routes import DELIVERY_LIMIT
from tests.simulation import broker as broker_module
from tests.simulation import work
from tests.simulation.broker import QUEUE, Broker
from tests.simulation.faults import (
    ACCIDENTS,
    UNSAFE,
    Accident,
    Faults,
    evict_key,
    lose_message,
    pause,
    silence_database,
    step_database_clock,
)
from tests.simulation.history import Note, Row
from tests.simulation.processes import (
    SimulatedClock,
    SimulatedKillTimer,
    SimulatedProcess,
    StateOfWorker,
    Worker,
)
from tests.simulation.scheduler import Scheduler, Strand
from tests.simulation.servers import EPOCH, QUICK, DatabaseServer, LeaseServer, Server
from tests.simulation.work import OUTBOX_TASKS
from tests.simulation.worker_leases import SimulatedWorkers

TASKS = (
    *("once", "each", "latest", "limited", "rated", "booked", "killed", "charged"),
    *("timed", "picky", "completed", "queued", "enqueued", "both", "strict", "lazy"),
)
OTHER_TASKS = ("each-charged", "latest-charged", "fused", "stored", "pooled")
"""Tasks that some runs have instead of these."""
RESCUE_AFTER = 20.0
"""Seconds without a change after which a message counts as lost."""
PREFORK_TASKS = ("killed", "timed")
"""Tasks that other pools do not support."""
ENDINGS = ("retry", "cooldown", "error", "dies", "stalls", "self.retry", "closes")
"""How most bodies of a run end, if it has such a habit."""
AMBIGUOUS = "timeout"
"""How most bodies of some other runs end: the work may have been done all the same."""
HABITS = (*ENDINGS, "extends", "loops")
"""What most bodies of a run do, if it has a habit."""
REJECTIONS = (*("rejects",) * 4, "closes", "snooze", "self.retry", "retry")
"""How most bodies of some other runs end: some of them show nothing about their group."""
CELERYS_ENDS = ("ignore", "reject", "requeue", "requeue", "return")
"""How most bodies of some runs end: as only Celery ends a call."""
DAY = 86_400.0
TIMER_SLACK = 5e-5
"""Seconds by which the kernel ends a wait late."""
LONG_BODY = 100.0
"""Seconds that a long body lasts."""
BURST_TASKS = ("latest", "latest", "latest", "debounced", "latest-charged", "each")
"""Tasks of the runs in which calls come in bursts."""
BURST_BODIES = ((2.0,) * 5, (4.0,) * 5, (8.0,) * 5)
"""The steps of many bodies in these runs."""
PATIENCE = 4 * 3600.0
"""Seconds after the last fault, and the last cooldown, after which everything must be quiet."""


@dataclass
class Plan:
    """What one body does: it works for some seconds in each of its steps, then ends."""

    steps: list[float]
    ending: str
    checks: bool
    habit: str = ""


@dataclass
class Kernel:
    """The owner of what belongs to no process."""

    clock: SimulatedClock
    name: str = "kernel"
    host: str = "nowhere"
    alive: bool = True
    paused_until: float = float("-inf")
    has_threads: bool = False


@dataclass
class Shape:
    """What a cluster is made of."""

    workers: int
    #: Processes or threads of each worker.
    places: int
    threads: bool
    keys: int
    calls: int
    accidents: int
    database_leases: bool
    visibility: float | None
    tasks: tuple[str, ...]
    #: Seconds in which calls are published and accidents happen.
    span: float = 60.0
    #: The clock of the lease store steps.
    unsafe: bool = False
    #: The broker loses messages.
    loses: bool = False
    #: Workers have leases of their own.
    takeover: bool = False
    #: Workers begin waiting calls as soon as their key is free.
    early: bool = False
    #: What most bodies do.
    habit: str = ""
    #: The only kinds of accidents that happen; ``None``: all.
    kinds: tuple[Accident, ...] | None = None
    #: The database, which has the leases, is silent again and again.
    silent: bool = False
    #: Bodies ask the outside world for an effect of which they do not know whether it was executed.
    asks: bool = True
    #: Some bodies last longer than workers look for what a dead one has fetched.
    long_bodies: bool = False
    #: Some calls come from a producer without the library, as by ``send_task()``.
    plain: bool = False
    #: The clock of the database steps.
    database_steps: bool = False
    #: How often the broker's queue takes a message back; ``None``: it does not count that.
    delivery_limit: int | None = None
    #: Calls come in bursts, and many bodies last for 10 to 40 s.
    bursts: bool = False
    #: When the broker takes no messages, and for how long.
    takes_none: tuple[float, float] | None = None
    #: How long a message waits in a worker, as the app's ``consumer_timeout`` allows it.
    longest_countdown: float = LONGEST_COUNTDOWN

    def draw_limit(self, random: Random) -> None:
        """Let some runs have a quorum queue of RabbitMQ."""
        if self.visibility is not None or random.random() > 0.35:
            return
        self.delivery_limit = random.choice((1, 1, 2, 2, 3, 5, DELIVERY_LIMIT))
        self.longest_countdown = random.choice((10.0, 20.0, LONGEST_COUNTDOWN))
        if random.random() < 0.7:
            span = random.choice((20.0, 200.0, 3000.0))
            self.takes_none = random.uniform(0, self.span / 2), span

    @property
    def queue_arguments(self) -> dict[str, Any] | None:
        """What the app says of the broker's queue."""
        if self.delivery_limit is None:
            return None
        own = self.delivery_limit != DELIVERY_LIMIT
        limit = {"x-delivery-limit": self.delivery_limit} if own else {}
        return {"x-queue-type": "quorum", **limit}

    def draw_others(self, random: Random) -> None:
        """Let some runs have other tasks."""
        if random.random() > 0.2:
            return
        self.tasks = work.expanded(random.sample(OTHER_TASKS, random.choice((1, 1, 2))))
        self.loses = random.random() < 0.5 and set(self.tasks) <= set(OUTBOX_TASKS)
        if "fused" in self.tasks and random.random() < 0.5:
            self.habit = "closes"
        if "stored" in self.tasks and self.loses and random.random() < 0.5:
            self.habit = "self.retry"

    def draw_brief(self, random: Random) -> None:
        """Let some runs have tasks whose records expire, and are purged, within the run."""
        if self.span < DAY and random.random() < 0.03:
            self.tasks = tuple(random.sample(work.BRIEF, random.choice((1, 1, 2))))
            self.keys, self.loses = random.choice((1, 1, 2)), False
            self.calls = random.choice((8, 12, 16))

    def draw_compared(self, random: Random) -> None:
        """Let some runs have a task that refuses calls with other arguments."""
        if self.span < DAY and random.random() < 0.03:
            self.tasks, self.keys, self.loses = (work.COMPARED,), 1, False

    def draw_seldom(self, random: Random) -> None:
        """Let some runs have tasks of a kind that is seldom."""
        if self.span < DAY and random.random() < 0.04:
            self.tasks, self.loses = (random.choice(work.SELDOM),), False
        elif self.span < DAY and random.random() < 0.02:
            self.tasks, self.loses = (work.REPEATED,), False

    def draw_rejections(self, random: Random) -> None:
        """Let most bodies of some runs be rejected, which closes their groups."""
        in_groups = bool(set(self.tasks) & work.GROUPS.keys())
        if random.random() < (0.2 if in_groups else 0.04):
            self.habit = "rejects"

    def draw_ambiguous(self, random: Random) -> None:
        """Let most bodies of some runs fail in a way that does not show what they have done."""
        if random.random() < 0.03:
            self.habit = AMBIGUOUS

    def draw_poison(self, random: Random) -> None:
        """Let most bodies of some runs end the whole worker, while the lease store evicts keys."""
        if self.span < DAY and random.random() < 0.01:
            self.threads, self.places, self.workers = True, random.choice((2, 4)), 2
            self.database_leases, self.takeover, self.visibility = False, False, 10.0
            self.tasks, self.keys, self.calls = (random.choice(("once", "each", "limited")),), 1, 4
            self.span, self.habit, self.loses, self.bursts = 1200.0, "dies", False, False
            self.delivery_limit, self.takes_none = None, None
            self.kinds, self.accidents = (evict_key,), random.choice((0, 2, 5))

    def draw_ends(self, random: Random) -> None:
        """Let most bodies of some runs end as only Celery ends a call."""
        if random.random() < 0.04:
            self.habit = "Celery's ends"

    def draw_kinds(self, random: Random, accidents: Sequence[Accident]) -> None:
        """Let some runs have a few kinds of accidents only, so that the same ones come together."""
        if self.span < DAY and random.random() < 0.3:
            self.kinds = tuple(random.sample(accidents, random.choice((1, 2, 2, 3))))
            self.accidents = max(self.accidents, random.choice((2, 5, 10)))

    def draw_debounced(self, random: Random) -> None:
        """Let some runs wait for the end of a burst of calls."""
        if random.random() < 0.4:
            self.tasks = tuple("debounced" if name == "latest" else name for name in self.tasks)

    def draw_full_groups(self, random: Random) -> None:
        """Let workers of some runs have many calls that wait for their turn in a group."""
        if self.span < DAY and set(self.tasks) & work.GROUPS.keys() and random.random() < 0.25:
            self.workers, self.keys = random.choice((2, 2, 3)), random.choice((4, 8))
            self.calls, self.accidents = random.choice((16, 24)), random.choice((0, 2, 5))
            self.early = self.delivery_limit is None

    def draw_long(self, random: Random) -> None:
        """Let some runs with leases of workers have long bodies."""
        self.long_bodies = self.takeover and random.random() < 0.2
        if self.long_bodies:
            self.accidents = random.choice((5, 10))

    def draw_plain(self, random: Random) -> None:
        """Let some runs have calls without an order under ``lease_runs="latest"``."""
        self.plain = random.random() < 0.6 and bool(set(self.tasks) & set(work.NEWEST_RUNS))

    def draw_bursts(self, random: Random) -> None:
        """Let some runs have bursts of calls, of which most tasks run only the newest."""
        self.bursts = self.span < DAY and not self.long_bodies and random.random() < 0.04
        if not self.bursts:
            return
        self.tasks, self.loses = (random.choice(BURST_TASKS),), False
        self.keys, self.calls = random.choice((1, 1, 2)), random.choice((8, 16, 30))
        self.accidents = random.choice((0, 2, 5))
        self.plain &= random.random() < 0.3

    def draw_silences(self, random: Random) -> None:
        """Let the database that has the leases be silent again and again in some runs, while the
        main processes watch it because of calls with a short time limit.
        """
        if (
            self.database_leases
            and self.span == 60.0
            and not self.bursts
            and random.random() < 0.15
        ):
            self.silent, self.loses, self.kinds, self.accidents = True, False, None, 20
            self.calls = random.choice((12, 16, 24))
            self.habit = random.choice(("stalls", "stalls", "loops", ""))
            if not self.threads:
                self.tasks, self.keys = ("timed",), random.choice((1, 2, 4))

    def draw_database_steps(self, random: Random) -> None:
        """Let the clock of the database step in some runs."""
        if self.span < DAY and not self.purges and random.random() < 0.03:
            self.database_steps = True
            self.accidents = max(self.accidents, 5)

    @property
    def purges(self) -> bool:
        """Whether records expire within the run."""
        return not set(work.BRIEF).isdisjoint(self.tasks)

    @classmethod
    def drawn(cls, random: Random, *, day: bool = False) -> Shape:
        """The cluster of one seed; *day*: it is observed for a day."""
        threads = random.random() < 0.25
        possible = [name for name in TASKS if not (threads and name in PREFORK_TASKS)]
        tasks = work.expanded(random.sample(possible, random.choice((1, 1, 2))))
        takeover = random.random() < 0.25
        span = random.choice((60.0,) * 54 + (600.0,) * 5 + (DAY,))
        span = DAY if day else span
        return cls(
            span=span,
            workers=random.choice((1, 2, 3)) if span < DAY else 3,
            places=random.choice((1, 2, 3)) * (4 if threads else 1),
            threads=threads,
            keys=random.choice((1, 1, 2, 4)) * (3 if threads else 1) if span < DAY else 20,
            calls=random.choice((4, 8, 12)) if span < DAY else 60,
            accidents=random.choice((0, 2, 5, 10)) if span < DAY else 10,
            database_leases=random.random() < 0.5,
            visibility=3600.0 if takeover else random.choice((None, None, 10.0, 60.0)),
            takeover=takeover,
            tasks=tasks,
            unsafe=random.random() < 0.1,
            loses=random.random() < 0.5 and set(tasks) <= set(OUTBOX_TASKS),
            early=random.random() < 0.5,
        )


@dataclass
class World:
    """A cluster, its history, and the observer of the library's events."""

    seed: int
    shape: Shape = field(init=False)
    history: list[Note] = field(default_factory=list)
    processes: dict[int, Any] = field(default_factory=dict)
    results: dict[bytes, Any] = field(default_factory=dict)
    #: When their calls ended.
    answered: dict[bytes, float] = field(default_factory=dict)
    workers: list[Worker] = field(default_factory=list)
    #: Calls and accidents that are left out, such as ``"call 3"``.
    without: frozenset[str] = frozenset()
    given: Shape | None = None
    day: bool = False
    accidents: tuple[Accident, ...] = ACCIDENTS
    bodies: int = 0

    def __post_init__(self) -> None:
        self.random = Random(self.seed)
        self.shape = self.given or Shape.drawn(self.random, day=self.day)
        habits = Random(f"habit of {self.seed}")  # so that the other seeds stay as they are
        if self.given is None and habits.random() < 0.3:
            self.shape.habit = habits.choice(HABITS)
        if self.given is None:
            self.shape.draw_others(Random(f"other tasks of {self.seed}"))
            self.shape.draw_limit(Random(f"delivery limit of {self.seed}"))
            self.shape.draw_brief(Random(f"brief tasks of {self.seed}"))
            self.shape.draw_compared(Random(f"compared {self.seed}"))
            self.shape.draw_seldom(Random(f"seldom {self.seed}"))
            self.shape.draw_rejections(Random(f"rejections of {self.seed}"))
            self.shape.draw_ambiguous(Random(f"ambiguous {self.seed}"))
            self.shape.draw_ends(Random(f"ends of {self.seed}"))
            self.shape.draw_kinds(Random(f"kinds of {self.seed}"), self.accidents)
            self.shape.draw_debounced(Random(f"debounced {self.seed}"))
            self.shape.draw_long(Random(f"long {self.seed}"))
            self.shape.draw_full_groups(Random(f"full group {self.seed}"))
            self.shape.draw_plain(Random(f"plain {self.seed}"))
            self.shape.draw_bursts(Random(f"bursts {self.seed}"))
            self.shape.draw_silences(Random(f"a silent database of {self.seed}"))
            self.shape.draw_poison(Random(f"poison of {self.seed}"))
            self.shape.draw_database_steps(Random(f"the database's clock of {self.seed}"))
            self.shape.asks = Random(f"asks {self.seed}").random() > 0.2
        self.scheduler = Scheduler(self.random)
        self.kernel = Kernel(SimulatedClock(self, 0.0, 1.0))
        self.faults = Faults.drawn(
            self.random,
            Random(f"others {self.seed}"),
            effects="charged" in str(self.shape.tasks),
            queues="queued" in self.shape.tasks,
            purges=self.shape.purges,
        )
        self.outside = work.Outside()
        self.app = work.app()
        self.shortest_ttl = work.TTL
        # In a day an idle worker renews its lease often enough.
        self.ttl_of_workers = work.TTL if self.shape.span < DAY else 5 * work.TTL
        self._clocks: dict[str, SimulatedClock] = {}
        self._numbers: dict[str, Iterator[int]] = {}
        self._published = 0
        self._bytes = Random(self.seed)
        self._recording = True
        self._quiet_since = math.inf
        #: When the longest cooldown ends.
        self._waits_until = 0.0
        #: The writes of an open transaction.
        #: The thread that has a transaction open, and what its process has written meanwhile.
        self.writer: Strand | None = None
        self.uncommitted: list[tuple[Row | None, Row | None]] = []

    # -- what happens ------------------------------------------------------------------------------

    def run(self) -> list[Note]:
        """Run the cluster until it is quiet; returns its history."""
        _warm_up()
        return self._run()

    def _run(self) -> list[Note]:
        with simulated(self):
            longest = self.shape.longest_countdown
            self.settings = replace(settings_of(self.app), longest_countdown=longest)
            self.database = DatabaseServer(self)
            self.leases = None if self.shape.database_leases else LeaseServer(self)
            self.broker = broker_module.current = Broker(
                self, self.shape.visibility, self.shape.delivery_limit
            )
            self.servers: list[Server] = [self.database, self.broker]
            if self.leases is not None:
                self.servers.append(self.leases)
            self.tasks = [self.app.tasks[name] for name in self.shape.tasks]
            self.client = SimulatedProcess(self, "client", "client")
            for number in range(self.shape.workers):
                self.workers.append(Worker(self, f"worker-{number}"))
            self._plan_calls_and_accidents()
            if self.shape.takes_none is not None:
                self.later(self.shape.takes_none[0], self._take_none)
            self.later(self.shape.span, self._heal)
            if set(self.shape.tasks) & set(OUTBOX_TASKS):
                self.scheduler.spawn(self.client, self._keep_outbox, "outbox")
            if self.shape.purges:
                self.scheduler.spawn(self.client, self._purge, "purge")
            self.scheduler.run(self._is_over, self._settled_at)
            self._note_final()
            self._recording = False
            self.scheduler.end()
            if self.scheduler.failure is not None:
                raise self.scheduler.failure
        return self.history

    def _plan_calls_and_accidents(self) -> None:
        at, task, key = 0.0, self.shape.tasks[0], 0
        for number in range(1, self.shape.calls + 1):
            # Otherwise it comes together with the call before, as what shares statements does, or
            # finds what the call before has left in the row of its key.
            drawn, soon = self.random.random(), self.random.random() < 0.5
            if self.shape.bursts and number > 1 and drawn < 0.9:
                # The next call of a burst, seldom after a pause.
                longest = 0.5 if drawn < 0.5 else 2.0 if drawn < 0.85 else 8.0
                at = min(at + self.random.uniform(0, longest), self.shape.span * 0.9)
            elif drawn < (0.2 if self.shape.threads else 0.4):
                at = self.random.uniform(0, self.shape.span * 0.8)
            elif soon:
                at = min(at + self.random.uniform(0, 1.5 * work.COOLDOWN), self.shape.span * 0.8)
            if (drawn >= 0.9 or number == 1) if self.shape.bursts else (drawn < 0.4 or not soon):
                task = self.random.choice(self.shape.tasks)
                key = self.random.randrange(self.shape.keys)
            if f"call {number}" not in self.without:
                self.later(at, partial(self._call, number, task, f"k{key}"), self.client)
        for number in range(1, self.shape.accidents + 1):
            possible = self.shape.kinds or self.accidents
            possible += UNSAFE if self.shape.unsafe else ()
            possible += (lose_message,) * 4 if self.shape.loses else ()
            possible += (silence_database,) * 10 if self.shape.silent else ()
            possible += (step_database_clock,) * 10 if self.shape.database_steps else ()
            accident, at = self.random.choice(possible), self.random.uniform(0, self.shape.span)
            if f"accident {number}" not in self.without:
                self.later(at, partial(accident, self))

    def _call(self, number: int, name: str, key: str) -> None:
        task, call_id = self.app.tasks[name], f"call-{number}"
        expires = self.random.random() < 0.1 and self.scheduler.now < self.shape.span
        options = {"expires": self.random.choice((1.0, 5.0, 15.0))} if expires else {}
        who = {
            "task": task.name,
            "key": work.named(task.name, key),
            "call": call_id,
            "number": number,
        }
        who |= options
        self.note("calls", **who)
        try:
            if name == "enqueued" or (name == "stored" and self.random.random() < 0.5):
                result = self._enqueue(task, key, number)
            elif self.shape.plain and name in work.NEWEST_RUNS and self.random.random() < 0.5:
                result = self.app.send_task(name, (key, number), task_id=call_id, **options)
            else:
                result = task.apply_async((key, number), task_id=call_id, **options)
        except Exception as error:  # noqa: BLE001 - the caller learns that it was not confirmed
            self.note("unconfirmed", error=type(error).__name__, **who)
        else:
            if result is not None:
                who["call"] = result.id
                self.note("published", own=result.id == call_id, **who)

    def _enqueue(self, task: Any, key: str, number: int) -> Any:
        """Enqueue a call in a transaction; returns its result if that is committed."""
        drawn = self.random.random()
        with Session(self.database.transactional()) as session, self._transaction() as done:
            result = task.delay_in(session, key, number)
            if drawn < 0.15:
                self.note("withdrawn", key=work.named(task.name, key), call=result.id)
                done(False)
                return session.rollback()
            done(True)
            session.commit()
        return result

    @contextmanager
    def _transaction(self) -> Iterator[Callable[[bool], None]]:
        """A transaction, in which other processes write nothing. Call the function with whether it
        is committed, just before.
        """
        while self.writer is not None:
            self.scheduler.sleep(QUICK)
        self.writer = self.scheduler.current

        def ends(committed: bool) -> None:
            written, self.uncommitted, self.writer = self.uncommitted, [], None
            for old, new in written * committed:
                self.row_changed(old, new)

        try:
            yield ends
        finally:
            self.uncommitted, self.writer = [], None

    def roll_back(self, process: SimulatedProcess) -> None:
        """The transaction that a killed process has open ends with its connection."""
        if self.writer is not None and self.writer.process is process:
            self.database.roll_back()
            self.uncommitted, self.writer = [], None

    def _take_none(self) -> None:
        """The broker takes no messages for a while, but delivers those that it has."""
        assert self.shape.takes_none is not None
        span = self.shape.takes_none[1]
        self.broker.takes_none_until = self.scheduler.now + span
        self.note("takes none", span=span)

    def _keep_outbox(self) -> None:
        """What an operator's timer does: publish the messages that are due or lost."""
        while True:
            self.scheduler.sleep(max(5.0, self.shape.span / 200))
            if not self.database.has_messages():
                continue
            with suppress(StoreUnavailable):
                relay(self.app)
                rescue(self.app, older=RESCUE_AFTER)

    def _purge(self) -> None:
        """What an operator's timer does, beside the workers: ``leases purge``."""
        client = OperatorClient.from_app(self.app)
        while True:
            self.scheduler.sleep(2 * self.pause_of_purges)
            since = self.scheduler.now
            if not self.database.has_expired(since):
                continue
            with suppress(StoreUnavailable):
                for _ in client.purge(client.purgeable()):
                    pass
                self.note("purged", since=since)

    @property
    def pause_of_purges(self) -> float:
        """Seconds between two purges of the workers; an operator purges half as often."""
        return max(5.0, self.shape.span / 200)

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

    @cached_property
    def _settled_at(self) -> float:
        """When what dead processes have left must have ended by itself."""
        wait = (
            10 * self.shortest_ttl + (4 * RESCUE_AFTER + self.shape.span / 50) * self._needs_rescue
        )
        return self.shape.span + wait

    @property
    def _needs_rescue(self) -> bool:
        """Whether the broker may lose messages that records have."""
        outbox = bool(set(self.shape.tasks) & set(OUTBOX_TASKS))
        return self.shape.loses or (outbox and self.shape.delivery_limit is not None)

    def _is_over(self) -> bool:
        now = self.scheduler.now
        if not self._is_quiet():
            self._quiet_since = math.inf
        elif now >= (since := min(self._quiet_since, now)) + 1.0:
            return True  # also what its last message has left to threads is done
        else:
            self._quiet_since = since
        return now > max(self.shape.span, self._waits_until) + PATIENCE

    def _is_quiet(self) -> bool:
        busy = any(place.job for worker in self.workers for place in worker.places)
        return self.broker.is_empty() and not busy and not self.database.has_due_messages()

    def _note_final(self) -> None:
        # With nothing left to do, a run ends before leases have ended that nobody holds any more.
        later = max(0.0, self._settled_at - self.scheduler.now)
        long = self.shape.long_bodies or self.shape.bursts
        in_turn = self.shape.calls * LONG_BODY if long else 0.0
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
            held=[] if self.leases is None else self.leases.held_keys(later),
            answers=answers,
            values=values,
            effects=self.database.left_effects(),
            quiet=self._is_quiet(),
            late=self.shape.takeover
            and (
                self.broker.forgotten
                or max(self.answered.values(), default=0.0)
                > max(self._settled_at, self._waits_until) + 900.0 + in_turn
            ),
        )

    def row_changed(self, old: Row | None, new: Row | None) -> None:
        """Note a write of the database to a record."""
        if self.writer is not None and self.writer.process is self.here:
            self.uncommitted.append((old, new))
            return
        row, by = new or old, self.here
        assert row is not None
        self._waits_until = max(self._waits_until, row.retry_at - self.database.ahead)
        by = getattr(by, "client", None) or by
        self.note("row", key=row.key, old=old, new=new, by=by.name, pid=getattr(by, "pid", None))
        if new is not None and new.ended == Ended.RELEASED and by is self.client:
            self.note("released", key=row.key)

    def waits_longer(self, seconds: float) -> None:
        """Note that cooldowns end so much later."""
        self._waits_until += max(seconds, 0.0)

    def plan(self) -> Plan:
        """What the next body does."""
        random = self.random
        endings = ("return",) * 12 + ("retry", "retry", "cooldown", "later", "snooze", "permanent")
        endings += ("error", "self.retry")
        lengths = random.choice(((0.01,), (0.2, 0.3), (1.0, 1.0, 1.0), (2.0,) * 5, (8.0,)))
        if self.shape.long_bodies and random.random() < 0.5:
            lengths = (LONG_BODY / 5,) * 5
        if self.shape.bursts and random.random() < 0.7:
            lengths = random.choice(BURST_BODIES)
        ending = random.choice(endings) if self.scheduler.now < self.shape.span else "return"
        plan = Plan(list(lengths), ending, random.random() < 0.7)
        if self.shape.habit and self.scheduler.now < self.shape.span and random.random() < 0.85:
            plan.habit = self.shape.habit
            if plan.habit in (*ENDINGS, AMBIGUOUS):
                plan.ending = plan.habit
            elif plan.habit == "rejects":
                plan.ending = random.choice(REJECTIONS)
            elif plan.habit == "Celery's ends":
                plan.ending = random.choice(CELERYS_ENDS)
        return plan

    # -- what bodies do ----------------------------------------------------------------------------

    def dies(self) -> None:
        """The body ends its process."""
        self.later(0.0, partial(self.end_process, self.here))
        self.scheduler.sleep(1.0)

    def stalls(self) -> None:
        """The process stands still, often for longer than its lease lasts."""
        pause(self, self.here)
        self.scheduler.sleep(0.0)

    def body_began(self, stored_key: str, **who: Any) -> None:
        """A body begins."""
        until = self._lease_until(stored_key, who["token"])
        alone = not self.shape.threads
        self.note("body", process=self.here.name, store_until=until, interrupted=alone, **who)

    def body_ended(self, **who: Any) -> None:
        """A body has ended."""
        self.note("body ended", process=self.here.name, **who)

    def charge(self, who: dict[str, Any], stored_key: str, idempotency_key: str) -> str:
        """Call the outside world, which takes a moment."""
        until = self._lease_until(stored_key, who["token"])
        self.note("charges", process=self.here.name, store_until=until, **who)
        # It must be executed before another attempt asks for it, after verify_after.
        drawn = self.random.random() if self.scheduler.now < self.shape.span else 0.5
        dies = drawn > (0.5 if self.shape.habit == "dies" else 0.9)
        after, name = 0.6 if dies else min(0.25, self.latency(0.05)), self.here.name

        def execute() -> None:
            self.outside.charge(idempotency_key)
            self.note("charged", effect=idempotency_key, process=name, **who)

        if drawn >= 0.05:
            self.later(after, execute)  # also if the process dies meanwhile
        if dies:
            self.later(self.random.uniform(0, 0.2), partial(self.end_process, self.here))
        self.scheduler.sleep(after)
        if drawn < 0.05:
            raise ConnectionRefusedError("simulated")
        if drawn < 0.15:
            raise TimeoutError("simulated")
        self.scheduler.sleep(self.latency(0.05))
        return self.outside.reply(idempotency_key)

    def complete(self, lease: Any, result: Any, **who: Any) -> bool:
        """Complete the call in a transaction; returns whether that is committed."""
        drawn = self.random.random() if self.scheduler.now < self.shape.span else 1.0
        with self.database.transactional().connect() as connection, self._transaction() as ends:
            self.note("locks", **who)
            lease.complete(result, connection)
            if drawn < 0.2:
                ends(False)
                connection.rollback()
                self.note("rolled back", **who)
            else:
                ends(True)
                connection.commit()
                self.note("committed", **who)
        if drawn > 0.9 and self.scheduler.now < self.shape.span:
            raise ConnectionError("simulated, after the commit")
        return drawn >= 0.2

    def lingers(self) -> None:
        """The body goes on after it has completed its call."""
        if self.scheduler.now < self.shape.span:
            self.scheduler.sleep(self.random.choice((0.0, 0.0, 1.0, 6.0)))

    def has_charged(self, idempotency_key: str, **who: Any) -> None:
        """The effect has returned to the body."""
        state = self.database.effect_state(idempotency_key)
        self.note("has charged", process=self.here.name, state=state, **who)

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
        self.note(f"event {type(event).__name__}", **given, by=self.here.name)
        if isinstance(event, LeaseAcquired | LeaseRenewed | LeaseLost):
            for held_lease in self.here.library.renewer.held_leases:
                is_its = (held_lease.lost is not None) == isinstance(event, LeaseLost)
                if held_lease.call.call_id == event.call_id and is_its:
                    self._note_lease(held_lease, event)

    def _note_lease(self, held_lease: HeldLease, event: Any) -> None:
        """Note until when a process counts on a lease, and until when its store does."""
        call, clock, token = held_lease.call, self.here.clock, held_lease.call.token
        if isinstance(event, LeaseLost):
            key = work.named(call.task, call.key.key)
            self.note("lost", key=key, token=token, process=self.here.name)
            return
        until = self._lease_until(call.key.stored, token)
        if until is not None:
            hard, stop = held_lease.hard_deadline, held_lease.stop_deadline
            self.note(
                "holds",
                key=work.named(call.task, call.key.key),
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

    def end_process(self, process: SimulatedProcess) -> None:
        """Kill a process: a child, or a whole worker with its threads."""
        for worker in list(self.workers):
            if process is worker.main:
                self.replace_worker(worker)
            elif any(place.process is process for place in worker.places):
                worker.process_died(process)

    def replace_worker(self, worker: Worker) -> None:
        """Kill a worker; another one starts in a while."""
        worker.kill()
        self.workers.remove(worker)
        name = f"worker-{self.shape.workers + self.numbered('worker')}"

        def start() -> None:
            self.workers.append(Worker(self, name))

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

    def clock_of(self, host: str) -> SimulatedClock:
        """The clock of a host, which all its processes share."""
        if host not in self._clocks:
            offset, rate = (
                self.random.uniform(0, 1e6),
                1 + self.random.uniform(-work.CLOCK_ERROR, work.CLOCK_ERROR),
            )
            self._clocks[host] = SimulatedClock(self, offset, rate)
        return self._clocks[host]

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
        tasks = (
            *work.BRIEF,
            *work.expanded(TASKS + OTHER_TASKS),
            "debounced",
            work.COMPARED,
            *work.SELDOM,
            work.REPEATED,
        )
        everything = Shape(2, 2, False, 2, 20, 10, database_leases, None, tasks)
        World(0, given=everything)._run()


# -- what the simulation replaces ------------------------------------------------------------------


class Lock:
    """A lock between simulated threads."""

    def __init__(self) -> None:
        self._held = False
        self._waiting: list[Strand] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        scheduler = work.world().scheduler
        until = scheduler.now + timeout if timeout >= 0 else math.inf
        while self._held:
            if not blocking or scheduler.current is None or scheduler.now >= until:
                return False
            self._waiting.append(scheduler.current)
            scheduler.park(min(1.0, until - scheduler.now))
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
        if not self._notified:
            assert work.current is not None
            scheduler = work.current.scheduler
            self._waiting = strand = scheduler.current
            assert strand is not None
            seconds = 3600.0 if timeout is None or timeout > 3600.0 else timeout
            scheduler.park(seconds / strand.process.clock.rate + TIMER_SLACK)
            self._waiting = None
        self._notified = False


def of_process(world: World, make: Callable[[], Any]) -> Any:
    """What a module has once in each process."""
    own: defaultdict[Any, Any] = defaultdict(make)
    return Proxy(lambda: own[world.here])


class WallClock(datetime):
    """The time of wall clocks, which Celery compares with that at which a message expires."""

    @classmethod
    def now(cls, tz: Any = None) -> WallClock:
        return cls.fromtimestamp(work.world().wall_time(), tz)


class LeaseOfWorker:
    """The lease of the worker whose main process runs."""

    def __init__(self, world: World) -> None:
        self._world = world

    def received(self, message: Any) -> None:
        """A message has come."""
        if (lease := self._world.here.lease) is not None:
            lease.received(message)


@contextmanager
def simulated(world: World) -> Iterator[None]:
    """Replace clocks, randomness, threads and processes by those of *world*."""
    scheduler, kernel = world.scheduler, world.kernel

    def now() -> float:
        strand = scheduler.current
        clock = kernel.clock if strand is None else strand.process.clock
        return clock.offset + clock.rate * scheduler.now

    def start_thread(target: Callable[[], object]) -> None:
        world.scheduler.spawn(world.here, target, "thread")

    #: The memory that the main process of a worker shares with its children.
    size = len(database._memory)
    shared: defaultdict[str, bytearray] = defaultdict(lambda: bytearray(size))

    state = StateOfWorker(world)

    def order(app: Any) -> int:
        return int(world.here.arrivals.order(app))

    replaced: list[tuple[Any, str, Any]] = [
        (os, "urandom", world.random_bytes),
        (random_module, "_urandom", world.random_bytes),
        (os, "getpid", lambda: getattr(world.here, "pid", 1)),
        (time, "time", world.wall_time),
        (celery_request, "datetime", WallClock),
        (time, "monotonic", now),
        (time, "sleep", world.scheduler.sleep),
        (os_threads, "allocate_lock", Lock),
        (shared_trips, "threading", SimpleNamespace(Lock=Lock)),
        (os_threads, "Wakeup", Wakeup),
        (os_threads, "start_thread", start_thread),
        (os_threads, "boot_clock", now),
        (processes, "process_of", lambda *_, **__: world.here.library),
        (processes, "current_worker", lambda: getattr(world.here, "worker", None)),
        (delivery, "interrupt_guard_here", lambda *_: world.here.guard()),
        (interrupts, "_kill_timer", lambda held: SimulatedKillTimer(world, held.kill_deadline)),
        (child_exit, "_exists", lambda pid: pid in world.processes),
        (child_exit, "watch", lambda _: None),
        (child_exit, "_stores_lock", of_process(world, Lock)),
        (child_exit, "_unfinished", of_process(world, list)),
        (requeue, "_requeued", of_process(world, OrderedDict)),
        (strategy, "to_timestamp", lambda moment: moment.timestamp()),
        (request, "arrivals", SimpleNamespace(order=order)),
        (einfo, "Traceback", lambda _: None),  # nobody reads them, and they take a third of a run
        (einfo, "traceback", SimpleNamespace(format_exception=lambda *_: ["simulated"])),
        (database_watch, "_until", of_process(world, dict)),
        (renewal, "PURGE_EVERY", world.pause_of_purges),
        (renewal, "PURGE_BATCH", 2),
        (database, "_memory", Proxy(lambda: shared[world.here.host])),
        (request, "waiting_calls", Proxy(lambda: world.here.waiting)),
        (takeover, "current", LeaseOfWorker(world)),
        (takeover, "state", state),
        (waiting_calls, "state", state),
        (redis_workers, "Workers", SimulatedWorkers),
        (work, "current", world),
        (app_settings, "_longest_countdowns", {world.app: world.shape.longest_countdown}),
        (world.app.amqp.queues[QUEUE], "queue_arguments", world.shape.queue_arguments),
    ]
    worker_state.reset_state()
    originals = [(target, name, getattr(target, name)) for target, name, _ in replaced]
    drawn = random_module.getstate()
    try:
        random_module.seed(world.seed)
        for target, name, value in replaced:
            setattr(target, name, value)
        yield
    finally:
        for target, name, value in originals:
            setattr(target, name, value)
        random_module.setstate(drawn)
