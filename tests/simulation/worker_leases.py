"""What a worker uses of its broker: kombu's channel to a simulated Redis, and the keys of all
workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import redis
from kombu.transport import redis as kombu_redis
from kombu.transport import virtual

from celery_leases.stores.redis import workers as redis_workers
from celery_leases.stores.redis.workers import Fetched
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
            made.default_channel = RedisChannel(worker.main, ttl / 3)
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
    seconds.
    """

    do_restore = True

    def __init__(self, process: SimulatedProcess, wait: float) -> None:
        self._simulated: Client = Client(process, wait)
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

    def __init__(self, process: SimulatedProcess, wait: float) -> None:
        self.broker: Broker = process.world.broker
        self.host = process.host
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

    def parse_response(self, connection: Socket, command: str, **_: Any) -> Any:
        """The reply to the request for a message."""
        return connection.reply()


def _no_answer(executed: bool | None) -> redis.ConnectionError:
    return redis.ConnectionError("no answer")


class Pipeline:
    """Commands that Redis executes in one step."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._steps: list[Callable[[], object]] = []
        self._at = 0.0

    def zadd(self, _: str, times: Mapping[Any, float]) -> Pipeline:
        """The time of a fetch: the next command notes it."""
        (self._at,) = times.values()
        return self

    def zrem(self, _: str, tag: Any) -> Pipeline:
        """Remove the time of a fetch: the next command does."""
        return self

    def hset(self, _: str, tag: Any, text: str) -> Pipeline:
        """Note a message as unacknowledged."""
        broker, host = self._client.broker, self._client.host
        at, stored = self._at, text[1 : text.rindex(', "", ')]
        self._steps.append(lambda: broker.note(Queued.of(stored), host, at))
        return self

    def hdel(self, _: str, tag: Any) -> Pipeline:
        """Remove a message from the unacknowledged ones."""
        self._steps.append(lambda: self._client.broker.unacknowledged.pop(tag, None))
        return self

    def execute(self) -> None:
        """Execute all."""

        def execute() -> None:
            for step in self._steps:
                step()

        self._client.request("write", execute)


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
        #: The number of its latest request.
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
        added: Mapping[str, Fetched],
        ended: Sequence[str],
        acknowledged: Mapping[Any, Fetched] = MappingProxyType({}),
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
            messages.update(added)
            for tag in ended:
                messages.pop(tag, None)
            for tag, fetched in acknowledged.items():
                self._end(tag, fetched, "acknowledges for another")
            return over[: redis_workers.BATCH]

        added, ended, acknowledged = dict(added), list(ended), dict(acknowledged)
        return self._simulated.request("renew", renew)

    def _is_latest(self, tag: Any, fetched: Fetched) -> bool:
        found = self._broker.unacknowledged.get(tag)
        return found is not None and (fetched == "" or float(fetched) == found.at)

    def _end(self, tag: Any, fetched: Fetched, what: str) -> bool:
        """Remove a message of this worker; note if another one has it."""
        if not self._is_latest(tag, fetched):
            return False
        found, host = self._broker.unacknowledged.pop(tag), self._simulated.host
        if found.worker != host:
            self._broker.world.note(what, worker=host, tag=tag)
        return True

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

    def fetched(self, ended: str, index: str) -> Mapping[str, Fetched]:
        since, before = redis_workers._fetched_between(ended)

        def fetched() -> Mapping[Any, Fetched]:
            last = min(before, self._now - redis_workers._REGISTERED_AFTER)
            found = list(self._broker.unacknowledged.items())[::-1]
            return {tag: each.at for tag, each in found if since <= each.at <= last}

        return self._simulated.request("fetched", fetched)

    def _messages(self, name: str) -> dict[Any, Fetched]:
        """What a worker has registered, as long as that is kept."""
        key, broker = self.messages(name), self._broker
        if broker.kept_until.get(key, math.inf) <= self._now:
            broker.registered.pop(key, None)
        return broker.registered.setdefault(key, {})

    def _is_registered(self, tag: Any) -> bool:
        hashes = map(self._messages, self._broker.leases)
        return any(tag in each and self._is_latest(tag, each[tag]) for each in hashes)

    def unregistered(self, tags: Sequence[str], unacked: str, index: str) -> Mapping[str, bytes]:
        def unregistered() -> Mapping[str, bytes]:
            found = {tag: self._broker.stored(tag) for tag in tags if not self._is_registered(tag)}
            return {tag: message for tag, message in found.items() if message is not None}

        return self._simulated.request("unregistered", unregistered)

    def register(
        self, ended: str, kept: float, added: Mapping[str, Fetched], index: str
    ) -> Sequence[str]:
        def register() -> Sequence[str]:
            new = {tag: at for tag, at in added.items() if not self._is_registered(tag)}
            self._messages(ended).update(new)
            self._broker.kept_until[self.messages(ended)] = self._now + kept
            return list(new)

        return self._simulated.request("register", register)

    def unacknowledged(
        self, ended: str, tags: Sequence[Any], unacked: str, index: str
    ) -> Sequence[tuple[str, Fetched, bytes]]:
        def read() -> Sequence[tuple[str, Fetched, bytes]]:
            registered, found = self._messages(ended), []
            for tag in tags:
                message, fetched = self._broker.stored(tag), registered.get(tag, "")
                if message is None or not self._is_latest(tag, fetched):
                    registered.pop(tag, None)
                elif tag in registered:
                    found.append((tag, self._broker.unacknowledged[tag].at, message))
            return found

        return self._simulated.request("read", read)

    def stored(self, tag: Any, unacked: str) -> bytes | None:
        return self._simulated.request("read", lambda: self._broker.stored(tag))

    def give_back(self, moves: Sequence[Any], unacked: str, index: str, prefix: str) -> int:
        def give_back() -> int:
            returned = 0
            for tag, fetched, pushes in moves:
                if self._workers:  # as the messages of an ended worker
                    done = self._is_latest(tag, fetched)
                    if done:
                        del self._broker.unacknowledged[tag]
                else:
                    done = self._end(tag, fetched, "returns for another")
                for _, _, text in pushes if done else ():
                    self._broker.push(text)
                returned += done
            return returned

        return self._simulated.request("return", give_back)

    def forget(self, name: str) -> None:
        def forget() -> None:
            self._broker.leases.pop(name, None)
            self._broker.registered.pop(self.messages(name), None)

        self._simulated.request("forget", forget)
