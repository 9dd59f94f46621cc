"""Simulated workers: a main process with Celery's own requests and strategy, and its children."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import redis
from billiard.einfo import ExceptionInfo
from billiard.exceptions import Terminated, TimeLimitExceeded, WorkerLostError
from celery.exceptions import SoftTimeLimitExceeded, TaskRevokedError
from celery.worker import state as worker_state
from celery.worker import strategy
from kombu.exceptions import OperationalError

from celery_leases import deadlines
from celery_leases.attempt.process import STORE_TIMEOUT, Process
from celery_leases.attempt.renewal import Renewer, Stores
from celery_leases.deadlines import call_timeout
from celery_leases.worker.arrivals import Arrivals
from celery_leases.worker.fetching import noted_at_once
from celery_leases.worker.headers import HEADER
from celery_leases.worker.interrupts import InterruptGuard, SignalGuard, _exit_code
from celery_leases.worker.publisher import Publisher
from celery_leases.worker.takeover import WorkerLease
from celery_leases.worker.waiting_calls import WaitingCalls
from tests.simulation.broker import QUEUE, Delivered
from tests.simulation.scheduler import Strand
from tests.simulation.worker_leases import OVERDUE, RedisChannel, Socket, lease_of

if TYPE_CHECKING:
    from tests.simulation.world import World


class Consumer(SimpleNamespace):
    """What a worker's strategy asks of its consumer, which is also a sender of signals."""

    __hash__ = object.__hash__


class SimulatedClock:
    """The clock of a host: it may be wrong by a constant, and run slightly fast or slow."""

    def __init__(self, world: World, offset: float, rate: float) -> None:
        self._scheduler = world.scheduler
        self.offset = offset
        self.rate = rate

    def now(self) -> float:
        return self.offset + self.rate * self._scheduler.now

    def true_span(self, seconds: float) -> float:
        """How long it really takes until this clock has advanced by *seconds*."""
        return seconds / self.rate

    def true_time(self, local: float) -> float:
        """The true time at which this clock shows *local*."""
        return (local - self.offset) / self.rate

    def sleep(self, seconds: float) -> None:
        self._scheduler.sleep(self.true_span(seconds))


class SimulatedProcess:
    """One process of a host: its clock, and what the library has in it."""

    def __init__(self, world: World, host: str, name: str, *, has_threads: bool = False) -> None:
        self.world = world
        self.host = host
        self.name = name
        self.pid = world.new_pid()
        self.alive = True
        self.paused_until = -math.inf
        self.clock = world.clock_of(host)
        self.guards: dict[Strand, InterruptGuard] = {}
        self.has_threads = has_threads
        #: Celery's worker, and the calls that wait in it, in a main process.
        self.worker: Any = None
        self.waiting = WaitingCalls()
        self.lease: WorkerLease | None = None
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
            leases = world.leases.lease_store(STORE_TIMEOUT, shares=self.has_threads)
            for_renewals = Stores(world.leases.lease_store(call_timeout(ttl)), renewed)
            for_bodies = Stores(world.leases.lease_store(call_timeout(ttl)), records)
        if self.has_threads:
            world.database.share_trips(records)
        purged = world.database.record_store() if world.shape.purges else None
        renewer = Renewer(for_renewals, for_bodies, world, self.clock, purged)
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
            stopping=lambda: self.guard().stopping,
            app=world.app,
        )
        process.publisher = Publisher(world.app)
        return process

    def guard(self, strand: Strand | None = None) -> InterruptGuard:
        """The interrupt guard of a thread; by default the running one."""
        strand = strand or self.world.scheduler.current
        assert strand is not None
        if strand not in self.guards:
            threads = self.has_threads
            self.guards[strand] = InterruptGuard() if threads else SimulatedGuard(self, strand)
        return self.guards[strand]

    def kill(self) -> None:
        """End the process at once: none of its code runs again."""
        self.alive = False
        self.world.processes.pop(self.pid, None)
        self.world.roll_back(self)
        self.world.note("killed", process=self.name, pid=self.pid)


class StateOfWorker:
    """Celery's state of the worker whose main process runs. It never stops by itself."""

    should_stop = None
    should_terminate = None

    def __init__(self, world: World) -> None:
        self._world = world

    @property
    def scheduled_requests(self) -> RequestsOf:
        """The requests that wait in its timer."""
        return RequestsOf(self._world.here.host, worker_state.scheduled_requests)

    @property
    def reserved_requests(self) -> RequestsOf:
        """The requests that it has given to its pool, and that have not ended."""
        return RequestsOf(self._world.here.host, worker_state.reserved_requests)

    @property
    def active_requests(self) -> RequestsOf:
        """The requests that its pool has accepted."""
        return RequestsOf(self._world.here.host, worker_state.active_requests)


class RequestsOf(Collection[Any]):
    """Those of the requests of all workers that are of one of them."""

    def __init__(self, host: str, requests: Collection[Any]) -> None:
        self._host = host
        self._requests = requests

    def __contains__(self, request: Any) -> bool:
        return request in self._requests and request.hostname == self._host

    def __iter__(self) -> Iterator[Any]:
        return (each for each in self._requests if each.hostname == self._host)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class SimulatedGuard(SignalGuard):
    """Interrupts a body as prefork's children do: a signal is handled at the next step."""

    def __init__(self, process: SimulatedProcess, strand: Strand) -> None:
        self._process = process
        self._strand = strand
        self.busy = False
        self._kill_timer: Any = None
        self._loss_signal = signal.SIGRTMAX
        self._handlers = {signal.SIGTERM: _exit, signal.SIGUSR1: _time_is_over}

    def receive(self, signum: int) -> None:
        """Handle a signal of the main process."""
        self._process.world.scheduler.signal(self._strand, partial(self._on_signal, signum, None))

    def _interrupt(self) -> None:
        on_loss = partial(self._on_loss, self._loss_signal, None)
        self._process.world.scheduler.signal(self._strand, on_loss)


def _exit(signum: int, frame: Any) -> None:
    raise SystemExit(_exit_code(signum))


def _time_is_over(signum: int, frame: Any) -> None:
    raise SoftTimeLimitExceeded


class SimulatedKillTimer:
    """Kills the running process at a time of its clock."""

    def __init__(self, world: World, moment: float) -> None:
        self._world = world
        self._process = world.here
        self.set(moment)

    def set(self, moment: float) -> None:
        """Move it."""
        world, clock = self._world, self._process.clock
        self._at = moment
        after = max(0.0, clock.true_time(moment) - world.scheduler.now)
        world.scheduler.spawn(world.kernel, self._expired, "kill timer", after)

    def cancel(self) -> None:
        """Stop it."""
        self._at = math.inf

    def _expired(self) -> None:
        if self._at <= self._process.clock.now() + 1e-6 and self._process.alive:
            self._world.note("kill timer", process=self._process.name)
            self._world.end_process(self._process)


# -- workers ---------------------------------------------------------------------------------------


@dataclass
class TimerEntry:
    """An entry of Celery's timer."""

    fun: Callable[..., None]
    args: Any
    cancelled: bool = False

    def __call__(self) -> None:
        if not self.cancelled:
            self.fun(*self.args)

    def cancel(self) -> None:
        """Do nothing when the time comes."""
        self.cancelled = True


class Place:
    """A place of a pool, a process or a thread, which has at most one delivery."""

    def __init__(self, process: SimulatedProcess) -> None:
        self.process = process
        #: The request, its arguments and its callbacks.
        self.job: Job | None = None
        self.strand: Strand | None = None
        #: The main process has sent SIGTERM because of a revoke.
        self.revoked = False
        #: The main process ends it, and waits for its end.
        self.is_ending = False


@dataclass(eq=False)
class Job:
    """A delivery in the pool."""

    target: Callable[..., Any]
    args: Any
    callbacks: dict[str, Any]

    @property
    def request(self) -> Any:
        """Celery's request in the main process."""
        return self.callbacks["error_callback"].__self__


class Worker:
    """A worker with *places* in its pool, on its own host, with Celery's strategy and requests."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = self.host = name
        self.alive = True
        threads = world.shape.threads
        self.main = SimulatedProcess(world, name, f"{name}/main", has_threads=threads)
        self.places = [self._new_place() for _ in range(world.shape.places)]
        self._jobs: list[Job] = []
        self._given: set[Any] = set()
        self._reserved = 0
        #: When it last had its lease renewed if necessary.
        self._looked = world.scheduler.now
        self._prefetch = world.shape.places * 2
        #: Its latest connection to a simulated Redis.
        self._socket: Socket | None = None
        self.qos = SimpleNamespace(_delivered=set(), _quick_ack=lambda _: None)
        if world.shape.takeover:
            self.main.lease = lease_of(self, world.ttl_of_workers)
        consumer = self._consumer()
        self.main.worker = SimpleNamespace(
            app=world.app,
            consumer=consumer,
            hostname=name,
            concurrency=world.shape.places,
            time_limit=None,
            soft_time_limit=None,
        )
        self._strategies = {
            task.name: strategy.default(task, world.app, consumer) for task in world.tasks
        }
        self._consuming = world.scheduler.spawn(self.main, self._consume, f"{name} consumes")
        if self.main.lease is None:
            world.broker.consumers[self] = self._consuming

    def _new_place(self) -> Place:
        if self.main.has_threads:
            return Place(self.main)
        name = f"{self.host}/child-{self.world.numbered('child')}"
        return Place(SimulatedProcess(self.world, self.host, name))

    def _consumer(self) -> Any:
        """What Celery's strategy asks of its consumer."""
        connection = SimpleNamespace(transport=SimpleNamespace(driver_type="simulated"))
        return Consumer(
            hostname=self.name,
            connection_errors=(OperationalError, redis.ConnectionError),
            event_dispatcher=None,
            app=self.world.app,
            connection=connection if self.world.shape.early else None,
            qos_global=True,
            timer=SimpleNamespace(call_at=self._call_at, call_after=self._call_after),
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
        if self.main.lease is not None:
            return self._consume_from_redis(self.main.lease)
        while True:
            queued = broker.take(self) if self._reserved < self._prefetch else None
            if queued is None:
                scheduler.park()
                continue
            scheduler.sleep(self.world.latency(0.002))
            message = Delivered(broker, self, queued).message()
            self.qos._delivered.add(queued.tag)
            # A message that waits for its time does not count.
            self._receive(message)

    def _consume_from_redis(self, lease: WorkerLease) -> None:
        """Turn Celery's event loop, with what kombu does in it."""
        scheduler, channel = self.world.scheduler, None
        while True:
            try:
                if channel is None:
                    channel = self._connected(lease)
                self._look_at_lease(lease, channel)
                if channel.qos.can_consume() and not channel._in_poll:
                    channel._brpop_start()
                # Without a message, what waits unread is looked at as often as the lease is.
                unread = channel._in_poll and not channel.qos.can_consume()
                if not (channel.qos.can_consume() and channel._in_poll.can_read(0)):
                    seen = scheduler.park(self.world.ttl_of_workers / 3 if unread else math.inf)
                    if not seen:
                        self._loop_runs(lease, channel)
                if channel.qos.can_consume() and channel._in_poll and channel._in_poll.can_read(0):
                    with suppress(Empty):
                        channel.handlers["BRPOP"]()
            except redis.ConnectionError:
                if channel is not None:
                    self._disconnected(channel)
                channel = None
                scheduler.sleep(2.0)

    def _connected(self, lease: WorkerLease) -> RedisChannel:
        """Connect as Celery's consumer does, and do what follows on its ``worker_ready``."""
        channel = RedisChannel(self.main, OVERDUE)
        channel.qos.can_consume = lambda: self._reserved < self._prefetch
        channel.client.connection.reader = self.world.scheduler.current
        channel.basic_consume(QUEUE, False, self._receive, "tag")
        if self._socket is None:
            lease._wait_for_renewal()  # as start() does
        else:
            lease.reconnected()
        self._socket = channel.client.connection
        noted_at_once(channel, lease.unanswered)
        return channel

    def _disconnected(self, channel: RedisChannel) -> None:
        """Do what Celery does when its connection is lost: it drops what does not run yet."""
        for _ in range(2):  # the first time, kombu perhaps reads no reply
            with suppress(redis.ConnectionError):
                channel.close()
        self._reserved -= len(self._jobs)
        dropped, self._jobs = [job.request for job in self._jobs], []
        for request in tuple(worker_state.scheduled_requests):
            if request.hostname == self.name:
                request._eta_timer_entry.cancel()
                worker_state.scheduled_requests.discard(request)
                dropped.append(request)
        for request in dropped:
            worker_state.reserved_requests.discard(request)
            worker_state.requests.pop(request.id, None)

    def _receive(self, message: Any) -> None:
        headers = message.headers
        header = headers.get(HEADER) or {}
        begun = bool(header.get("started") or headers.get("retries"))
        self.world.note(
            "delivers",
            call=headers["id"],
            begun=begun,
            copy=header.get("copy", ""),
            again=bool(message.delivery_info.get("redelivered")),
            met=header.get("met"),
            prior=tuple(header.get("prior", ())),
            worker=self.name,
            full=bool(header.get("full")),
        )
        self._strategies[message.headers["task"]](
            message, None, message.ack_log_error, message.reject_log_error, []
        )

    def _look_at_lease(self, lease: WorkerLease, channel: RedisChannel) -> None:
        """Do what Celery's timer does when the process runs again: it renews the lease of the
        worker.
        """
        looked, self._looked = self._looked, self.world.scheduler.now
        counts_until = deadlines.hard_deadline(lease._renewed, lease._ttl)
        if self.main.paused_until > looked and lease._clock() >= counts_until:
            lease._loop_seen = -math.inf
            self._loop_runs(lease, channel)

    def _loop_runs(self, lease: WorkerLease, channel: RedisChannel) -> None:
        try:
            lease._loop_runs(channel)
        finally:
            lease._loop_seen = math.inf  # its timer would cost more steps than all the rest

    def _call_at(self, at: float, work: Callable[..., None], args: Any, **_: Any) -> Any:
        return self._call_after(max(0.0, at - self.world.wall_time()), work, args)

    def _call_after(self, after: float, work: Callable[..., None], args: Any = ()) -> Any:
        entry = TimerEntry(work, args)
        self.world.scheduler.spawn(self.main, entry, "timer", after)
        return entry

    def _begin_later(self, request: Any) -> None:
        worker_state.task_reserved(request)
        self._begin(request)

    def _begin(self, request: Any) -> None:
        with suppress(TaskRevokedError):
            request.execute_using_pool(None)

    def _apply_async(self, target: Any, args: Any, **callbacks: Any) -> Any:
        self._reserved += 1
        job = Job(target, args, callbacks)
        if job.request in self._given:
            self.world.note("begins twice", call=job.request.id, worker=self.name)
        self._given.add(job.request)
        self._jobs.append(job)
        self._assign()
        return None

    def _assign(self) -> None:
        for place in self.places:
            if self._jobs and not (place.job or place.is_ending) and place.process.alive:
                place.job = job = self._jobs.pop(0)
                place.strand = self.world.scheduler.spawn(
                    place.process, partial(self._run, place, job), f"{self.name} runs", 0.001
                )

    def _run(self, place: Place, job: Job) -> None:
        self._in_main(lambda: self._accepted(place, job))
        self.world.note("tries", call=job.args[1], process=place.process.name)
        try:
            answer = job.target(*job.args)
        except Exception as error:  # noqa: BLE001 - as the pool does it
            information = ExceptionInfo()
            self._in_main(lambda: self._done(place, job, "error_callback", information))
            del error
        except SystemExit:
            self.world.end_process(place.process)
        else:
            self._in_main(lambda: self._done(place, job, "callback", answer))

    def _accepted(self, place: Place, job: Job) -> None:
        job.callbacks["accept_callback"](place.process.pid, self.world.scheduler.now)
        if self.main.has_threads:  # Celery has no time limits then
            return
        for name, ended in (("soft_timeout", self._soft_limit), ("timeout", self._hard_limit)):
            limit = job.callbacks[name]
            if limit:
                at_limit = partial(ended, place, job, limit)
                self.world.scheduler.spawn(self.main, at_limit, name, limit)

    def _done(self, place: Place, job: Job, callback: str, value: Any) -> None:
        if place.job is job:
            place.job = None
            self._end(job, callback, value)

    def _end(self, job: Job, callback: str, value: Any) -> None:
        self._reserved -= 1
        job.callbacks[callback](value)
        self._assign()
        self.world.scheduler.wake(self._consuming)

    def _in_main(self, work: Callable[[], object]) -> None:
        self.world.scheduler.spawn(self.main, work, f"{self.name} main", self.world.latency(0.001))

    # -- ends --------------------------------------------------------------------------------------

    def _soft_limit(self, place: Place, job: Job, limit: float) -> None:
        if place.job is job:
            job.callbacks["timeout_callback"](soft=True, timeout=limit)
            self._signal(place, signal.SIGUSR1)

    def _hard_limit(self, place: Place, job: Job, limit: float) -> None:
        if place.job is not job:
            return
        place.job, place.is_ending = None, True
        self.world.note("time limit", call=job.args[1], process=place.process.name)
        self._end(job, "error_callback", _raised(TimeLimitExceeded(limit)))
        job.callbacks["timeout_callback"](soft=False, timeout=limit)
        self._signal(place, signal.SIGTERM)
        self.world.later(0.1, lambda: self.world.end_process(place.process))

    def _signal(self, place: Place, signum: int) -> None:
        assert place.strand is not None
        guard: Any = place.process.guard(place.strand)
        if place.process.alive:
            guard.receive(signum)

    def revoke(self, call: str, *, terminate: bool) -> None:
        """Handle Celery's ``revoke``, whose id is noted already."""
        for place in self.places:
            job = place.job
            if terminate and job and job.args[1] == call and not self.main.has_threads:
                job.request.terminate(SimpleNamespace(terminate_job=self._terminate_job))

    def _terminate_job(self, pid: int, signum: int) -> None:
        for place in self.places:
            if place.process.pid == pid and place.strand is not None:
                place.revoked = True
                self._signal(place, signum)

    def process_died(self, process: SimulatedProcess) -> None:
        """Handle the death of a child as Celery's pool does; another one begins."""
        place = next(place for place in self.places if place.process is process)
        job, place.job = place.job, None
        if job is not None:
            self.world.broker.died_with.add(job.request.message.delivery_tag)
        process.kill()
        self.places[self.places.index(place)] = self._new_place()
        if not self.alive:
            return
        lost: Exception = WorkerLostError("Worker exited prematurely: signal 9 (SIGKILL)")
        error = _raised(Terminated(-signal.SIGTERM) if place.revoked else lost)

        def notice() -> None:
            if job is not None:
                self._end(job, "error_callback", error)
            self._assign()

        self.world.scheduler.spawn(self.main, notice, f"{self.name} notices", 0.01)

    def kill(self) -> None:
        """Kill the worker with all its processes."""
        self.alive = False
        for process in {self.main: None} | {place.process: None for place in self.places}:
            process.kill()
        self.world.broker.consumers.pop(self, None)
        if self._socket is not None:
            self._socket.disconnect()
        self.world.broker.disconnected(self)


def _raised(error: Exception) -> ExceptionInfo:
    try:
        raise error
    except Exception:  # noqa: BLE001 - as the pool reports it
        return ExceptionInfo()
