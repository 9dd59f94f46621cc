"""What a worker uses of its broker: kombu's channel to a simulated Redis, and the keys of all
workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import redis
from kombu.transport import redis as kombu_redis
from kombu.transport import virtual

from celery_leases.stores.redis import workers as redis_workers
from celery_leases.worker import fetching
from celery_leases.worker.takeover import WorkerLease
from tests.simulation.broker import Queued

if TYPE_CHECKING:
    from tests.simulation.broker import Broker
    from tests.simulation.processes import SimulatedProcess, Worker
    from tests.simulation.scheduler import Strand

T = TypeVar("T")
OVERDUE = 26.0
"""Seconds after which kombu takes a connection for broken on which a reply does not come."""


def lease_of(worker: Worker, ttl: float) -> WorkerLease:
    """The lease of *worker*, which a thread of its main process renews."""
    world, made = worker.world, SimpleNamespace(default_channel=None)

    @contextmanager
    def connection() -> Iterator[Any]:
        if made.default_channel is None:
            made.default_channel = RedisChannel(worker.main, ttl / 3, renews=True)
        else:  # another one would be the same, and to make it takes kombu long
            made.default_channel.client.ping()
        yield made

    tasks = frozenset(task.name for task in world.tasks)
    lease = WorkerLease(worker.name, connection, "simulated", ttl, tasks)
    world.scheduler.spawn(worker.main, lease._run, f"{worker.name} renews its lease")
    return lease


class RedisConnection:
    """What a channel uses of kombu's connection."""

    connection_errors = (redis.ConnectionError,)
    brpop_timeout = 1
    channel_max = 65535
    _deliver = virtual.Transport._deliver

    def __init__(self) -> None:
        self._callbacks: dict[str, Callable[[Any], object]] = {}
        self._used_channel_ids: list[int] = []
        self.channels: tuple[Any, ...] = ()
        self.client = SimpleNamespace(transport_options={})
        nothing = {"add": lambda _: None, "discard": lambda _: None}
        self.cycle = SimpleNamespace(_in_protected_read=False, **nothing)

    def close_channel(self, channel: Any) -> None:
        """There is nothing to close."""


class RedisChannel(kombu_redis.Channel):
    """Kombu's channel to the broker, for a thread of *process*, whose requests take at most *wait*
    seconds; that which *renews* the lease of the worker has one of its own.
    """

    do_restore = True

    def __init__(self, process: SimulatedProcess, wait: float, *, renews: bool = False) -> None:
        self._simulated: Client = Client(process, wait, renews=renews)
        super().__init__(RedisConnection())
        self.qos._on_collect.cancel()  # so that Python's end does not meet all channels
        self._simulated.connection.channel = self

    def _create_client(self, asynchronous: bool = False) -> Client:
        return self._simulated

    @property
    def pool(self) -> Client:
        return self._simulated


class Client:
    """What kombu and the library use of a client of redis-py."""

    def __init__(self, process: SimulatedProcess, wait: float, *, renews: bool) -> None:
        self.broker: Broker = process.world.broker
        self.host = process.host
        self.renews = renews
        self._wait = wait
        self.connection: Socket = Socket(self, process)

    def request(self, what: str, do: Callable[[], T], wait: float | None = None) -> T:
        """Execute *do*."""
        return self.broker.request(what, do, _no_answer, self._wait if wait is None else wait)

    def ping(self) -> None:
        """Connect."""
        self.request("connect", lambda: None)

    def pipeline(self) -> Pipeline:
        """Commands that are executed together."""
        return Pipeline(self)

    def transaction(self, work: Callable[[Pipeline], object], *_: str) -> None:
        """Repeat *work* until what it has read is unchanged when its commands are executed."""
        pipe = Pipeline(self)
        work(pipe)
        while not pipe.execute():
            pipe = Pipeline(self)
            work(pipe)

    def parse_response(self, connection: Socket, command: str, **_: Any) -> Any:
        """The reply to the request for a message."""
        return connection.reply()


def _no_answer(executed: bool | None) -> redis.ConnectionError:
    return redis.ConnectionError("no answer")


class Pipeline:
    """Commands that Redis executes in one step, unless a message has changed that was read."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._steps: list[Callable[[], object]] = []
        self._read: list[tuple[Any, Any]] = []
        self._returns = False

    def hget(self, _: str, tag: Any) -> bytes | None:
        """Read an unacknowledged message."""
        broker = self._client.broker

        def read() -> bytes | None:
            self._read.append((tag, broker.unacknowledged.get(tag)))
            return broker.stored(tag)

        return self._client.request("read", read)

    def multi(self) -> None:
        """What follows is executed together."""

    def zadd(self, _: str, times: Mapping[Any, float]) -> Pipeline:
        """The time of a fetch, from kombu's own clock: the next command notes it too."""
        return self

    def zrem(self, _: str, tag: Any) -> Pipeline:
        """Remove the time of a fetch: the next command does."""
        return self

    def hset(self, _: str, tag: Any, text: str) -> Pipeline:
        """Note a message as unacknowledged."""
        broker, host = self._client.broker, self._client.host
        stored = text[1 : text.rindex(', "", ')]
        self._steps.append(lambda: broker.note(Queued.of(stored), host, broker.now()))
        return self

    def hdel(self, _: str, tag: Any) -> Pipeline:
        """Remove a message from the unacknowledged ones."""

        def end() -> None:
            client = self._client
            late = client.broker.world.here is client.broker
            broker, found = client.broker, client.broker.unacknowledged.pop(tag, None)
            if not client.renews:  # kombu's own channel, from which the worker may have it still
                broker.returned |= {(tag, client.host), (tag, getattr(found, "worker", ""))}
            elif (
                found is not None
                and found.worker != client.host
                and not late
                and (tag, client.host) not in broker.returned
            ):
                broker.world.note("returns for another", worker=client.host, tag=tag)

        self._steps.append(end)
        return self

    def rpush(self, _: str, text: str) -> Pipeline:
        """Return a message to its queue."""
        self._returns = True
        self._steps.append(lambda: self._client.broker.push(text))
        return self

    lpush = rpush

    def execute(self) -> bool:
        """Execute all; return whether nothing has changed that was read."""

        def execute() -> bool:
            unacknowledged = self._client.broker.unacknowledged
            if any(unacknowledged.get(tag) is not found for tag, found in self._read):
                return False
            for step in self._steps:
                step()
            return True

        return self._client.request("write", execute)


class Socket:
    """A connection, over which kombu asks for the next message.

    The server executes the request although the worker's process stands still or has been killed.
    It is the owner of the threads that do so.
    """

    alive = True
    has_threads = False

    def __init__(self, client: Client, process: SimulatedProcess) -> None:
        self._broker = client.broker
        self._client = client
        self._process = process
        self.name, self.host, self.clock = process.name, process.host, process.clock
        self.channel: Any = None
        #: The thread that reads the reply.
        self.reader: Strand | None = None
        self._reply: Callable[[], Any] | None = None
        #: When its latest request was sent, and its number.
        self.asked_at = 0.0
        self._number = 0
        #: When a server that waits for a message ends that.
        self._until = math.inf

    @property
    def paused_until(self) -> float:
        """The server goes on."""
        return -math.inf

    @paused_until.setter
    def paused_until(self, until: float) -> None:
        self._process.paused_until = max(until, self._process.paused_until)

    def send_command(self, command: str, *args: Any) -> None:
        """Send a request."""
        self._number += 1
        self._reply, self._until = None, math.inf
        self.asked_at = self._broker.world.scheduler.now
        commands: dict[str, Callable[..., Any]]
        commands = {"EVAL": self._fetch, "BLMOVE": self._move, "BRPOP": self._pop}
        work = partial(
            self._exchange, self._number, command, partial(commands[command], self._number, *args)
        )
        scheduler = self._broker.world.scheduler
        scheduler.spawn(self, work, f"{self.name} asks for a message")

    def _exchange(self, number: int, command: str, do: Callable[[], Any]) -> None:
        def failed(error: Exception) -> Any:
            raise error

        broker, scheduler = self._broker, self._broker.world.scheduler
        try:
            found = self._client.request(command.lower(), do, OVERDUE)
            if self.host in broker.cut:
                who = {"server": broker.name, "op": command, "process": self.name}
                broker.world.note("lost reply", span=OVERDUE, **who)
                scheduler.sleep(OVERDUE)
                raise redis.ConnectionError("no answer")
            reply: Callable[[], Any] = lambda: found  # noqa: E731
        except redis.ConnectionError as error:
            reply = partial(failed, error)
        if number == self._number:
            self._reply = reply
            if self.reader is not None:
                scheduler.wake(self.reader)

    def _fetch(self, _: int, script: str, count: int, *given: Any) -> Any:
        assert script == redis_workers.FETCH.text
        broker, (*keys, _, _) = self._broker, given[:count]
        if (key := broker.first(keys)) is None:
            return None
        queued = broker.lists[key].popleft()
        broker.note(queued, self.host, given[count])
        return key, queued.text(), queued.tag

    def _move(self, number: int, source: str, target: str, *given: Any) -> Any:
        if self._waited(number, [source], given[-1]) is None:
            return None
        self._broker.move(source, target)
        return True

    def _pop(self, number: int, *given: Any) -> Any:
        *keys, seconds = given
        if (key := self._waited(number, keys, seconds)) is None:
            return None
        return key, self._broker.lists[key].popleft().text()

    def _waited(self, number: int, keys: Sequence[str], seconds: float) -> str | None:
        """Wait until one of these lists has a message; the first of them.

        A wait that would end without a message, and be repeated at once, goes on.
        """
        broker, scheduler = self._broker, self._broker.world.scheduler
        while (key := broker.first(keys)) is None or broker.frozen_until > scheduler.now:
            if broker.world.here is broker or number != self._number:
                return None  # nobody reads the reply
            longest = seconds if key is not None or not broker.is_idle() else math.inf
            broker.consumers[self] = scheduler.current
            woken = scheduler.park(min(longest, max(0.0, self._until - scheduler.now)))
            broker.consumers.pop(self, None)
            if not broker.up:
                raise redis.ConnectionError("the connection is lost")
            if not woken and broker.frozen_until <= scheduler.now:
                return None
        return key if number == self._number else None

    def can_read(self, _: float) -> bool:
        """Whether there is a reply."""
        return self._reply is not None

    def reply(self) -> Any:
        """Wait for the reply, and read it."""
        scheduler = self._broker.world.scheduler
        self.reader = scheduler.current
        while self._reply is None:
            if not scheduler.park(fetching.WAIT):
                self._until = scheduler.now
                self._wake()
        reply, self._reply = self._reply, None
        return reply()

    def disconnect(self) -> None:
        """Close the connection: a wait ends."""
        self._number += 1
        self._reply = None
        if self.channel is not None:
            self.channel._in_poll = None
        self._wake()

    def _wake(self) -> None:
        if (waiting := self._broker.consumers.get(self)) is not None:
            self._broker.world.scheduler.wake(waiting)


class SimulatedWorkers(redis_workers.Workers):
    """The leases of all workers, as the scripts of Redis keep them."""

    def __init__(self, pool: Client, prefix: str) -> None:
        self._simulated = pool
        self._broker = pool.broker
        self._workers = prefix

    @property
    def _now(self) -> float:
        return self._broker.now()

    def enter(self, name: str, ttl: float) -> None:
        def enter() -> None:
            self._broker.leases[name] = self._now + ttl

        self._simulated.request("enter", enter)

    def renew(
        self,
        name: str,
        ttl: float,
        kept: float,
        added: Mapping[str, str],
        ended: Sequence[str],
        acknowledged: Sequence[Any] = (),
        unacked: str = "",
        index: str = "",
    ) -> Sequence[str] | None:
        def renew() -> Sequence[str] | None:
            leases, now = self._broker.leases, self._now
            if name not in leases:
                self._broker.lapsed[name.partition("/")[0]] = now
                return None
            over = [other for other, until in leases.items() if until < now]
            leases[name] = now + ttl
            messages = self._messages(name)
            self._broker.kept_until[self.messages(name)] = now + kept
            if not (added or ended or acknowledged):
                return over[: redis_workers.BATCH]
            messages.update({tag: task.encode() for tag, task in added.items()})
            for tag in (*ended, *acknowledged):
                messages.pop(tag, None)
            for tag in acknowledged:
                found = self._broker.unacknowledged.pop(tag, None)
                host = name.partition("/")[0]
                another = found is not None and found.worker != host
                if (
                    another
                    and (tag, host) not in self._broker.returned
                    and self._is_registered(tag)
                ):
                    self._broker.world.note("acknowledges for another", worker=name, tag=tag)
            return over[: redis_workers.BATCH]

        added, ended, acknowledged = dict(added), list(ended), list(acknowledged)
        return self._simulated.request("renew", renew)

    def take(self, name: str, ttl: float) -> tuple[str, Sequence[str]] | None:
        def take() -> tuple[str, Sequence[str]] | None:
            leases, registered = self._broker.leases, self._broker.registered
            until = leases.get(name)
            if until is None or until >= self._now:
                return None
            taken = name
            if redis_workers.own_name(name) == name:
                taken = f"{name}!{round(until * 1000)}"
                registered[self.messages(taken)] = self._messages(name)
                del registered[self.messages(name)]
                kept_until = self._broker.kept_until
                kept_until[self.messages(taken)] = kept_until.pop(self.messages(name), math.inf)
            del leases[name]
            leases[taken] = self._now + ttl
            return taken, list(self._messages(taken))[::-1]

        return self._simulated.request("take", take)

    def fetched(self, ended: str, index: str) -> Sequence[str]:
        since, before = redis_workers._fetched_between(ended)

        def fetched() -> Sequence[Any]:
            last = min(before, self._now - redis_workers._REGISTERED_AFTER)
            unacknowledged = self._broker.unacknowledged.items()
            return [tag for tag, found in unacknowledged if since <= found.at <= last][::-1]

        return self._simulated.request("fetched", fetched)

    def _messages(self, name: str) -> dict[Any, bytes]:
        """What a worker has registered, as long as that is kept."""
        key, broker = self.messages(name), self._broker
        if broker.kept_until.get(key, math.inf) <= self._now:
            broker.registered.pop(key, None)
        return broker.registered.setdefault(key, {})

    def _is_registered(self, tag: Any) -> bool:
        return any(tag in self._messages(name) for name in self._broker.leases)

    def unregistered(self, tags: Sequence[str], unacked: str) -> Mapping[str, bytes]:
        def unregistered() -> Mapping[str, bytes]:
            found = {tag: self._broker.stored(tag) for tag in tags if not self._is_registered(tag)}
            # Another worker may have fetched it a moment before.
            self._broker.returned |= {(tag, self._simulated.host) for tag in found}
            return {tag: message for tag, message in found.items() if message is not None}

        return self._simulated.request("unregistered", unregistered)

    def register(self, ended: str, kept: float, added: Mapping[str, str]) -> Sequence[str]:
        def register() -> Sequence[str]:
            new: list[Any] = [tag for tag in added if not self._is_registered(tag)]
            broker = self._broker
            living = {name.partition("/")[0] for name in broker.leases if name != ended}
            holders = ((tag, broker.unacknowledged.get(tag)) for tag in new)
            # A worker that lives, or can renew a lease that nobody has ended yet, may not have
            # registered what it has just fetched.
            broker.returned |= {
                (tag, found.worker) for tag, found in holders if found and found.worker in living
            }
            self._messages(ended).update({tag: added[tag].encode() for tag in new})
            broker.kept_until[self.messages(ended)] = self._now + kept
            return new

        return self._simulated.request("register", register)

    def unacknowledged(
        self, ended: str, tags: Sequence[Any], unacked: str, index: str
    ) -> Sequence[tuple[str, bytes, bytes]]:
        def read() -> Sequence[tuple[str, bytes, bytes]]:
            registered, found = self._messages(ended), []
            for tag in tags:
                if (message := self._broker.stored(tag)) is None:
                    registered.pop(tag, None)
                elif tag in registered:
                    fetched = repr(self._broker.unacknowledged[tag].at).encode()
                    found.append((tag, fetched, message))
            return found

        return self._simulated.request("read", read)

    def give_back(
        self,
        ended: str,
        moves: Sequence[Any],
        unacked: str,
        index: str,
        prefix: str,
    ) -> int:
        def give_back() -> int:
            registered, returned = self._messages(ended), 0
            for tag, fetched, pushes in moves:
                mine = registered.pop(tag, None) is not None
                found = self._broker.unacknowledged.get(tag)
                if mine and found is not None and repr(found.at).encode() == fetched:
                    del self._broker.unacknowledged[tag]
                    if found.worker != ended.partition("/")[0]:
                        # Kombu has returned it before, and another worker has fetched it.
                        self._broker.returned.add((tag, found.worker))
                    for _, text in pushes:
                        self._broker.push(text)
                    returned += 1
            return returned

        return self._simulated.request("return", give_back)

    def forget(self, name: str) -> None:
        def forget() -> None:
            self._broker.leases.pop(name, None)
            self._broker.registered.pop(self.messages(name), None)

        self._simulated.request("forget", forget)
