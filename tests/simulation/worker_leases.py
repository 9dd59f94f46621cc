"""What the lease of a worker uses of its broker: kombu's channel, and the keys of all workers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

from celery_leases.stores.redis import workers as redis_workers
from celery_leases.worker.takeover import WorkerLease

if TYPE_CHECKING:
    from tests.simulation.broker import Broker
    from tests.simulation.processes import Worker

T = TypeVar("T")


def lease_of(worker: Worker, ttl: float) -> WorkerLease:
    """The lease of *worker*, which a thread of its main process renews."""
    world = worker.world
    channel = LeaseChannel(world.broker, ttl)

    @contextmanager
    def connection() -> Iterator[Any]:
        yield SimpleNamespace(default_channel=channel)

    tasks = frozenset(task.name for task in world.tasks)
    lease = WorkerLease(worker.name, connection, "simulated", ttl, tasks)
    world.scheduler.spawn(worker.main, lease._run, f"{worker.name} renews its lease")
    return lease


class LeaseChannel:
    """A channel to the broker."""

    unacked_key = "unacked"
    unacked_index_key = "unacked_index"
    global_keyprefix = ""

    def __init__(self, broker: Broker, ttl: float) -> None:
        self.broker = broker
        self.wait = ttl / 3
        self.pool = self.qos = self

    def request(self, what: str, do: Callable[[], T]) -> T:
        """Execute *do*."""
        return self.broker.request(what, do, lambda _: OSError("no answer"), self.wait)

    def stored(self, tag: Any) -> bytes | None:
        """An unacknowledged message in kombu's form."""
        found = self.broker.unacknowledged.get(tag)
        if found is None:
            return None
        return json.dumps([json.loads(found.queued.payload), "", "work"]).encode()

    def _do_restore_message(self, _: Any, exchange: str, routing_key: str, pipe: Any) -> None:
        pipe.rpush(routing_key, "")

    def restore_by_tag(self, tag: Any, *, leftmost: bool = False) -> None:
        """Return a message to its queue."""

        def restore() -> None:
            if (found := self.broker.unacknowledged.get(tag)) is not None:
                self.broker.give_back(found)

        self.request("restore", restore)


class SimulatedWorkers(redis_workers.Workers):
    """The leases of all workers, as the scripts of Redis keep them."""

    def __init__(self, channel: LeaseChannel, prefix: str) -> None:
        self._channel = channel
        self._broker = channel.broker
        self._workers = prefix

    @property
    def _now(self) -> float:
        return self._broker.now()

    def enter(self, name: str, ttl: float) -> None:
        def enter() -> None:
            self._broker.leases[name] = self._now + ttl

        self._channel.request("enter", enter)

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
            leases = self._broker.leases
            if name not in leases:
                return None
            over = [other for other, until in leases.items() if until < self._now]
            leases[name] = self._now + ttl
            messages = self._broker.registered.setdefault(self.messages(name), {})
            messages.update({tag: task.encode() for tag, task in added.items()})
            for tag in (*ended, *acknowledged):
                messages.pop(tag, None)
            for tag in acknowledged:
                found = self._broker.unacknowledged.pop(tag, None)
                another = found is not None and found.worker.name != name.partition("/")[0]
                if another and self._is_registered(tag):
                    self._broker.world.note("acknowledges for another", worker=name)
            return over[: redis_workers.BATCH]

        changes = dict(added), list(ended), list(acknowledged)
        added, ended, acknowledged = changes
        return self._channel.request("renew", renew)

    def take(self, name: str, ttl: float) -> tuple[str, Sequence[str]] | None:
        def take() -> tuple[str, Sequence[str]] | None:
            leases, registered = self._broker.leases, self._broker.registered
            until = leases.get(name)
            if until is None or until >= self._now:
                return None
            taken = name
            if redis_workers.own_name(name) == name:
                taken = f"{name}!{round(until * 1000)}"
                if (messages := registered.pop(self.messages(name), None)) is not None:
                    registered[self.messages(taken)] = messages
            del leases[name]
            leases[taken] = self._now + ttl
            return taken, list(registered.get(self.messages(taken), {}))[::-1]

        return self._channel.request("take", take)

    def fetched(self, ended: str, index: str) -> Sequence[str]:
        since, before = redis_workers._fetched_between(ended)

        def fetched() -> Sequence[Any]:
            last = min(before, self._now - redis_workers._REGISTERED_AFTER)
            unacknowledged = self._broker.unacknowledged.items()
            return [tag for tag, found in unacknowledged if since <= found.at <= last][::-1]

        return self._channel.request("fetched", fetched)

    def _is_registered(self, tag: Any) -> bool:
        leases, registered = self._broker.leases, self._broker.registered
        return any(tag in registered.get(self.messages(name), {}) for name in leases)

    def unregistered(self, tags: Sequence[str], unacked: str) -> Mapping[str, bytes]:
        def unregistered() -> Mapping[str, bytes]:
            found = {tag: self._channel.stored(tag) for tag in tags if not self._is_registered(tag)}
            return {tag: message for tag, message in found.items() if message is not None}

        return self._channel.request("unregistered", unregistered)

    def register(self, ended: str, kept: float, added: Mapping[str, str]) -> Sequence[str]:
        def register() -> Sequence[str]:
            new = [tag for tag in added if not self._is_registered(tag)]
            messages = self._broker.registered.setdefault(self.messages(ended), {})
            messages.update({tag: added[tag].encode() for tag in new})
            return new

        return self._channel.request("register", register)

    def unacknowledged(
        self, ended: str, tags: Sequence[Any], unacked: str, index: str
    ) -> Sequence[tuple[str, bytes, bytes]]:
        def read() -> Sequence[tuple[str, bytes, bytes]]:
            registered, found = self._broker.registered.get(self.messages(ended), {}), []
            for tag in tags:
                if (message := self._channel.stored(tag)) is None:
                    registered.pop(tag, None)
                elif tag in registered:
                    fetched = repr(self._broker.unacknowledged[tag].at).encode()
                    found.append((tag, fetched, message))
            return found

        return self._channel.request("read", read)

    def give_back(
        self,
        ended: str,
        moves: Sequence[Any],
        unacked: str,
        index: str,
        prefix: str,
    ) -> int:
        def give_back() -> int:
            registered, returned = self._broker.registered.get(self.messages(ended), {}), 0
            for tag, fetched, _ in moves:
                mine = registered.pop(tag, None) is not None
                found = self._broker.unacknowledged.get(tag)
                if mine and found is not None and repr(found.at).encode() == fetched:
                    self._broker.give_back(found)
                    returned += 1
            return returned

        return self._channel.request("return", give_back)

    def forget(self, name: str) -> None:
        def forget() -> None:
            self._broker.leases.pop(name, None)
            self._broker.registered.pop(self.messages(name), None)

        self._channel.request("forget", forget)
