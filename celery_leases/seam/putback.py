"""Put a delivery back: publish a fresh, confirmed copy of its message, and only then let the old one go."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import contextmanager, suppress
from typing import Any
from uuid import uuid4

from celery import Celery, Task
from celery.canvas import Signature
from kombu.pools import ProducerPool

from celery_leases.core.errors import StoreUnavailable
from celery_leases.core.ports import MarkStore
from celery_leases.core.replies import waiter_mark
from celery_leases.seam.kept import NotKept, kept
from celery_leases.seam.pin import HEADER, TOKEN, WATCHED
from celery_leases.signals import logger

CONFIRM_WITHIN = 5.0
FAILED_AT_ONCE = 1.0
POOL_SIZE = 10
_AMQP = {"confirm_publish": True, "read_timeout": CONFIRM_WITHIN, "write_timeout": CONFIRM_WITHIN}
_REDIS = {"socket_timeout": CONFIRM_WITHIN, "socket_connect_timeout": CONFIRM_WITHIN}
_OPTIONS = {"pyamqp": _AMQP, "amqp": _AMQP, "redis": _REDIS, "rediss": _REDIS, "valkey": _REDIS, "sentinel": _REDIS}


class Copies:
    """Publishes copies for one app in one process, over connections whose publishes are confirmed and bounded."""

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._pool: ProducerPool | None = None
        self._told: set[str] = set()

    def put_back(
        self, task: Task, pin: Mapping[str, Any], delay: float, marks: MarkStore, stored_key: str, ttl: float
    ) -> bool:
        """Publish a copy that comes in *delay* seconds; ``False`` when another copy is known to wait already.

        Raises whatever kept the broker from confirming within 5 s; then nothing may be taken for published.
        """
        request = task.request
        # A retry is not a copy of the attempt before it: the two must not be taken for one another.
        mark, ours = waiter_mark(f"{pin['id']}/{request.retries}"), pin.get("nonce")
        waiting = _known_waiter(marks, stored_key, mark)
        if waiting not in (None, ours):
            return False
        nonce = uuid4().hex
        self._publish(task, {**pin, "nonce": nonce}, delay)
        with suppress(StoreUnavailable):  # without a mark both copies count, and neither is lost
            # Set after the broker has the message: a mark without a message would end the last copy.
            marks.swap_mark(stored_key, mark, ours, nonce, delay + 2 * ttl)
        return True

    def publish(self, call: Any) -> None:
        """Publish a kept call; raises whatever kept the broker from confirming within 5 s."""
        signature = Signature.from_dict(call, app=self._app)
        with self._producers().acquire(block=True, timeout=CONFIRM_WITHIN) as producer:
            signature.apply_async(producer=producer, retry=False, confirm_timeout=CONFIRM_WITHIN, add_to_parent=False)

    def message_of(self, task: Task, pin: Mapping[str, Any]) -> str | None:
        """The message of the delivery that runs here, as it is kept in its record; ``None`` if it cannot be kept."""
        try:
            return kept(_signature(task, pin, 0.0))
        except NotKept as error:
            if task.name not in self._told:
                self._told.add(task.name)
                logger.warning("%s: a call is not kept, and cannot be rescued: %s", task.name, error)
            return None

    def announce(self, task: Task, what: str, **fields: Any) -> None:
        """Send the task event ``task-<what>`` for the call that runs here, if the worker sends task events.

        Never raises: an event that cannot be sent within 5 s is not sent.
        """
        request = task.request
        if not (request.__dict__.get(WATCHED) and task.send_events):
            return
        with suppress(Exception), self._producers().acquire(block=True, timeout=CONFIRM_WITHIN) as producer:
            events = self._app.events.Dispatcher(hostname=request.hostname, enabled=False)
            events.publish(f"task-{what}", {"uuid": request.id, **fields}, producer, retry=False)

    def close(self) -> None:
        """Close the connections."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.force_close_all()
            pool.connections.force_close_all()

    def _publish(self, task: Task, pin: Mapping[str, Any], delay: float) -> None:
        began = time.monotonic()
        for last in (False, True):
            try:
                return self._publish_once(task, pin, delay)
            except Exception:
                self.close()
                # What fails at once is a connection that went stale while idle; a copy too many does no harm.
                if last or time.monotonic() - began > FAILED_AT_ONCE:
                    raise
        return None

    def _publish_once(self, task: Task, pin: Mapping[str, Any], delay: float) -> None:
        copy = _signature(task, pin, delay)
        with self._producers().acquire(block=True, timeout=CONFIRM_WITHIN) as producer, _outside_of(task.request):
            copy.apply_async(producer=producer, retry=False, confirm_timeout=CONFIRM_WITHIN, add_to_parent=False)

    def _producers(self) -> ProducerPool:
        if self._pool is None:
            scheme = self._app.connection_for_write().transport_cls
            options = dict(_OPTIONS.get(scheme, {})) if isinstance(scheme, str) else {}
            # Each host once: kombu would go on trying for as long as the connect timeout, with pauses in between.
            options |= {"max_retries": len(self._app.connection_for_write().alt or ()), "interval_start": 0}
            connection = self._app.connection_for_write(connect_timeout=CONFIRM_WITHIN, transport_options=options)
            connections = connection.Pool(limit=POOL_SIZE)
            self._pool = ProducerPool(connections, limit=POOL_SIZE, Producer=self._app.amqp.Producer)
        return self._pool


def _signature(task: Task, pin: Mapping[str, Any], delay: float) -> Any:
    request = task.request
    dropped = {TOKEN, WATCHED, HEADER, "redelivered"}
    headers = {name: value for name, value in (request.headers or {}).items() if name not in dropped}
    return task.signature_from_request(
        request,
        countdown=delay,
        headers={**headers, HEADER: dict(pin)},
        # An expiring copy of a call that has begun would revoke it while it runs.
        expires=None if pin.get("started") else request.expires,
        ignore_result=request.__dict__.get("ignore_result", task.ignore_result),
        root_id=request.root_id or request.id,
    )


def _known_waiter(marks: MarkStore, stored_key: str, mark: str) -> str | None:
    try:
        return marks.mark(stored_key, mark)
    except StoreUnavailable:
        return None


@contextmanager
def _outside_of(request: Any) -> Any:
    """Publish as if no task ran here: Celery would make the copy a child of its own call."""
    direct = request.called_directly
    request.called_directly = True
    try:
        yield
    finally:
        request.called_directly = direct
