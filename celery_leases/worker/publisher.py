"""Publishes copies of deliveries, stored calls, and task events, with publisher confirms; and finds
the queue of a delivery, and the route by which a copy of its message returns to it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from hashlib import sha256
from math import ceil
from typing import Any, Final
from uuid import uuid4

from amqp.exceptions import NotFound
from celery import Celery, Task
from celery.canvas import Signature
from celery.exceptions import Ignore, QueueNotFound
from celery.utils.quorum_queues import detect_quorum_queues
from kombu import Exchange, Queue
from kombu.exceptions import EncodeError, SerializerNotInstalled
from kombu.pools import ProducerPool
from kombu.serialization import registry
from kombu.transport.native_delayed_delivery import (
    CELERY_DELAYED_DELIVERY_EXCHANGE,
    MAX_LEVEL,
    calculate_routing_key,
    level_name,
)
from kombu.transport.virtual.base import Transport

from celery_leases.concurrency import wait_limit
from celery_leases.decide.copies import Copy, waiter_mark
from celery_leases.errors import StoreUnavailable
from celery_leases.signals import logger
from celery_leases.stores.interfaces import MarkStore
from celery_leases.worker.headers import HEADER, OURS, TASK_EVENTS, Header
from celery_leases.worker.stored_messages import HeaderKeeper, NotStorable, stored_form

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
CONFIRM_WITHIN = (5.0, 2.0, 0.5)
"""Seconds for which a publish may wait for the broker, and the shorter waits for calls with a short
time limit.
"""
FAILED_AT_ONCE = 1.0
POOL_SIZE = 10
OVER = "over"
"""The value of a mark once the call of its copy has ended."""

_ROUTE = {"countdown", "eta", "queue", "exchange", "routing_key", "exchange_type", "redelivered"}
_AMQP = ("pyamqp", "amqp")
_REDIS = ("redis", "rediss", "valkey", "sentinel")


class NotPublishable(Exception):
    """The message of a call cannot be made, so a retry would fail too; the text says why."""


class KeyIsHeld(Ignore):
    """Ends a delivery whose copy waits for a held key; passes the key and the call's fingerprint to
    the main process.
    """

    def __init__(self, reason: str, stored_key: str, fingerprint: str | None) -> None:
        super().__init__(reason, stored_key, fingerprint)
        self.stored_key = stored_key
        self.fingerprint = fingerprint


class Publisher:
    """Publishes messages of one app in one process, over connections with publisher confirms and
    timeouts.
    """

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._pool: ProducerPool | None = None
        self._within = CONFIRM_WITHIN[0]
        self._warned: set[str] = set()
        self.routes = Routes(app)

    def reschedule(
        self,
        task: Task,
        header: Header,
        delay: float,
        marks: MarkStore,
        stored_key: str,
        ttl: float,
        *,
        newest: bool = False,
    ) -> bool:
        """Publish a copy of the running delivery that is due in *delay* seconds; return ``False``
        if a later copy than this delivery has been published already.

        *newest*: publish a copy in any case, as the latest one. Raises the error because of which
        the broker did not confirm within 5 s, or less for a call
        with a short time limit; the copy counts as not published then.
        """
        # The number of retries is part of the mark's name, because a retry is not a copy of the
        # previous attempt.
        mark = waiter_mark(header.id, task.request.retries, header.failure_fence)
        noted = _noted(marks, stored_key, mark)
        latest = max(header.copy, Copy.read(noted) or header.copy)
        if latest > header.copy and not newest:
            return False
        copy = latest.after(uuid4().hex)
        self._publish(task, replace(header, copy=copy), delay)
        # The mark is set after the publish, so it names only copies that the broker has. An error
        # here must not look like a failed publish.
        try:
            marks.swap_mark(stored_key, mark, noted, str(copy), delay + 2 * ttl)
        except StoreUnavailable as error:
            logger.info(
                "%s[%s]: its copy is published, but its mark could not be set: %s",
                task.name,
                task.request.id,
                error,
            )
        except Exception:  # noqa: BLE001 - the broker has the copy
            logger.exception(
                "%s[%s]: its copy is published, but its mark could not be set",
                task.name,
                task.request.id,
            )
        return True

    def mark_ended(
        self, task: Task, header: Header, marks: MarkStore, stored_key: str, ttl: float
    ) -> None:
        """Mark that the call of a copy has ended, so that the mark does not apply to another
        message that is published under the same id later.
        """
        if not header.copy.number:
            return  # the call was never rescheduled
        with suppress(Exception):  # the mark expires by itself
            mark = waiter_mark(header.id, task.request.retries, header.failure_fence)
            marks.swap_mark(stored_key, mark, str(header.copy), OVER, ttl)

    def publish(self, call: Any) -> None:
        """Publish a stored call; raises the error because of which the broker did not confirm
        within 5 s.
        """
        signature = Signature.from_dict(call, app=self._app)
        with self._producer() as producer:
            # This process may belong to another tenant, user or trace than the caller.
            keeper = HeaderKeeper(producer, signature.options.get("headers") or {})
            signature.apply_async(
                producer=keeper, retry=False, confirm_timeout=self._within, add_to_parent=False
            )

    def publish_retry(self, retry: Any) -> bool:
        """Publish the message of one of Celery's retries; raises the error because of which the
        broker did not confirm within 5 s.
        """
        self._with_second_try(lambda: self._publish_retry_once(retry))
        return True

    def _publish_retry_once(self, retry: Any) -> None:
        with self._producer() as producer:
            try:
                retry.apply_async(producer=producer, retry=False, confirm_timeout=self._within)
            except (EncodeError, SerializerNotInstalled, QueueNotFound, TypeError) as error:
                raise NotPublishable(f"{type(error).__name__}: {error}") from error

    def message_of(self, task: Task, header: Header | None) -> str | None:
        """The message of the running delivery as its record stores it; ``None``, with a warning, if
        it cannot be stored.
        """
        try:
            return stored_form(_signature(task, header))
        except NotStorable as error:
            if task.name not in self._warned:
                self._warned.add(task.name)
                logger.warning(
                    "%s: the call could not be stored, so it cannot be rescued: %s",
                    task.name,
                    error,
                )
            return None

    def announce(self, task: Task, what: str, **fields: Any) -> None:
        """Send the task event ``task-<what>`` for the running delivery, if the worker sends task
        events.

        Never raises. An event that cannot be sent within 5 s is dropped.
        """
        request = task.request
        if not (request.__dict__.get(TASK_EVENTS) and task.send_events):
            return
        with suppress(Exception), self._producer() as producer:
            events = self._app.events.Dispatcher(hostname=request.hostname, enabled=False)
            events.publish(f"task-{what}", {"uuid": request.id, **fields}, producer, retry=False)

    def close(self) -> None:
        """Close the connections."""
        pool, self._pool = self._pool, None
        self.routes.clear()
        if pool is not None:
            pool.force_close_all()
            pool.connections.force_close_all()

    def _publish(self, task: Task, header: Header | None, delay: float) -> None:
        try:
            self._with_second_try(lambda: self._publish_once(task, header, delay))
        except (EncodeError, SerializerNotInstalled) as error:
            serializer = properties_of(task.request).get("serializer")
            raise NotPublishable(f"{error} (serializer {serializer})") from error

    def _with_second_try(self, publish: Callable[[], None]) -> None:
        began = time.monotonic()
        for last in (False, True):
            try:
                return publish()
            except (NotPublishable, EncodeError, SerializerNotInstalled):
                raise
            except Exception:
                self.close()
                # An immediate failure comes from a connection that was lost while idle, so publish
                # again; an extra copy does no harm.
                if last or time.monotonic() - began > min(FAILED_AT_ONCE, self._within / 2):
                    raise
        return None

    def _publish_once(self, task: Task, header: Header | None, delay: float) -> None:
        try:
            copy = _signature(task, header)
        except Exception as error:  # the broker was not called, so a retry would fail too
            raise NotPublishable(f"{type(error).__name__}: {error}") from error
        options = {name: value for name, value in copy.options.items() if name not in _ROUTE}
        with self._producer() as producer, _outside_of(task.request):
            self._app.send_task(
                task.name,
                copy.args,
                copy.kwargs,
                task_type=task,
                router=FixedRoute(),
                producer=producer,
                retry=False,
                confirm_timeout=self._within,
                add_to_parent=False,
                **(options | self.routes.to_queue_of(producer, task.request, delay)),
            )

    def _producer(self) -> Any:
        """A producer of the pool. The timeouts of its connections are shortened, for good, when a
        call with a shorter time limit needs that.
        """
        left = wait_limit.bounded(CONFIRM_WITHIN[0])
        within = next((each for each in CONFIRM_WITHIN if each <= left), CONFIRM_WITHIN[-1])
        if within < self._within:
            self.close()
            self._within = within
        if self._pool is None:
            self._pool = self._new_pool()
        return self._pool.acquire(block=True, timeout=self._within)

    def _new_pool(self) -> ProducerPool:
        scheme, within = self._app.connection_for_write().transport_cls, self._within
        options: dict[str, Any] = {}
        if scheme in _AMQP:
            options = {"confirm_publish": True, "read_timeout": within, "write_timeout": within}
        elif scheme in _REDIS:
            options = {"socket_timeout": within, "socket_connect_timeout": within}
        # Try each host once. By default, kombu tries again, with pauses, until the connect timeout
        # ends.
        options |= {
            "max_retries": len(self._app.connection_for_write().alt or ()),
            "interval_start": 0,
        }
        connection = self._app.connection_for_write(
            connect_timeout=within, transport_options=options
        )
        return ProducerPool(
            connection.Pool(limit=POOL_SIZE), limit=POOL_SIZE, Producer=self._app.amqp.Producer
        )


def _signature(task: Task, header: Header | None) -> Any:
    """The message of the running delivery, as Celery's own retry makes it, with the properties that
    such a retry would lose.
    """
    request = task.request
    headers = {
        name: value
        for name, value in (request.headers or {}).items()
        if not name.startswith(OURS)  # what this worker's main process has added to them
    }
    our_header = {HEADER: header.written()} if header is not None else {}
    return task.signature_from_request(
        _unstamped(request),
        queue=queue_of(request),
        headers=without_broker_headers(headers) | stamps_of(request) | our_header,
        # If the copy of a call that has begun expired, that would revoke the running call.
        expires=None if header is not None and header.started else request.expires,
        ignore_result=request.__dict__.get("ignore_result", task.ignore_result),
        root_id=request.root_id or request.id,
        **properties_of(request),
    )


def _unstamped(request: Any) -> Any:
    """*request* without its stamps, because Celery would pass them on as options, and a stamp may
    have the name of an option.
    """
    bare = type(request)()
    vars(bare).update(vars(request), stamps=None, stamped_headers=None)
    return bare


def _noted(marks: MarkStore, stored_key: str, mark: str) -> str | None:
    """The value of the mark. ``None`` if it cannot be read: then the copy is published, because it
    must not be dropped without evidence.
    """
    try:
        return marks.mark(stored_key, mark)
    except StoreUnavailable:
        return None
    except Exception:  # noqa: BLE001 - a call must not be lost because a mark cannot be read
        logger.exception("%s: the mark of a waiting copy could not be read", stored_key)
        return None


@contextmanager
def _outside_of(request: Any) -> Any:
    """Enclose a publish as if no task ran here. Otherwise Celery would make the copy a child of its
    own call.
    """
    direct = request.called_directly
    request.called_directly = True
    try:
        yield
    finally:
        request.called_directly = direct


# -- queues ----------------------------------------------------------------------------------------


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
        seconds.
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
                    "%s waits in its worker, without native delayed delivery: %s", queue, error
                )
            return False
        self._bound.add(queue)
        return True


DELIVERY_LIMIT: Final = 20
"""RabbitMQ 4's limit for a quorum queue without ``x-delivery-limit``."""


def _key_of(queue: str) -> str:
    """A routing key for *queue* alone. It is a hash, because a queue's name may be too long for a
    routing key, and may contain ``*`` and ``#``.
    """
    return f"celery_leases.{sha256(queue.encode()).hexdigest()[:32]}"
