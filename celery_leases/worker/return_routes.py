"""The queue of a delivery, and the route by which a copy of its message returns to it."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from math import ceil
from typing import Any, Final

from amqp.exceptions import NotFound
from celery import Celery
from celery.utils.quorum_queues import detect_quorum_queues
from kombu import Exchange, Queue
from kombu.serialization import registry
from kombu.transport.native_delayed_delivery import (
    CELERY_DELAYED_DELIVERY_EXCHANGE,
    MAX_LEVEL,
    calculate_routing_key,
    level_name,
)

from celery_leases.signals import logger

ORIGIN: Final = "celery_leases_origin"
"""The field of the request that carries queue and content type of a message to the pool child."""

_BROKERS_OWN: Final = {
    "redelivered",
    "x-death",
    "x-delivery-count",
    "x-acquired-count",
    "x-delay",
    "CC",
}
_BROKERS_OWN_PREFIXES: Final = ("x-first-death-", "x-last-death-")


def origin_of(message: Any, worker: Any) -> dict[str, str]:
    """What a pool child needs to publish *message* again unchanged; *worker* is Celery's, if there
    is one in this process.

    ``queue`` is missing if the broker does not say from which queue a delivery is.
    """
    info = message.delivery_info or {}
    queue = None
    if (tag := info.get("consumer_tag")) is not None:
        consumer = getattr(getattr(worker, "consumer", None), "task_consumer", None)
        for name, active in dict(getattr(consumer, "_active_tags", None) or {}).items():
            if active == tag:
                queue = name
    if queue is None and info.get("exchange") == "":
        queue = info.get("routing_key")
    origin = {"content_type": message.content_type} if message.content_type else {}
    return {**origin, "queue": queue} if queue else origin


def queue_of(request: Any) -> str | None:
    """The queue of the delivery *request*; ``None`` if the broker does not say."""
    queue: str | None = (request.__dict__.get(ORIGIN) or {}).get("queue")
    return queue


def properties_of(request: Any) -> dict[str, Any]:
    """The options under which the message of *request* was published, as far as Celery would lose
    them.
    """
    fields = request.__dict__
    content_type = (fields.get(ORIGIN) or {}).get("content_type")
    given = {
        "serializer": registry.type_to_name.get(content_type),
        "compression": fields.get("compression"),
        "argsrepr": fields.get("argsrepr"),
        "kwargsrepr": fields.get("kwargsrepr"),
        "delivery_mode": (fields.get("properties") or {}).get("delivery_mode"),
    }
    return {name: value for name, value in given.items() if value}


def stamps_of(request: Any) -> dict[str, Any]:
    """The headers with the stamps of *request*."""
    stamps = {name: request.__dict__.get(name) for name in ("stamped_headers", "stamps")}
    return {name: value for name, value in stamps.items() if value is not None}


def without_brokers_own(headers: Mapping[str, Any]) -> dict[str, Any]:
    """*headers* without those that the broker has added, or reads.

    RabbitMQ drops a message with the ``x-death`` of an earlier wait, because it takes the message
    for one in a cycle.
    """
    return {
        name: value
        for name, value in headers.items()
        if name not in _BROKERS_OWN and not name.startswith(_BROKERS_OWN_PREFIXES)
    }


def deliveries_of(request: Any) -> int:
    """How often the broker has delivered this message before; 0 if it does not count."""
    if not (request.delivery_info or {}).get("redelivered"):
        return 0  # the header came with a message that Celery has published again
    count = (request.headers or {}).get("x-delivery-count")
    return count if isinstance(count, int) else 0


class AsGiven:
    """A router for ``send_task`` that leaves the route unchanged."""

    def route(self, options: dict[str, Any], *_: Any, **__: Any) -> dict[str, Any]:
        """*options* unchanged."""
        return options


class Routes:
    """The routes back to the queues of one app, in one process.

    A copy goes to the queue of its delivery, bypassing all exchanges of the user. Where the app has
    quorum queues, a copy waits in Celery's native delayed delivery and not in a worker: a worker
    that consumes quorum queues has a fixed prefetch count, which messages with a countdown would
    use up. The queue is bound to that with a key of celery_leases, because Celery binds only the
    exchange of the queue, and a direct one not at all.
    """

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._bound: set[str] = set()
        self._told = False

    def back(self, producer: Any, request: Any, delay: float) -> dict[str, Any]:
        """The options of a message that returns to the queue of *request* in *delay* seconds."""
        queue = queue_of(request)
        on_rabbit = producer.connection.transport.driver_type == "amqp"
        given: dict[str, Any] = {"declare": [], "exchange_type": "direct"}
        if on_rabbit:
            given["mandatory"] = True  # else RabbitMQ confirms a message that no queue gets
        if queue is None:
            info = request.delivery_info or {}
            exchange, key = info.get("exchange"), info.get("routing_key")
            to = Queue(key or "", Exchange(exchange or ""))
            if known := self._exchange(exchange):
                given |= {"declare": [known], "exchange_type": known.type}
            return given | {
                "queue": to,
                "exchange": exchange,
                "routing_key": key,
                "countdown": delay,
            }
        if on_rabbit and detect_quorum_queues(self._app, "amqp")[0] and self._bind(producer, queue):
            key = calculate_routing_key(max(1, ceil(delay)), _key_of(queue))
            # Celery looks at the type of a queue's exchange, whatever the exchange of the message.
            to = Queue(queue, Exchange("", "topic"))
            return given | {"queue": to, "exchange": level_name(MAX_LEVEL), "routing_key": key}
        return given | {"queue": Queue(queue, Exchange("")), "countdown": delay}

    def _exchange(self, name: str | None) -> Exchange | None:
        """The exchange of that name, if a queue of the app has it; a copy declares it.

        Where kombu itself routes, as for Redis, a process takes an exchange it has not declared for
        a direct one, and a message of a topic or broadcast reaches no worker.
        """
        known = (queue.exchange for queue in self._app.amqp.queues.values())
        return next((exchange for exchange in known if name and exchange.name == name), None)

    def forget(self) -> None:
        """Bind again on the next use: the broker may have lost its bindings."""
        self._bound.clear()

    def delivery_limit(self, request: Any) -> int | None:
        """How many deliveries a quorum queue allows before RabbitMQ discards a message; ``None``
        for other queues.
        """
        queue = queue_of(request)
        known = self._app.amqp.queues.get(queue) if queue is not None else None
        arguments = (known.queue_arguments if known is not None else None) or {}
        if arguments.get("x-queue-type") != "quorum" and not deliveries_of(request):
            return None
        limit = arguments.get("x-delivery-limit", DELIVERY_LIMIT)
        return limit if isinstance(limit, int) and limit >= 0 else None

    def _bind(self, producer: Any, queue: str) -> bool:
        """Let native delayed delivery end in *queue*; returns whether there is any."""
        if queue in self._bound:
            return True
        exchange = CELERY_DELAYED_DELIVERY_EXCHANGE
        try:
            producer.channel.queue_bind(
                queue=queue, exchange=exchange, routing_key=f"#.{_key_of(queue)}"
            )
        except NotFound as error:
            producer.revive(producer.connection)  # RabbitMQ has closed the channel
            if not self._told:
                self._told = True
                logger.warning(
                    "%s waits in its worker, without native delayed delivery: %s", queue, error
                )
            return False
        self._bound.add(queue)
        return True


DELIVERY_LIMIT: Final = 20
"""The limit of RabbitMQ 4 for a quorum queue without one of its own."""


def _key_of(queue: str) -> str:
    """A routing key for *queue* alone: a queue's name may be longer than a key, and contain ``*``
    and ``#``.
    """
    return f"celery_leases.{sha256(queue.encode()).hexdigest()[:32]}"
