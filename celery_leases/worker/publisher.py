"""Publishes copies of deliveries, stored calls, and task events, with publisher confirms."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any
from uuid import uuid4

from celery import Celery, Task
from celery.canvas import Signature
from celery.exceptions import Ignore, QueueNotFound
from kombu.exceptions import EncodeError, SerializerNotInstalled
from kombu.pools import ProducerPool

from celery_leases.concurrency import os_threads, wait_limit
from celery_leases.decide.copies import Copy, waiter_mark
from celery_leases.errors import StoreUnavailable
from celery_leases.stores.interfaces import MarkStore
from celery_leases.text.notices import logger
from celery_leases.worker.headers import HEADER, ORDER, OURS, TASK_EVENTS, Header
from celery_leases.worker.routes import (
    FixedRoute,
    Routes,
    properties_of,
    queue_of,
    stamps_of,
    without_broker_headers,
)
from celery_leases.worker.stored_messages import HeaderKeeper, NotStorable, stored_form

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


class GroupIsFull(Ignore):
    """Ends a delivery whose copy waits for its turn in a group; passes the group, and since when it
    waits, to the main process.
    """

    def __init__(self, reason: str, group: str, since: float) -> None:
        super().__init__(reason, group, since)
        self.group = group
        self.since = since


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
                code="mark-not-set",
            )
        return True

    def mark_ended(
        self, task: Task, header: Header, marks: MarkStore, stored_key: str, ttl: float
    ) -> None:
        """Mark that the call of a copy has ended, so that the mark does not apply to another
        message that is published under the same id later.
        """
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
                    code="not-rescuable",
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
        began = os_threads.boot_clock()
        for last in (False, True):
            try:
                return publish()
            except (NotPublishable, EncodeError, SerializerNotInstalled):
                raise
            except Exception:
                self.close()
                # An immediate failure comes from a connection that was lost while idle, so publish
                # again; an extra copy does no harm.
                if last or os_threads.boot_clock() - began > min(FAILED_AT_ONCE, self._within / 2):
                    raise
        return None

    def _publish_once(self, task: Task, header: Header | None, delay: float) -> None:
        try:
            copy = _signature(task, header)
        except Exception as error:  # the broker was not called, so a retry would fail too
            raise NotPublishable(f"{type(error).__name__}: {error}") from error
        options = {name: value for name, value in copy.options.items() if name not in _ROUTE}
        with self._producer() as producer, _outside_of(task.request):
            route = self.routes.to_queue_of(producer, task.request, delay)
            if header is not None and header.waited_for_newer and "countdown" not in route:
                # The copy waits at the broker, for at least *delay*, where no worker counts that.
                waited = replace(header, waited_for_newer=header.waited_for_newer + delay)
                options["headers"] = options["headers"] | {HEADER: waited.written()}
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
                **(options | route),
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
        if name == ORDER
        or not name.startswith(OURS)  # what this worker's main process has added to them
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
        logger.exception(
            "%s: the mark of a waiting copy could not be read", stored_key, code="mark-unreadable"
        )
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
