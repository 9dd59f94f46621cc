"""Simulated workers: a main process with Celery's own requests and strategy, and its children."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from billiard.einfo import ExceptionInfo
from billiard.exceptions import WorkerLostError
from celery.worker import state as worker_state
from celery.worker import strategy

from celery_leases.attempt.held_lease import HeldLease
from celery_leases.attempt.process import STORE_TIMEOUT, Process
from celery_leases.attempt.renewal import Renewer, Stores
from celery_leases.deadlines import call_timeout
from celery_leases.worker.arrivals import Arrivals
from celery_leases.worker.interrupts import InterruptGuard
from celery_leases.worker.publisher import Publisher
from tests.simulation.broker import Delivered
from tests.simulation.scheduler import Strand

if TYPE_CHECKING:
    from tests.simulation.world import World


class Consumer(SimpleNamespace):
    """What a worker's strategy asks of its consumer, which is also a sender of signals."""

    __hash__ = object.__hash__


class SimulatedClock:
    """The clock of a process: it may be wrong by a constant, and run slightly fast or slow."""

    def __init__(self, world: World, offset: float, rate: float) -> None:
        self._scheduler = world.scheduler
        self._offset = offset
        self._rate = rate

    def now(self) -> float:
        return self._offset + self._rate * self._scheduler.now

    def true_time(self, local: float) -> float:
        """The true time at which this clock shows *local*."""
        return (local - self._offset) / self._rate

    def sleep(self, seconds: float) -> None:
        self._scheduler.sleep(max(0.0, seconds) / self._rate)


class SimulatedProcess:
    """One process of a host: its clock, and what the library has in it."""

    def __init__(self, world: World, host: str, name: str) -> None:
        self.world = world
        self.host = host
        self.name = name
        self.pid = world.new_pid()
        self.alive = True
        self.paused_until = -math.inf
        self.clock = SimulatedClock(
            world, world.random.uniform(0, 1e6), 1 + world.random.uniform(-0.004, 0.004)
        )
        self.guards: dict[Strand, SimulatedGuard] = {}
        self.arrivals = Arrivals()
        self.library: Process = self._library()
        world.processes[self.pid] = self

    def _library(self) -> Process:
        world = self.world
        records, renewed = world.database.record_store(), world.database.record_store()
        ttl = world.shortest_ttl
        if world.leases is None:
            leases: Any = world.database.lease_store(records)
            for_renewals = Stores(world.database.lease_store(renewed), renewed)
            for_bodies = Stores(leases, records)
        else:
            leases = world.leases.lease_store(STORE_TIMEOUT)
            for_renewals = Stores(world.leases.lease_store(call_timeout(ttl)), renewed)
            for_bodies = Stores(world.leases.lease_store(call_timeout(ttl)), records)
        renewer = Renewer(for_renewals, for_bodies, world, self.clock, None)
        process = Process(
            settings=world.settings,
            leases=leases,
            records=records,
            effects=world.database.effects(),
            renewer=renewer,
            observer=world,
            clock=self.clock,
            host=f"{self.host}/{self.pid}",
            rand=world.random.random,
            wall_time=world.wall_time,
            stopping=lambda: self.guard(None).stopping,
            app=world.app,
        )
        process.publisher = Publisher(world.app)
        return process

    def guard(self, token: str | None) -> SimulatedGuard:
        """The interrupt guard of the running thread."""
        strand = self.world.scheduler.current
        assert strand is not None
        if strand not in self.guards:
            self.guards[strand] = SimulatedGuard(self, strand)
        return self.guards[strand]

    def kill(self) -> None:
        """End the process at once: none of its code runs again."""
        self.alive = False
        self.world.processes.pop(self.pid, None)
        self.world.note("killed", process=self.name, pid=self.pid)


class SimulatedGuard(InterruptGuard):
    """Interrupts a body as prefork's children do: an exception is raised at the next step."""

    def __init__(self, process: SimulatedProcess, strand: Strand) -> None:
        self._process = process
        self._strand = strand
        self._kill_at = math.inf

    def body_begins(self, held_lease: HeldLease, on_lost: str) -> None:
        """Allow interrupts from now on."""
        if on_lost != "flag":
            self._held_lease = held_lease
            held_lease.interrupt = self._interrupt
        held_lease.check()
        if on_lost == "kill":
            held_lease.move_kill_timer = self._set_kill_timer
            self._set_kill_timer(held_lease.kill_deadline)
        self._raises = True

    def body_ended(self) -> None:
        """Defer interrupts."""
        self._kill_at = math.inf
        super().body_ended()

    def _interrupt(self) -> None:
        self._process.world.scheduler.signal(self._strand, self._raise_pending)

    def _set_kill_timer(self, at: float) -> None:
        world, clock = self._process.world, self._process.clock
        self._kill_at = at

        def expired() -> None:
            if self._kill_at <= clock.now() + 1e-6 and self._process.alive:
                world.note("kill timer", process=self._process.name)
                world.end_child(self._process)

        after = max(0.0, clock.true_time(at) - world.scheduler.now)
        world.scheduler.spawn(world.kernel, expired, "kill timer", after)


# -- workers ---------------------------------------------------------------------------------------


class Child(SimulatedProcess):
    """A process of the pool, which has at most one delivery."""

    request: Any = None
    strand: Strand | None = None


class Worker:
    """A worker of *children* processes on its own host, with Celery's strategy and requests."""

    def __init__(self, world: World, name: str, children: int) -> None:
        self.world = world
        self.name = self.host = name
        self.alive = True
        self.main = SimulatedProcess(world, name, f"{name}/main")
        self.children = [self._new_child() for _ in range(children)]
        self._jobs: list[tuple[Any, dict[str, Any]]] = []
        self._reserved = 0
        self._prefetch = children * 2
        self._strategies = {
            task.name: strategy.default(task, world.app, self._consumer()) for task in world.tasks
        }
        self._consuming = world.scheduler.spawn(self.main, self._consume, f"{name} consumes")
        world.broker.consumers[self] = self._consuming

    def _new_child(self) -> Child:
        return Child(self.world, self.host, f"{self.host}/child-{self.world.numbered('child')}")

    def _consumer(self) -> Any:
        """What Celery's strategy asks of its consumer."""
        return Consumer(
            hostname=self.name,
            connection_errors=(),
            event_dispatcher=None,
            timer=SimpleNamespace(call_at=self._call_at),
            apply_eta_task=self._begin_later,
            disable_rate_limits=True,
            task_buckets={},
            on_task_request=self._begin,
            _limit_task=None,
            _limit_post_eta=None,
            pool=SimpleNamespace(apply_async=self._apply_async),
            controller=SimpleNamespace(state=worker_state),
            qos=SimpleNamespace(increment_eventually=lambda: None),
        )

    # -- the main process --------------------------------------------------------------------------

    def _consume(self) -> None:
        scheduler, broker = self.world.scheduler, self.world.broker
        while True:
            queued = broker.take(self) if self._reserved < self._prefetch else None
            if queued is None:
                scheduler.park()
                continue
            scheduler.sleep(self.world.latency(0.002))
            message = Delivered(broker, self).message(queued)
            # A message that waits for its time does not count.
            self._strategies[message.headers["task"]](
                message, None, message.ack_log_error, message.reject_log_error, []
            )

    def _call_at(self, at: float, work: Callable[..., None], args: Any, **_: Any) -> Any:
        after = at - self.world.wall_time()
        return self.world.scheduler.spawn(self.main, lambda: work(*args), "timer", max(0.0, after))

    def _begin_later(self, request: Any) -> None:
        worker_state.task_reserved(request)
        self._begin(request)

    def _begin(self, request: Any) -> None:
        self._reserved += 1
        request.execute_using_pool(None)

    def _apply_async(self, target: Any, args: Any, **callbacks: Any) -> Any:
        self._jobs.append((args, {"target": target, **callbacks}))
        self._assign()
        return None

    def _assign(self) -> None:
        for child in self.children:
            if self._jobs and child.request is None and child.alive:
                args, callbacks = self._jobs.pop(0)
                child.request = (args, callbacks)
                child.strand = self.world.scheduler.spawn(
                    child, self._job(child, args, callbacks), f"{child.name} runs", 0.001
                )

    def _job(self, child: Child, args: Any, callbacks: dict[str, Any]) -> Callable[[], None]:
        def run() -> None:
            in_main = self._in_main
            in_main(lambda: callbacks["accept_callback"](child.pid, 0.0))
            try:
                answer = callbacks["target"](*args)
            except Exception as error:  # noqa: BLE001 - as the pool does it
                information = ExceptionInfo()
                in_main(lambda: self._done(child, callbacks["error_callback"], information))
                del error
            except SystemExit:
                self.world.end_child(child)
            else:
                in_main(lambda: self._done(child, callbacks["callback"], answer))

        return run

    def _done(self, child: Child, callback: Callable[[Any], object], value: Any) -> None:
        child.request = None
        self._reserved -= 1
        callback(value)
        self._assign()
        self.world.scheduler.wake(self._consuming)

    def _in_main(self, work: Callable[[], object]) -> None:
        self.world.scheduler.spawn(self.main, work, f"{self.name} main", self.world.latency(0.001))

    # -- ends --------------------------------------------------------------------------------------

    def child_died(self, child: Child) -> None:
        """Handle the death of a child as Celery's pool does; another one begins."""
        child.kill()
        job = child.request
        self.children[self.children.index(child)] = self._new_child()
        if job is not None and self.alive:
            _, callbacks = job
            try:
                raise WorkerLostError("Worker exited prematurely: signal 9 (SIGKILL)")
            except WorkerLostError:
                information = ExceptionInfo()

            def notice() -> None:
                self._reserved -= 1
                callbacks["error_callback"](information)
                self._assign()
                self.world.scheduler.wake(self._consuming)

            self.world.scheduler.spawn(self.main, notice, f"{self.name} notices", 0.01)

    def kill(self) -> None:
        """Kill the worker with all its processes."""
        self.alive = False
        for process in (self.main, *self.children):
            process.kill()
        self.world.broker.consumers.pop(self, None)
        self.world.broker.disconnected(self)
