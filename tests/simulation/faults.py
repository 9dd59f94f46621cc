"""What goes wrong in a run: its rates, and its accidents."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

from celery.worker import state as worker_state

from celery_leases.client import LeaseClient
from celery_leases.errors import StoreUnavailable
from celery_leases.record import State
from tests.simulation.work import SHARED, named

if TYPE_CHECKING:
    from tests.simulation.servers import Server
    from tests.simulation.world import World


FATES = ("refused", "lost request", "lost reply", "late", "paused")
"""What happens to a request that goes wrong."""
REQUESTS = (("claim", "acquire"), ("settle",), ("settle",), ("read",), ("renew",))
"""Requests that go wrong often in some runs; of bodies with effects also those of an effect,
of calls that are queued once the publish, and of records that expire those of a purge.
"""


@dataclass
class Faults:
    """How often single requests go wrong, and whether they do now."""

    random: Random
    refused: float = 0.0
    lost_request: float = 0.0
    lost_reply: float = 0.0
    late: float = 0.0
    reorder: float = 0.0
    #: The process stands still after the server has executed its request, before the reply comes.
    paused: float = 0.0
    #: A server does not answer a publish, or a request that calls share.
    unanswered: float = 0.0
    #: Requests of which many go wrong, all in the same way.
    often: tuple[str, ...] = ()
    often_fate: str = ""
    #: The broker has a message for a while before it delivers it.
    held_back: float = 0.0
    active: bool = True

    def __post_init__(self) -> None:
        rates = (self.refused, self.lost_request, self.lost_reply, self.late, self.paused)
        self._rates = [(name, rate) for name, rate in zip(FATES, rates, strict=True) if rate]
        self._most = sum(rates) + 1e-9

    @classmethod
    def drawn(
        cls,
        random: Random,
        others: Random,
        *,
        effects: bool = False,
        queues: bool = False,
        purges: bool = False,
    ) -> Faults:
        """The rates of one run: some runs have no such faults, and some many."""
        scale = random.choice((0.0, 0.002, 0.01, 0.04))
        refused, request, reply, late = (scale * random.choice((0.0, 0.5, 1.0)) for _ in range(4))
        reorder = random.choice((0.0, 0.0, 0.3))
        paused, unanswered = (
            others.choice((0.0, 0.0, 0.005, 0.05)),
            others.choice((0.0,) * 3 + (0.3,)),
        )
        rates = (refused, request, reply, late, reorder, paused, unanswered)
        requests = others.choice(
            REQUESTS
            + (("effect",),) * 5 * effects
            + (("publish",),) * 5 * queues
            + (("select", "delete"),) * 20 * purges
        )
        often = requests if others.random() < 0.5 else ()
        held_back = others.choice((0.0, 0.0, 0.0, 0.3))
        at_worst = requests in (("effect",), ("select", "delete"))
        fate = others.choice(FATES + ("paused",) * 4 * at_worst)
        return cls(random, *rates, often, fate, held_back)

    def fate(self, server: Server, what: str) -> str:
        """What happens to a request; empty: nothing special."""
        if not self.active:
            return ""
        drawn = self.random.random()
        if what in ("publish", "shared") and drawn < self.unanswered:
            return self.random.choice(("lost request", "lost reply", "late"))
        if what in self.often and self.random.random() < 0.3:
            return self.often_fate
        for name, rate in self._rates if drawn < self._most else ():
            drawn -= rate
            if drawn < 0:
                return name
        return ""


Accident = Callable[["World"], None]


def _span(world: World) -> float:
    """Seconds that something lasts: often around the ttl, at times much longer."""
    return world.random.choice((0.2, 0.5, 0.9, 1.3, 3.0, 10.0)) * world.shortest_ttl


def kill_child(world: World) -> None:
    """``kill -9`` of a pool child, likely one that works."""
    places = [place for worker in world.workers for place in worker.places]
    busy = [place for place in places if place.job is not None]
    world.end_process(world.random.choice(busy or places).process)


def kill_worker(world: World) -> None:
    """``kill -9`` of a worker with its children; a new one starts soon."""
    world.replace_worker(world.random.choice(world.workers))


def pause_process(world: World) -> None:
    """SIGSTOP and, later, SIGCONT."""
    pause(world, world.random.choice(list(world.processes.values())))


def pause(world: World, process: Any) -> None:
    """Let *process* stand still for a while."""
    span = _span(world)
    process.paused_until = max(process.paused_until, world.scheduler.now + span)
    world.note("paused", process=process.name, span=span)


def pause_host(world: World) -> None:
    """A whole host stands still."""
    host = world.random.choice(world.workers).host
    span = _span(world)
    for process in world.processes.values():
        if process.host == host:
            process.paused_until = max(process.paused_until, world.scheduler.now + span)
    world.note("host paused", host=host, span=span)


def stop_server(world: World) -> None:
    """A server does not accept connections for a while; a lease server may lose its data."""
    server = world.random.choice(world.servers)
    _stop(server)
    if server is world.leases and world.random.random() < 0.5:
        world.leases.empty()
        world.note("emptied")
    world.later(_span(world), partial(_start, server))


def _stop(server: Server) -> None:
    server.stop()
    server.world.note("down", server=server.name)


def _start(server: Server) -> None:
    server.up = True
    server.world.broker.wake_all()
    server.world.note("up", server=server.name)


def empty_leases(world: World) -> None:
    """The lease store loses all data."""
    if world.leases is not None:
        world.leases.empty()
        world.note("emptied")


def freeze_server(world: World) -> None:
    """A server executes nothing for a while, then all that it has got."""
    server = world.random.choice(world.servers)
    span = _span(world)
    _freeze(server, span)
    world.later(span + 0.001, world.broker.wake_all)


def _freeze(server: Server, span: float) -> None:
    server.frozen_until = max(server.frozen_until, server.world.scheduler.now + span)
    server.world.note("frozen", server=server.name, span=span)


def silence_database(world: World) -> None:
    """The database executes nothing for longer than a lease lasts after its renewal: it is frozen,
    but not for so long that a statement fails, or it is down.
    """
    span = world.random.uniform(0.8, 1.6) * world.shortest_ttl
    if world.random.random() < 0.5:
        _freeze(world.database, span)
    else:
        _stop(world.database)
        world.later(span, partial(_start, world.database))


def cut(world: World) -> None:
    """A host cannot reach a server for a while."""
    server, host = world.random.choice(world.servers), world.random.choice(world.workers).host
    server.cut.add(host)
    world.note("cut", server=server.name, host=host)

    def mend() -> None:
        server.cut.discard(host)
        world.broker.wake_all()
        world.note("mended", server=server.name, host=host)

    world.later(_span(world), mend)


def step_clock(world: World) -> None:
    """The wall clock of the lease server steps: its keys live longer or shorter."""
    if world.leases is not None:
        by = world.random.choice((-20.0, -1.0, 1.0, 20.0))
        world.leases.ahead += by
        world.note("clock", by=by)


def step_database_clock(world: World) -> None:
    """The wall clock of the database steps, and with it the ends of cooldowns and of its leases."""
    by = world.random.choice((-600.0, -20.0, -1.0, 1.0, 20.0, 600.0))
    world.database.ahead += by
    world.note("database clock", by=by)
    world.waits_longer(-by)


def revoke_call(world: World) -> None:
    """An operator revokes a call, and perhaps terminates it."""
    number = world.random.randrange(1, world.shape.calls + 1)
    call, terminate = f"call-{number}", world.random.random() < 0.5
    world.note("revoked", call=call, terminate=terminate)
    worker_state.revoked.add(call)
    for worker in world.workers:
        world.later(
            world.latency(0.01), partial(worker.revoke, call, terminate=terminate), worker.main
        )


def evict_key(world: World) -> None:
    """The lease store drops one lease or cooldown, because it has too little memory."""
    if world.leases is not None and (keys := sorted(world.leases.memory.leases)):
        call = world.leases.evict(world.random.choice(keys))
        key = named(call.task, call.key.key) if call is not None else None
        world.note("evicted", key=key)


def fail_over(world: World) -> None:
    """A replica that lags behind is promoted: the latest changes of the lease store are lost."""
    if (leases := world.leases) is not None:
        replica = leases.replica()

        def promote() -> None:
            leases.restore(replica)
            world.note("emptied")

        world.later(world.random.choice((0.05, 0.5, 2.0)), promote)


def lose_message(world: World) -> None:
    """The broker loses a message, and perhaps the worker that has it dies too."""
    call, holder = world.broker.lose_one()
    world.note("message lost", call=call)
    for worker in list(world.workers):
        if holder in (worker, worker.host) and world.random.random() < 0.5:
            world.replace_worker(worker)


def copy_message(world: World) -> None:
    """The broker delivers a message twice."""
    world.broker.copy_one()
    world.note("copied")


def release_key(world: World) -> None:
    """An operator takes a key from the attempt that holds it."""
    running = sorted(row.key for row in world.database.rows() if row.state == State.RUNNING)
    if not running:
        return
    task, _, key = world.random.choice(running).partition(" ")

    def release() -> None:
        world.note("released", key=f"{task} {key}")
        with suppress(StoreUnavailable):
            shared = task in SHARED.values()
            given = (f"/{task}/{key}", None) if shared else (key, task)
            LeaseClient.from_app(world.app).release(given[0], task=given[1])
        world.note("released", key=f"{task} {key}")  # the lease perhaps a while after the record

    world.later(0.0, release, world.client)


def deliver_ended_message(world: World) -> None:
    """The broker delivers a message again that was acknowledged, for example from a backup."""

    def deliver() -> None:
        world.note("delivered late", call=world.broker.deliver_ended())

    world.later(world.random.uniform(0, 10 * world.shortest_ttl), deliver)


ACCIDENTS: tuple[Accident, ...] = (
    *(kill_child, kill_child, kill_worker, pause_process, pause_process, pause_host),
    *(stop_server, empty_leases, freeze_server, cut, copy_message, copy_message),
    *(fail_over, evict_key, revoke_call, deliver_ended_message, deliver_ended_message),
    release_key,
)
#: Accidents after which bodies of one key may overlap at any time.
UNSAFE: tuple[Accident, ...] = (step_clock,)
