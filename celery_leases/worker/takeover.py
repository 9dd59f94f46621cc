"""In the main process of a worker on a Redis broker: a lease for the worker itself.

Under it the worker registers the leased messages that it has not acknowledged. When the lease of a
worker ends, because the worker was killed, stands still or cannot reach the broker, another worker
returns these messages to their queues, long before the visibility timeout is over. It also returns
those that the worker may have fetched without registering them, because it died at that moment.
Messages of other tasks stay where they are: they may not run twice.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import random
import secrets
import time
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from functools import partial
from itertools import chain
from queue import Empty
from typing import TYPE_CHECKING, Any, Final

from celery.concurrency.solo import TaskPool as SoloPool
from celery.platforms import EX_FAILURE
from celery.worker import state
from kombu.transport.virtual.base import QoS
from kombu.utils.encoding import bytes_to_str
from kombu.utils.json import loads

from celery_leases import deadlines
from celery_leases.concurrency import greenlets, os_threads
from celery_leases.options import DAY
from celery_leases.text.notices import logger
from celery_leases.text.redaction import redact
from celery_leases.worker.app_settings import leased_tasks
from celery_leases.worker.headers import HEADER, ORDER
from celery_leases.worker.returning import (
    acknowledge_message,
    pushes_of,
    return_message,
    unacked_keys,
)

if TYPE_CHECKING:
    from celery_leases.stores.redis.workers import Fetched, Workers

BATCH_TIME: Final = 0.05
"""Seconds in which changes of the registered messages are gathered for one round trip."""
PAGE: Final = 20
"""Messages that one request to the broker reads or returns, at most."""
TIMEOUT: Final = 2.0
"""Seconds that a start or a reconnect waits until the worker has a lease, and a shutdown until it
has removed it, at most.
"""


class _Delivery:
    """A leased message that this worker has got and not acknowledged yet."""

    __slots__ = ("fetched", "message", "sent", "tag")

    def __init__(self, message: Any) -> None:
        self.message = message
        self.tag: str = message.delivery_tag
        #: The broker ends the message only if it was not fetched again: then another worker has it.
        self.fetched: Fetched = getattr(message, "fetched_at", "")
        #: The broker may have its registration.
        self.sent = False


class WorkerLease:
    """The lease of one worker, which a thread of its own renews.

    *host* is the worker's host name. *connection* opens a new connection of kombu to the broker.
    All keys begin with *prefix*. *ttl* is in seconds. *tasks* are the names of the leased tasks.
    """

    def __init__(
        self,
        host: str,
        connection: Callable[[], Any],
        prefix: str,
        ttl: float,
        tasks: Container[str] = (),
    ) -> None:
        self._host = host
        #: The broker knows no worker of this name yet.
        self._name = host
        self._connection = connection
        self._prefix = prefix
        self._ttl = ttl
        self._tasks = tasks
        self._clock = os_threads.boot_clock
        #: When the last successful renewal was sent. Nobody returns the messages of a worker that
        #: has had no lease yet.
        self._renewed = -math.inf
        #: Since when the lease has been renewed without a gap.
        self._renewed_since = math.inf
        #: When the worker's event loop was seen running.
        self._loop_seen = math.inf
        self._loop_timer: Any = None
        #: What has happened to messages, for the thread that renews.
        self._changes: deque[Callable[[], None]] = deque()
        self._registered: dict[str, _Delivery] = {}
        self._to_add: dict[str, _Delivery] = {}
        self._to_remove: dict[str, None] = {}
        self._to_acknowledge: dict[str, _Delivery] = {}
        #: Messages that are still to be returned; whether to the end of the queue.
        self._unfinished: deque[tuple[_Delivery, bool]] = deque()
        self._moved = False
        self._wakeup = os_threads.Wakeup()
        self._idle = False
        self._stopping = False
        self._worker: Any = None
        self._stopped = os_threads.Wakeup()
        self._failing = False
        #: When requests were sent that may have fetched a message whose delivery did not arrive.
        self._unanswered: deque[float] = deque()
        #: The server does not allow what a lease needs, so this worker has none.
        self._refused = False
        self._hub = greenlets.hub_scheduler() if os_threads.uses_greenlets() else None

    def start(self) -> None:
        """Begin to renew the lease."""
        os_threads.start_thread(self._run)
        self._wait_for_renewal()

    def stop(self) -> None:
        """Return what is left, and remove the lease, because the worker shuts down.

        If it has failed, the lease ends by itself, and another worker looks for messages: the error
        may have interrupted kombu when it had fetched one and not delivered it yet.
        """
        self._stopping = True
        self._wakeup.notify()
        self._stopped.wait(TIMEOUT)

    # -- in the threads of the worker --------------------------------------------------------------

    def watch_loop(self, consumer: Any) -> None:
        """Read what kombu leaves unread; if Celery has an event loop, renew the lease only while it
        runs.

        A pool that runs bodies in the loop is not watched.
        """
        self._worker = worker = consumer.controller
        channel = consumer.connection.default_channel
        if isinstance(worker.pool, SoloPool):
            return
        if self._loop_timer is not None:
            self._loop_timer.cancel()  # Celery before 5.7 has cancelled it with the connection
        often = self._ttl / deadlines.RENEWALS_PER_TTL
        if worker.hub is None:
            self._loop_timer = worker.timer.call_repeatedly(
                often, consumer.call_soon, (_read_unread, channel)
            )
        else:
            self._loop_runs(channel)
            self._loop_timer = worker.hub.call_repeatedly(often, self._loop_runs, channel)

    def _loop_runs(self, channel: Any) -> None:
        now = self._clock()
        stood, self._loop_seen = now - self._loop_seen > self._ttl, now
        if stood:  # it gets messages again, and has no lease
            self._wakeup.notify()
            self._wait_for_renewal()
        _read_unread(channel)

    def received(self, message: Any) -> None:
        """Register a *message* of a leased task, until it is acknowledged or rejected."""
        if self._refused:
            return
        delivery = _Delivery(message)
        message.ack = partial(self._end, delivery, message.ack)
        message.reject = partial(self._end, delivery, message.reject)
        self._changed(partial(self._add, delivery))

    def reconnected(self) -> None:
        """Return what Celery has dropped with its connection: the messages that do not run."""
        running = {request._message.delivery_tag for request in tuple(state.active_requests)}  # noqa: SLF001
        self._moved = True  # of several brokers the worker may use another one now
        self._changed(partial(self._return_all_but, running))
        self._wait_for_renewal()

    def unanswered(self, seconds: float) -> None:
        """Let a worker look, after a ttl, for a message that this one may have fetched by a request
        that was sent so many *seconds* ago.
        """
        self._unanswered.append(self._clock() - seconds)

    def _wait_for_renewal(self) -> None:
        """Let the worker fetch nothing before it has a lease: if it were killed in between, the
        message would wait for the visibility timeout.
        """
        now = began = self._clock()
        while self._renewed < began and not self._refused and now < began + TIMEOUT:
            time.sleep(0.005)  # other greenlets run meanwhile
            now = self._clock()

    def _end(
        self, delivery: _Delivery, end: Callable[..., None], *args: Any, **kwargs: Any
    ) -> None:
        """End a message: requeue it, or acknowledge it with the next renewal; by *end* if this
        worker has no lease yet.
        """
        message, requeue = delivery.message, kwargs.get("requeue")
        change = self._remove
        try:
            if self._renewed == -math.inf:
                end(*args, **kwargs)
            else:
                # First, because the message may come again at once, with the same tag.
                QoS.ack(message.channel.qos, delivery.tag)  # in this process alone
                message._state = "REQUEUED" if requeue else "ACK"  # noqa: SLF001 - as in Message
                if requeue:
                    return_message(message.channel, delivery.tag, delivery.fetched, leftmost=True)
                elif self._stopping:  # there may be no renewal any more
                    acknowledge_message(message.channel, delivery.tag, delivery.fetched)
                else:
                    change = self._acknowledge
        except Exception:
            self._changed(partial(self._requeue if requeue else self._acknowledge, delivery))
            raise
        self._changed(partial(change, delivery))
        del message.ack, message.reject

    def _changed(self, change: Callable[[], None]) -> None:
        self._changes.append(change)
        if self._idle:
            self._idle = False
            self._wakeup.notify()

    # -- in the thread that renews -----------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._moved = False
                try:
                    with self._connection() as connection:
                        self._work(connection.default_channel)
                except Exception as error:  # noqa: BLE001 - whatever happens, the thread goes on
                    if self._refused_by(error):
                        return
                    self._failed(error)
                    self._sleep(deadlines.renewal_retry(0.0, self._ttl))
        finally:
            self._stopped.notify()

    def _refused_by(self, error: Exception) -> bool:
        from celery_leases.stores.redis.errors import advice_for

        # After a renewal, messages are registered: another worker may return them meanwhile.
        self._refused = self._renewed == -math.inf and advice_for(error) is not None
        if self._refused:
            self._log(
                logging.INFO,
                "this worker has no lease of its own, so its messages wait for the visibility "
                "timeout if it is killed: the broker does not allow it: %s",
                redact(str(error)),
                code="workers-not-registered",
            )
        return self._refused

    def _failed(self, error: Exception) -> None:
        if not self._failing:
            self._failing = True
            kind, text = type(error).__name__, redact(str(error))
            self._log(
                logging.WARNING,
                "the worker's own lease could not be renewed: %s: %s",
                kind,
                text,
                code="worker-not-renewed",
            )

    def _log(self, level: int, text: str, *args: object, code: str | None = None) -> None:
        """Log in the thread of the worker if it has greenlets: a system thread that waits for a
        lock of theirs waits for ever.
        """
        log = partial(logger.log, level, text, *args, code=code)
        if self._hub is None:
            log()
        else:
            self._hub(partial(greenlets.spawn, log))

    def _work(self, channel: Any) -> None:
        from celery_leases.stores.redis.workers import Workers

        workers = Workers(channel.pool, self._prefix)
        # A failover may have lost some of them.
        self._to_add.update(self._registered)
        self._renewed_since = self._clock()
        returning: Iterator[bool] = iter(())
        while not self._stopping:
            if self._moved:
                return
            now = self._clock()
            due = deadlines.renewal_due(now, self._ttl)
            if now - self._loop_seen > self._ttl:
                self._wakeup.wait(due - now)
            else:
                ended = self._renew(workers, channel)
                self._failing = False
                busy = next(returning, False)
                longest = self._ttl / deadlines.RENEWALS_PER_TTL
                if ended and not busy and now - self._renewed_since >= longest:
                    others = (self._return_messages(workers, channel, name) for name in ended)
                    returning = chain.from_iterable(others)
                    busy = next(returning, False)
                self._idle = True
                if not (busy or self._changes or self._unfinished):
                    self._wakeup.wait(due - self._clock())
                self._idle = False
                now = self._clock()
                due = min(due, now + BATCH_TIME)
                while busy and self._clock() < due:
                    busy = next(returning, False)
                if due > now:
                    self._sleep(due - self._clock())
        # Celery acknowledges nothing from now on. Kombu has returned what it could.
        self._changes.append(partial(self._return_all_but, frozenset()))
        self._renew(workers, channel)
        if getattr(self._worker, "exitcode", None) != EX_FAILURE and not self._unfinished:
            workers.forget(self._name)

    def _sleep(self, seconds: float) -> None:
        until = self._clock() + seconds
        while not self._stopping and (left := until - self._clock()) > 0:
            self._wakeup.wait(left)

    def _renew(self, workers: Workers, channel: Any) -> Sequence[str]:
        """Renew the lease and write what has changed; return workers whose leases have ended."""
        self._gather()
        sent = self._clock()
        hard_deadline = deadlines.hard_deadline(self._renewed, self._ttl)
        if sent >= deadlines.stop_deadline(hard_deadline, self._ttl):
            self._renewed_since = sent
        ended = self._write(workers, channel)
        if ended is None:
            # Another worker has returned its messages, or the broker was emptied.
            for delivery in self._registered.values():
                delivery.sent = False
            self._name = self._enter(workers)
            self._to_add.update(self._registered)
            ended = self._write(workers, channel)
        self._renewed = sent
        while self._unanswered:
            # A worker that dies: others look for what it has fetched.
            self._enter(workers, sent - self._unanswered[0])
            self._unanswered.popleft()
        due = deadlines.renewal_due(sent, self._ttl)
        while self._unfinished and self._clock() < due:
            delivery, leftmost = self._unfinished[0]
            return_message(channel, delivery.tag, delivery.fetched, leftmost=leftmost)
            self._unfinished.popleft()
            self._remove(delivery)
        return ended or ()

    def _enter(self, workers: Workers, before: float = 0.0) -> str:
        """Give a worker of a new name a lease, as if it had lasted for *before* seconds."""
        from celery_leases.stores.redis.workers import name_of

        name = name_of(self._host, os.getpid(), secrets.token_hex(4), self._ttl + before)
        workers.enter(name, self._ttl)
        return name

    def _gather(self) -> None:
        """Find what to write. A message that has come and ended meanwhile is not written."""
        while self._changes:
            self._changes.popleft()()

    def _add(self, delivery: _Delivery) -> None:
        # If the message has come before, it was returned meanwhile.
        self._registered[delivery.tag] = self._to_add[delivery.tag] = delivery
        self._to_remove.pop(delivery.tag, None)

    def _acknowledge(self, delivery: _Delivery) -> None:
        if self._registered.get(delivery.tag) is delivery:
            self._remove(delivery)
            self._to_acknowledge[delivery.tag] = delivery

    def _requeue(self, delivery: _Delivery) -> None:
        self._unfinished.append((delivery, True))

    def _remove(self, delivery: _Delivery) -> None:
        if self._registered.get(delivery.tag) is delivery:
            del self._registered[delivery.tag]
            self._to_add.pop(delivery.tag, None)
            if delivery.sent:
                self._to_remove[delivery.tag] = None

    def _return_all_but(self, running: AbstractSet[str]) -> None:
        """Return the messages that Celery holds no longer."""
        for delivery in list(self._registered.values()):
            # If it was acknowledged, that is perhaps not at the broker yet.
            if not delivery.message.acknowledged and delivery.tag not in running:
                self._unfinished.append((delivery, False))

    def _write(self, workers: Workers, channel: Any) -> Sequence[str] | None:
        for delivery in self._to_add.values():
            delivery.sent = True
        added = {tag: delivery.fetched for tag, delivery in self._to_add.items()}
        done = {tag: delivery.fetched for tag, delivery in self._to_acknowledge.items()}
        over = list(self._to_remove), done
        written = workers.renew(self._name, self._ttl, DAY, added, *over, *unacked_keys(channel))
        self._to_add.clear()
        self._to_remove.clear()
        if written is not None:
            self._to_acknowledge.clear()
        return written

    def _return_messages(self, workers: Workers, channel: Any, name: str) -> Iterator[bool]:
        """Return the messages of a worker whose lease has ended to their queues, some with each
        step. Each goes to the front of its queue, so the oldest is returned last.
        """
        from celery_leases.stores.redis.workers import own_name

        taken = workers.take(name, self._ttl)
        if taken is None:
            return
        ended, tags = taken
        left = returned = 0
        if ended == name:  # another worker has begun, and does not end within a ttl: help it
            tags = random.sample(tags, len(tags))
        pages = (tags[place : place + PAGE] for place in range(0, len(tags), PAGE))
        for page in chain(pages, self._unregistered(workers, channel, ended)):
            if page:
                done, unknown = _return_page(workers, channel, ended, page)
                returned += done
                left += unknown
            yield True
        if not left:
            workers.forget(ended)
        if returned:
            text = (
                "the lease of the worker %s has ended: %d of its messages are in their queues again"
            )
            self._log(logging.INFO, text, own_name(ended), returned)

    def _unregistered(self, workers: Workers, channel: Any, ended: str) -> Iterator[Sequence[str]]:
        """The leased messages that an *ended* worker may have fetched without registering them,
        registered now; none after each look.

        If another worker has fetched one of them, its call is delivered twice.
        """
        unacked, index = unacked_keys(channel)
        fetched = workers.fetched(ended, index)
        tags = list(fetched)
        for place in range(0, len(tags), PAGE):
            found = workers.unregistered(tags[place : place + PAGE], unacked, index)
            leased = {tag: fetched[tag] for tag, stored in found.items() if self._is_leased(stored)}
            yield ()
            if leased:
                yield workers.register(ended, DAY, leased, index)

    def _is_leased(self, stored: bytes) -> bool:
        """Whether a message in kombu's form is that of a leased task."""
        try:
            headers = loads(bytes_to_str(stored))[0]["headers"]
            return HEADER in headers or ORDER in headers or headers["task"] in self._tasks
        except (LookupError, TypeError, ValueError):
            return False  # another program has written it


def _read_unread(channel: Any) -> None:
    """Read a message that is out of its queue, although Celery may have no more messages.

    If the prefetch limit falls while kombu waits for a message, kombu does not read it from its
    connection before another message has ended. If the worker were killed meanwhile, the message
    would be lost.
    """
    connection = channel._in_poll  # noqa: SLF001
    if connection and not channel.qos.can_consume() and connection.can_read(0):
        with suppress(Empty):
            channel.handlers["BRPOP"]()


def _return_page(
    workers: Workers, channel: Any, ended: str, tags: Sequence[str]
) -> tuple[int, int]:
    """Return some messages of an *ended* worker to their queues, in one step of the broker.

    It returns none that another worker, or kombu after the visibility timeout, has returned. A
    message whose exchange this worker does not know stays: kombu would drop it, and another worker
    may know it. Returns how many messages were returned, and how many stay.
    """
    unacked = unacked_keys(channel)
    moves = []
    found = workers.unacknowledged(ended, tags, *unacked)
    for tag, fetched, stored in found:
        if pushes := pushes_of(channel, stored):
            moves.append((tag, fetched, pushes))
    returned = workers.give_back(moves, *unacked, channel.global_keyprefix)
    return returned, len(found) - len(moves)


current: WorkerLease | None = None
"""The lease of this process, if it is the main process of a worker on a Redis broker."""


def start(consumer: Any) -> None:
    """Start the lease of a worker; a receiver of Celery's ``worker_ready``."""
    from celery_leases.worker.fetching import noted_at_once

    global current  # noqa: PLW0603 - one for each process
    worker, app = consumer.controller, consumer.app
    if current is None:
        tasks = leased_tasks(app)
        if not tasks or consumer.connection.transport.driver_type != "redis":
            return
        ttl = min(task.lease_options.ttl for task in tasks.values())
        limit = ttl / deadlines.RENEWALS_PER_TTL
        options = {
            **(app.conf.broker_transport_options or {}),
            "socket_timeout": limit,
            "socket_connect_timeout": limit,
            "max_retries": 1,
        }
        lease = WorkerLease(
            worker.hostname,
            partial(_connection_like, consumer, options),
            prefix_of(consumer.connection.default_channel),
            ttl,
            frozenset(tasks),
        )
        lease.start()
        current = lease
        atexit.register(stop)  # after a cold shutdown Celery sends no worker_shutdown
    else:
        current.reconnected()
    current.watch_loop(consumer)
    noted_at_once(consumer.connection.default_channel, current.unanswered)
    consumer.init_callback = start  # Celery calls it once, and again when it has reconnected


def stop() -> None:
    """Remove the lease of the worker; a receiver of Celery's ``worker_shutdown``."""
    atexit.unregister(stop)
    global current
    lease, current = current, None
    if lease is not None:
        lease.stop()


def _connection_like(consumer: Any, options: Mapping[str, Any]) -> Any:
    """A connection to the broker that *consumer* uses, whatever others its URL names, which knows
    the exchanges that it has declared.
    """
    used = consumer.connection or consumer.app.connection_for_read()
    made = used.clone(transport_options=options)
    made.cycle = None
    made.transport.state = used.transport.state
    return made


def prefix_of(channel: Any) -> str:
    """How the keys begin: workers that share unacknowledged messages share registrations, whatever
    the ``leases_prefix`` of their applications is.
    """
    return f"{channel.global_keyprefix}celery_leases:{channel.unacked_key}"
