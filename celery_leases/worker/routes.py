"""The queue of a delivery, and the route by which a copy of its message returns to that queue."""

from __future__ import annotations

import sys
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
from kombu.transport.virtual.base import Transport

from celery_leases.text.notices import logger

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
DELIVERY_LIMIT: Final = 20
"""RabbitMQ 4's limit for a quorum queue without ``x-delivery-limit``."""


def origin_of(message: Any, worker: Any) -> dict[str, str]:
    """The queue and the content type of *message*, for a pool child that publishes it again;
    *worker* is Celery's worker in this process, if there is one.

    ``queue`` is missing if the broker does not say from which queue a delivery comes.
    """
    info = message.delivery_info or {}
    queue = None
    if (tag := info.get("consumer_tag")) is not None:
        consumer = getattr(getattr(worker, "consumer", None), "task_consumer", None)
        for name, active in dict(getattr(consumer, "_active_tags", None) or {}).items():
            if active == tag:
                queue = name
    if queue is None and not info.get("exchange"):
        queue = info.get("routing_key") or _delivering_queue()
    origin = {"content_type": message.content_type} if message.content_type else {}
    return {**origin, "queue": queue} if queue else origin


def _delivering_queue() -> str | None:
    """The queue whose message kombu delivers now, for a broker without consumer tags, such as
    Redis.

    Only a local variable of kombu has it. A client in another language may publish a message that
    has neither exchange nor routing key.
    """
    frame = sys._getframe()  # noqa: SLF001 - as the traceback module does
    while frame.f_code is not Transport._deliver.__code__:  # noqa: SLF001
        if frame.f_back is None:
            return None
        frame = frame.f_back
    queue: str | None = frame.f_locals.get("queue")
    return queue


def queue_of(request: Any) -> str | None:
    """The queue of the delivery *request*; ``None`` if the broker does not say."""
    queue: str | None = (request.__dict__.get(ORIGIN) or {}).get("queue")
    return queue


def properties_of(request: Any) -> dict[str, Any]:
    """The publish options of the message of *request* that Celery's own retry would lose."""
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


def without_broker_headers(headers: Mapping[str, Any]) -> dict[str, Any]:
    """*headers* without those that the broker adds or reads.

    RabbitMQ drops a message that has the ``x-death`` header of an earlier wait, because it takes it
    for a message in a cycle.
    """
    return {
        name: value
        for name, value in headers.items()
        if name not in _BROKERS_OWN and not name.startswith(_BROKERS_OWN_PREFIXES)
    }


def earlier_deliveries_of(request: Any) -> int:
    """How often the broker has delivered this message before; 0 if the broker does not count."""
    if not (request.delivery_info or {}).get("redelivered"):
        return 0  # Celery has published the message again, with the header of the earlier one
    count = (request.headers or {}).get("x-delivery-count")
    return count if isinstance(count, int) else 0


class FixedRoute:
    """A router for ``send_task`` that leaves the route unchanged."""

    def route(self, options: dict[str, Any], *_: Any, **__: Any) -> dict[str, Any]:
        """*options* unchanged."""
        return options


class Routes:
    """The routes by which copies return to the queues of one app, in one process.

    A copy is published to the queue of its delivery, without the exchanges of the user. If the app
    has quorum queues, a copy waits in the exchanges of Celery's native delayed delivery and not in
    a worker: a worker that consumes quorum queues has a fixed prefetch count, which messages with a
    countdown would use up. The queue is bound to those exchanges with a routing key of
    celery_leases, because Celery binds only the exchange of the queue, and a direct exchange not at
    all.
    """

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._bound: set[str] = set()
        self._warned = False

    def to_queue_of(self, producer: Any, request: Any, delay: float) -> dict[str, Any]:
        """The publish options of a message that returns to the queue of *request* in *delay*
        seconds. They have no ``countdown`` if it waits at the broker.
        """
        queue = queue_of(request)
        on_rabbit = producer.connection.transport.driver_type == "amqp"
        given: dict[str, Any] = {"declare": [], "exchange_type": "direct"}
        if on_rabbit:
            given["mandatory"] = True  # otherwise RabbitMQ confirms a message that no queue gets
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
            # Celery looks at the exchange type of the queue, not of the message.
            to = Queue(queue, Exchange("", "topic"))
            return given | {"queue": to, "exchange": level_name(MAX_LEVEL), "routing_key": key}
        return given | {"queue": Queue(queue, Exchange("")), "countdown": delay}

    def _exchange(self, name: str | None) -> Exchange | None:
        """The exchange of that name, if a queue of the app has it. The publish declares it.

        For brokers without exchanges, such as Redis, kombu itself routes. It takes an exchange that
        the process has not declared for a direct one, so a message to a topic or fanout exchange
        would reach no worker.
        """
        known = (queue.exchange for queue in self._app.amqp.queues.values())
        return next((exchange for exchange in known if name and exchange.name == name), None)

    def clear(self) -> None:
        """Bind queues again at their next use, because the broker may have lost its bindings."""
        self._bound.clear()

    def delivery_limit(self, request: Any) -> int | None:
        """After how many deliveries a quorum queue discards a message; ``None`` for other queues,
        and for no limit.
        """
        queue = queue_of(request)
        known = self._app.amqp.queues.get(queue) if queue is not None else None
        arguments = (known.queue_arguments if known is not None else None) or {}
        if arguments.get("x-queue-type") != "quorum" and not earlier_deliveries_of(request):
            return None
        limit = arguments.get("x-delivery-limit", DELIVERY_LIMIT)
        return limit if isinstance(limit, int) and limit >= 0 else None

    def _bind(self, producer: Any, queue: str) -> bool:
        """Bind *queue* to native delayed delivery; return whether the broker has it."""
        if queue in self._bound:
            return True
        exchange = CELERY_DELAYED_DELIVERY_EXCHANGE
        try:
            producer.channel.queue_bind(
                queue=queue, exchange=exchange, routing_key=f"#.{_key_of(queue)}"
            )
        except NotFound as error:
            producer.revive(producer.connection)  # RabbitMQ has closed the channel
            if not self._warned:
                self._warned = True
                logger.warning(
                    "%s waits in its worker, without native delayed delivery: %s",
                    queue,
                    error,
                    code="no-delayed-delivery",
                )
            return False
        self._bound.add(queue)
        return True


def _key_of(queue: str) -> str:
    """A routing key for *queue* alone. It is a hash, because a queue's name may be too long for a
    routing key, and may contain ``*`` and ``#``.
    """
    return f"celery_leases.{sha256(queue.encode()).hexdigest()[:32]}"
