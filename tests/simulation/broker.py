"""A broker in memory that delivers each message at least once, and kombu's transport to it."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kombu.exceptions import OperationalError
from kombu.transport import TRANSPORT_ALIASES, virtual

from celery_leases.stores.redis.workers import Fetched
from celery_leases.worker.headers import ORDER
from tests.simulation.servers import Server

if TYPE_CHECKING:
    from tests.simulation.world import World

PUBLISH_WAIT = 5.0
"""Seconds until a publish without a reply fails."""
TRANSPORT_ALIASES["simulated"] = "tests.simulation.broker:Transport"


@dataclass
class Queued:
    """A message of the broker; ``tag`` names it for ever."""

    tag: int
    payload: str
    redelivered: bool = False
    #: How often it was returned to a queue that counts that.
    returns: int = 0

    @classmethod
    def of(cls, text: str) -> Queued:
        """A message in the form in which kombu stores it in Redis."""
        message = json.loads(text)
        info = message["properties"]["delivery_info"]
        return cls(message["properties"]["delivery_tag"], text, bool(info.get("redelivered")))

    def text(self) -> str:
        """The message in that form."""
        message = json.loads(self.payload)
        message["properties"]["delivery_tag"] = self.tag
        if self.redelivered:
            message["headers"]["redelivered"] = True
            message["properties"]["delivery_info"]["redelivered"] = True
        return json.dumps(message)


@dataclass
class Unacknowledged:
    """A message that *worker* has, which on Redis is the name of its host."""

    queued: Queued
    worker: Any
    #: When the worker fetched it, in seconds since 1970.
    at: float


QUEUE = "work"


class Broker(Server):
    """One queue, which on Redis has several lists.

    *visibility*: seconds after which a message is delivered again although its worker lives;
    ``None``: only once the connection of its worker has ended, as RabbitMQ does it.

    *limit*: how often a message may be returned before the queue discards it; ``None``: it does not
    count. RabbitMQ 4 counts each ``basic.reject`` that requeues, and each message that a worker has
    when its connection ends.
    """

    def __init__(self, world: World, visibility: float | None, limit: int | None) -> None:
        super().__init__(world, "broker")
        self.visibility = visibility
        self.limit = limit
        #: Until when it delivers messages, but takes none, as RabbitMQ does with too little memory.
        self.takes_none_until = -math.inf
        #: Messages whose process has died in the pool of a worker that lives.
        self.died_with: set[int] = set()
        self.lists: defaultdict[str, deque[Queued]] = defaultdict(deque)
        self.waiting = self.lists[QUEUE]
        self.unacknowledged: dict[int, Unacknowledged] = {}
        #: All messages that were ever published.
        self.accepted: list[str] = []
        #: Threads to wake when there is a message.
        self.consumers: dict[Any, Any] = {}
        #: The leases of workers, until when they last, what each has registered, and until when
        #: that is kept.
        self.leases: dict[str, float] = {}
        self.registered: dict[str, dict[Any, Fetched]] = {}
        self.kept_until: dict[str, float] = {}
        self._tags = 0
        #: How often workers have fetched each message.
        self._fetched: Counter[int] = Counter()
        #: When each host last knew that the lease of its worker had ended.
        self.lapsed: defaultdict[Any, float] = defaultdict(float)
        #: A message that no other worker can have was not acknowledged within the visibility
        #: timeout.
        self.forgotten = False
        #: Messages that it does not deliver yet.
        self._held_back: set[int] = set()
        #: The workers whose connection was lost.
        self._interrupted: set[Any] = set()

    def stop(self) -> None:
        """Accept no connections; those that it had are lost."""
        super().stop()
        self.wake_all()

    # -- publishing --------------------------------------------------------------------------------

    def publish(self, message: dict[str, Any]) -> None:
        """Accept a message; raises ``OperationalError`` if it was not confirmed."""
        payload = json.dumps(message)
        if self.takes_none_until > self.world.scheduler.now:
            process = self.world.here.name
            self.world.note("lost request", server="broker", op="publish", process=process)
            self.world.scheduler.sleep(PUBLISH_WAIT)
            raise _publish_error(None)
        self.request("publish", lambda: self._accept(payload), _publish_error, PUBLISH_WAIT)

    def _accept(self, payload: str) -> None:
        self._tags += 1
        self.accepted.append(payload)
        if (order := json.loads(payload)["headers"].get(ORDER)) is not None:
            self.world.note("ordered", call=order[0], order=order[1])
        queued, world = Queued(self._tags, payload), self.world
        if world.faults.active and world.random.random() < world.faults.held_back:
            self._held_back.add(queued.tag)
            world.later(
                world.random.uniform(0, 8 * world.shortest_ttl), lambda: self._offer(queued)
            )
        else:
            self._offer(queued)

    def _offer(self, queued: Queued) -> None:
        self._held_back.discard(queued.tag)
        if self.world.random.random() < self.world.faults.reorder:
            self.waiting.appendleft(queued)
        else:
            self.waiting.append(queued)
        for strand in list(self.consumers.values()):
            self.world.scheduler.wake(strand)

    def copy_one(self) -> None:
        """Deliver one message twice."""
        candidates = [*self.waiting, *(each.queued for each in self.unacknowledged.values())]
        if candidates:
            chosen = self.world.random.choice(candidates)
            self._tags += 1
            self._offer(Queued(self._tags, chosen.payload, True))

    def deliver_ended(self) -> str | None:
        """Deliver a message again that was acknowledged; returns the id of its call."""
        left = {each.queued.payload for each in self.unacknowledged.values()}
        left |= {queued.payload for queued in self.waiting}
        if not (ended := [payload for payload in self.accepted if payload not in left]):
            return None
        chosen = self.world.random.choice(ended)
        self._tags += 1
        self._offer(Queued(self._tags, chosen, self.world.random.random() < 0.5))
        return str(json.loads(chosen)["headers"]["id"])

    def lose_one(self) -> tuple[str | None, Any]:
        """Lose one message; returns the id of its call, and which worker has it."""
        worker = None
        if self.waiting:
            place = self.world.random.randrange(len(self.waiting))
            lost = self.waiting[place]
            del self.waiting[place]
        elif self.unacknowledged:
            tag = self.world.random.choice(sorted(self.unacknowledged))
            found = self.unacknowledged.pop(tag)
            lost, worker = found.queued, found.worker
        else:
            return None, None
        return str(json.loads(lost.payload)["headers"]["id"]), worker

    # -- consuming, as Redis executes it -----------------------------------------------------------

    def first(self, keys: Sequence[str]) -> str | None:
        """The first of these lists that has a message."""
        return next((key for key in keys if self.lists[key]), None)

    def is_idle(self) -> bool:
        """Whether no list has a message."""
        return not any(self.lists.values())

    def move(self, source: str, target: str) -> None:
        """Move the next message of a list to the end from which the next one is taken."""
        self.lists[target].appendleft(self.lists[source].popleft())
        self.wake_all()  # those that wait at the first list may look at the second one soon

    def note(self, queued: Queued, host: str, at: float) -> None:
        """Note that a worker on *host* has fetched a message, in seconds since 1970."""
        self.unacknowledged[queued.tag] = found = Unacknowledged(queued, host, at)
        self._fetched[queued.tag] += 1
        if self.visibility is not None:
            self.world.later(self.visibility, lambda: self._time_out(found), self)

    def _time_out(self, found: Unacknowledged) -> None:
        tag = found.queued.tag
        alone = self._fetched[tag] == 1 and self.lapsed[found.worker] < found.at
        self.forgotten |= self.unacknowledged.get(tag) is found and alone
        self.give_back(found)

    def stored(self, tag: Any) -> bytes | None:
        """An unacknowledged message in kombu's form."""
        found = self.unacknowledged.get(tag)
        return f'[{found.queued.text()}, "", "{QUEUE}"]'.encode() if found is not None else None

    def push(self, text: str) -> None:
        """Return a message to the queue."""
        self._offer(Queued.of(text))

    # -- consuming ---------------------------------------------------------------------------------

    def take(self, worker: Any) -> Queued | None:
        """The next message for *worker*."""
        now = self.world.scheduler.now
        if worker in self._interrupted and self.up and worker.host not in self.cut:
            self._interrupted.discard(worker)
            self.disconnected(worker)  # it connects again
        if not self.up or self.frozen_until > now or worker.host in self.cut or not self.waiting:
            return None
        queued = self.waiting.popleft()
        self.unacknowledged[queued.tag] = found = Unacknowledged(queued, worker, self.now())
        if self.visibility is not None:
            self.world.later(self.visibility, lambda: self.give_back(found), self)
        return queued

    def acknowledge(self, worker: Any, queued: Queued) -> None:
        """Forget a message; what is sent to a broker that cannot be reached is lost.

        RabbitMQ knows the delivery, and Redis only the message, whoever has it now.
        """
        found = self.unacknowledged.get(queued.tag)
        if not self._is_reached_by(worker):
            if self.visibility is not None:
                raise OperationalError("the simulated broker does not answer")
            self._interrupted.add(worker)
        elif found is not None and (
            self.visibility is not None or (found.worker is worker and found.queued is queued)
        ):
            del self.unacknowledged[queued.tag]

    def reject(self, worker: Any, queued: Queued, *, requeue: bool) -> None:
        """Return a message at once, or forget it."""
        tag = queued.tag
        found = self.unacknowledged.get(tag)
        self.acknowledge(worker, queued)
        if requeue and found is not None and tag not in self.unacknowledged:
            self._return(found.queued, "death" if tag in self.died_with else "reject")
        self.died_with.discard(tag)

    def _is_reached_by(self, worker: Any) -> bool:
        return self.up and worker.host not in self.cut

    def disconnected(self, worker: Any) -> None:
        """Return the messages of a dead worker, if the broker sees that its connection ended."""
        if self.visibility is None:
            for found in list(self.unacknowledged.values()):
                if found.worker is worker:
                    self.give_back(found)

    def is_empty(self) -> bool:
        """Whether it has no message, delivered or not."""
        return self.is_idle() and not (self.unacknowledged or self._held_back)

    def give_back(self, found: Unacknowledged) -> None:
        """Return a message to the queue, unless it was acknowledged."""
        tag = found.queued.tag
        if self.unacknowledged.get(tag) is found:
            del self.unacknowledged[tag]
            self._return(found.queued, "lost connection")

    def _return(self, queued: Queued, why: str) -> None:
        """Deliver a message again, unless that was done too often."""
        returned = Queued(queued.tag, queued.payload, True, queued.returns + 1)
        left = math.inf if self.limit is None else self.limit - returned.returns
        if left <= 0:
            call = json.loads(queued.payload)["headers"]["id"]
            self.world.note("returned" if left == 0 else "discarded", call=call, why=why)
        if left >= 0:
            self._offer(returned)

    def wake_all(self) -> None:
        """Let all workers look for messages: it can be reached again, or no longer."""
        for strand in list(self.consumers.values()):
            self.world.scheduler.wake(strand)


def _publish_error(executed: bool | None) -> OperationalError:
    return OperationalError("the simulated broker does not answer")


# -- kombu -----------------------------------------------------------------------------------------

current: Broker | None = None
"""The broker of the running simulation."""


class Channel(virtual.Channel):
    """Publishes to the current broker."""

    do_restore = False

    def _put(self, queue: str, message: dict[str, Any], **_: Any) -> None:
        assert current is not None
        current.publish(message)

    def _size(self, queue: str) -> int:
        return 0

    def _new_queue(self, queue: str, **_: Any) -> None:
        pass

    def _has_queue(self, queue: str, **_: Any) -> bool:
        return True


class Transport(virtual.Transport):
    """Kombu's transport to the simulated broker."""

    Channel = Channel
    driver_type = driver_name = "simulated"
    connection_errors = (OperationalError,)
    channel_errors = ()


class Delivered:
    """The channel of one delivered message."""

    no_ack_consumers: None = None

    def __init__(self, broker: Broker, worker: Any, queued: Queued) -> None:
        self._broker = broker
        self._worker = worker
        self._queued = queued
        self.qos = worker.qos

    def message(self) -> virtual.Message:
        """The message as Celery's consumer gets it."""
        queued = self._queued
        payload = json.loads(queued.payload)
        payload["properties"]["delivery_tag"] = queued.tag
        payload["properties"]["delivery_info"]["redelivered"] = queued.redelivered
        if queued.redelivered and self._broker.limit is not None:
            payload["headers"]["x-delivery-count"] = queued.returns
        return virtual.Message(payload, channel=self)

    def decode_body(self, body: Any, encoding: str | None = None) -> Any:
        """As kombu's channels do."""
        return virtual.Channel.codecs[encoding].decode(body) if encoding else body

    def basic_ack(self, tag: int, multiple: bool = False) -> None:
        """Acknowledge."""
        self._broker.acknowledge(self._worker, self._queued)

    def basic_reject(self, tag: int, requeue: bool = False) -> None:
        """Reject."""
        self._broker.reject(self._worker, self._queued, requeue=requeue)
