"""Calls that wait in a worker for a held key, and begin as soon as the key is free.

Such a call waits like every call with a countdown: this worker has its message, unacknowledged, and
Celery's timer begins the call when the countdown ends. This module begins the call earlier. It
publishes no message and writes nothing, and no guarantee depends on it: without it, the call begins
when its countdown ends.

Two kinds of calls wait here:

* Copies that a pool child published because the key was held. Their header says so.
* Messages that have just arrived and whose key is known to be held. They get a countdown here, as
  if they had been published with one. So no pool child has to find out that the key is held.

One call of the lease store reads which of these keys are still held. Once a key is free, the call
of the key that arrived first begins, and the next one as soon as that call has ended. If the ended
call has a result that answers the others too, a number of them begin together. A call whose
countdown ends while its key is known to be held continues to wait, as long as the broker does not
redeliver its message meanwhile.

All this happens in the worker's main process. Calls begin only in callbacks of Celery's timer.
"""

from __future__ import annotations

import math
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import count
from types import MappingProxyType
from typing import Any, Final

from celery.worker import state
from celery.worker.request import Request

from celery_leases.concurrency import greenlets, os_threads
from celery_leases.decide.waiting import FIRST_COUNTDOWN_UNTIL_FREE
from celery_leases.errors import LeasesError
from celery_leases.groups.group import stored_group
from celery_leases.groups.slots import AHEAD, Ask, Room
from celery_leases.options import Group
from celery_leases.text.notices import logger
from celery_leases.worker import processes
from celery_leases.worker.app_settings import longest_countdown
from celery_leases.worker.headers import (
    ARRIVED,
    HEADER,
    SINCE,
    Header,
    call_id_of,
    carried_stored_key,
    group_of,
    key_of,
    order_of,
    read_header,
)
from celery_leases.worker.publisher import GroupIsFull, KeyIsHeld

TICK: Final = 0.05
"""Seconds between two rounds over all waiting calls."""
MIN_LOOKUP_INTERVAL: Final = 0.1
MAX_LOOKUP_INTERVAL: Final = 1.0
"""Seconds between two lookups of one key in the lease store: a key that has been held for long is
looked up less often.
"""
MAX_RETRY_PAUSE: Final = 10.0
"""The most seconds until a call begins again if the key seemed to be free, but its calls were
rescheduled.
"""
ANSWERED_TOGETHER: Final = 16
"""The number of calls of one key that begin together if the saved result answers them."""
ANSWER_VALID_FOR: Final = 5.0
"""Seconds after a lookup for which a key counts as held."""
IDLE_FOR: Final = 5.0
"""Seconds after which a key without calls is forgotten."""
LOOKUP_BATCH: Final = 500
"""The number of keys in one call of the lease store."""
MAX_SCHEDULED: Final = 10_000
"""The number of scheduled requests of a worker from which on arriving messages get no countdown
here.
"""
MAX_FINGERPRINTS: Final = 100
LONGEST_ANSWER: Final = 1.0
"""Seconds that an answer of the store may take if its time is to be the store's time now."""
ON_THE_WAY: Final = 0.15
"""Seconds in which a call that was begun has not yet got its slot, so that its group seems to have
more room.
"""
FULL_FOR: Final = 0.5
"""Seconds after a refusal for which a group counts as full."""
GROUP_KEY: Final = "\0group:"


class KeyWaiters:
    """The calls of one key that wait in this worker, and those that this module has begun."""

    def __init__(self, stored_key: str, now: float, *, longest: float) -> None:
        self.stored_key = stored_key
        #: The longest countdown before the broker might redeliver a message, in seconds.
        self.longest = longest
        #: The key has calls that run one after the other (``lease_runs="each"``).
        self.each_runs = False
        #: The newest of the calls begins first (``lease_runs="latest"``).
        self.latest_runs = False
        #: The waiting calls, a heap in the order of arrival, or with the newest first. Celery may
        #: have dropped some of them.
        self.waiting: list[tuple[int, int, Any]] = []
        self.begun: set[Any] = set()
        #: The fingerprints of calls that were rescheduled because the key was held.
        self.fingerprints: set[str | None] = set()
        #: No attempt holds the key, as far as this process knows.
        self.key_is_free = False
        #: How many calls may be begun at the same time.
        self.may_run = 1
        #: If the newest runs: the place of the last call that has a result. Calls before it, which
        #: are newer, begin alone.
        self.answered_to = -math.inf
        self.held_since = self.last_used = now
        self.next_lookup = now + MIN_LOOKUP_INTERVAL
        #: How often in a row a call that was begun here was rescheduled.
        self.rescheduled_in_a_row = 0
        #: No call begins before, unless a lookup finds the key held until then.
        self.not_before = now
        self._known_held = now
        self._count = count()
        self._places: dict[str, int] = {}

    def add_fingerprint(self, fingerprint: str | None) -> None:
        """Note that a call with that fingerprint waits for the key."""
        if len(self.fingerprints) >= MAX_FINGERPRINTS:
            self.fingerprints.clear()
        self.fingerprints.add(fingerprint)

    def place_of(self, request: Any) -> int:
        """The position of a call in the order of arrival. A call that is rescheduled keeps its
        position, although its copy is another message. If the newest runs, its order decides.
        """
        if self.latest_runs:
            return -_rank_of(request)
        if request.id not in self._places:
            self._places[request.id] = next(self._count)
        return self._places[request.id]

    def add(self, request: Any) -> None:
        """Note that *request* waits."""
        heappush(self.waiting, (self.place_of(request), next(self._count), request))

    def seen_held(self, now: float) -> None:
        """Note that a call was rescheduled because another call holds the key."""
        pause = MIN_LOOKUP_INTERVAL * 2.0 ** min(self.rescheduled_in_a_row, 10)
        self.key_is_free, self.may_run, self.last_used, self._known_held = False, 1, now, now
        self.not_before = now + min(pause, MAX_RETRY_PAUSE)
        self.next_lookup = now + min(pause, MAX_LOOKUP_INTERVAL)

    def call_ended(self, request: Any, now: float, *, answered: bool) -> None:
        """Note that a call that was begun here has ended and was not rescheduled, so that the key
        is free; *answered*: the call has a result.
        """
        self.begun.discard(request)
        self._places.pop(request.id, None)
        if answered and self.latest_runs:
            self.answered_to = self.place_of(request)
        self.key_is_free, self.rescheduled_in_a_row, self.held_since, self.last_used = (
            True,
            0,
            now,
            now,
        )
        self.may_run = ANSWERED_TOGETHER if answered and not self.each_runs else 1

    def still_held(self, now: float) -> None:
        """Note that a lookup found the key held."""
        self._known_held = self.not_before = now
        self.rescheduled_in_a_row = 0
        self.next_lookup = now + min(
            max((now - self.held_since) / 100, MIN_LOOKUP_INTERVAL), MAX_LOOKUP_INTERVAL
        )

    def seen_free(self, now: float) -> None:
        """Note that a lookup found the key free."""
        if now >= self.not_before:
            self.key_is_free = True
        else:
            self.next_lookup = min(self.not_before, now + MAX_LOOKUP_INTERVAL)

    def must_wait(self, now: float) -> bool:
        """Whether a call of the key that began now would find the key held, as far as known."""
        if self.key_is_free:
            return len(self.begun) >= self.may_run
        return now - self._known_held < ANSWER_VALID_FOR

    def may_begin(self) -> bool:
        """Whether a call that has just arrived may begin at once."""
        return self.key_is_free and not self.waiting and len(self.begun) < self.may_run

    def needs_lookup(self, now: float) -> bool:
        """Whether to look up the key in the lease store."""
        return (
            bool(self.waiting)
            and not self.begun
            and not self.key_is_free
            and now >= self.next_lookup
        )

    def next_to_begin(self) -> Any:
        """Remove and return a call that may begin now; ``None`` if no call may."""
        while self.key_is_free and self.waiting and len(self.begun) < self.may_run:
            place, _, request = self.waiting[0]
            if place < self.answered_to and self.begun:
                return None
            heappop(self.waiting)
            if _waits(request):
                self.begun.add(request)
                return request
        return None

    def remove_dropped(self) -> None:
        """Remove the requests that Celery has dropped, for example with a lost connection, or has
        ended without calling this module.
        """
        self.begun = {request for request in self.begun if _is_there(request)}
        if any(not _waits(request) for _, _, request in self.waiting):
            self.waiting = [place for place in self.waiting if _waits(place[-1])]
            heapify(self.waiting)


class GroupWaiters(KeyWaiters):
    """The calls of one group with a limit or a rate that wait in this worker for their turn."""

    def __init__(self, group: str, now: float, *, longest: float, ahead: float) -> None:
        super().__init__(group, now, longest=longest)
        #: The smallest limit of its tasks, 0 without one; the longest pause, in milliseconds.
        self.limit, self.pause = 0, 0.0
        #: How many calls may begin, as far as this process knows.
        self.room = 0
        self._begun_at: deque[float] = deque(maxlen=MAX_FINGERPRINTS)
        #: The time of the store less that of this process, in milliseconds; by the clock of this
        #: machine until the store is asked.
        self._ahead = ahead * 1000

    def needs(self, group: Group) -> None:
        """Note the limit and the rate of a task."""
        if group.limit is not None:
            self.limit = min(self.limit or group.limit, group.limit)
        self.pause = max(self.pause, group.pause * 1000)

    def now_of_store(self) -> float:
        """The time of the store in milliseconds, about."""
        return float(round(os_threads.boot_clock() * 1000 + self._ahead))

    def wait_since(self, request: Any, since: float | None) -> float:
        """Note since when a call waits, in milliseconds by the clock of the store; ``None``: it
        comes now.
        """
        self._places[request.id] = int(since or self.now_of_store())
        return float(self._places[request.id])

    def forget_place(self, request: Any) -> None:
        """Forget since when a call waits that goes on as a copy: its header says it."""
        self._places.pop(request.id, None)

    def ask(self, worker: str) -> Ask:
        """What this worker asks of the group for its oldest call."""
        since = self.waiting[0][0] if self.waiting else 0
        return Ask(self.limit, self.pause, float(since), worker)

    def seen_held(self, now: float) -> None:
        """Note that a call was rescheduled because the group is full."""
        self.room, self.last_used, self._known_held = 0, now, now
        pause = MIN_LOOKUP_INTERVAL * 2.0 ** min(self.rescheduled_in_a_row, 3)
        self.next_lookup = min(max(self.next_lookup, now), now + pause)

    def looked_up(self, found: Room, now: float, took: float = 0.0) -> None:
        """Note the room of the group. Half of it is left to other workers, which see it too.

        An answer that *took* long does not say what the time of the store is now.
        """
        if took <= LONGEST_ANSWER:
            self._ahead = found.now - now * 1000
        while self._begun_at and now - self._begun_at[0] > ON_THE_WAY:
            self._begun_at.popleft()
        self.room = max(0, (found.places + 1) // 2 - len(self._begun_at))
        if found.places:
            self.held_since = now
        longest = max(found.wait - AHEAD / 1000, MIN_LOOKUP_INTERVAL)
        waited = max((now - self.held_since) / 100, MIN_LOOKUP_INTERVAL)
        self.next_lookup = now + min(max(longest, waited), MAX_LOOKUP_INTERVAL)

    def call_ended(self, request: Any, now: float, *, answered: bool) -> None:
        """Note that a call that was begun here has ended: its slot is free."""
        self.begun.discard(request)
        self._places.pop(request.id, None)
        self.rescheduled_in_a_row, self.held_since, self.last_used = 0, now, now
        if self.limit and not self.pause:
            self.room += 1
        self.next_lookup = min(self.next_lookup, now)

    def must_wait(self, now: float) -> bool:
        """Whether a call that began now would find the group full, as far as known."""
        return bool(self.waiting) or now - self._known_held < FULL_FOR

    def may_begin(self) -> bool:
        """Whether a call that has just arrived may begin at once."""
        return not self.must_wait(os_threads.boot_clock())

    def needs_lookup(self, now: float) -> bool:
        """Whether to look up the room of the group."""
        return bool(self.waiting) and not self.room and now >= self.next_lookup

    def next_to_begin(self) -> Any:
        """Remove and return a call that may begin now; ``None`` if no call may."""
        while self.room > 0 and self.waiting:
            _, _, request = heappop(self.waiting)
            if _waits(request):
                self.room -= 1
                self._begun_at.append(os_threads.boot_clock())
                self.begun.add(request)
                return request
        if not self.waiting:
            self.room = 0
        return None


class WaitingCalls:
    """All calls that wait for held keys in one worker."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all calls, when a worker starts."""
        #: By stored key. Empty as long as no call of this worker has found its key held.
        self.by_key: dict[str, KeyWaiters] = {}
        self._tasks: set[str] = set()
        self._lock = threading.RLock()
        self._lookup_results: deque[tuple[Sequence[str], set[str]]] = deque()
        #: With the time at which each was asked for.
        self._rooms: deque[tuple[float, Mapping[str, Room]]] = deque()
        self._lookup_pending = False
        self._due = 0.0
        self._tick_number = 0

    def begins_early(self, consumer: Any) -> bool:
        """Whether calls that wait in this worker are begun early.

        This needs Celery 5.7, which stores the timer's entry of a request. It is not done with
        quorum queues: their messages with a countdown wait at the broker, and a worker cannot raise
        their prefetch count.
        """
        if (
            consumer is None
            or consumer.connection is None
            or not hasattr(Request, "_eta_timer_entry")
        ):
            return False
        return bool(consumer.qos_global) or consumer.connection.transport.driver_type != "amqp"

    # -- what happens to a request -----------------------------------------------------------------

    def received(self, request: Any) -> None:
        """Note a message that has arrived, and give it a countdown if its key is known to be held.
        This must happen before Celery looks for a countdown.
        """
        fields, task = request._request_dict, request.task  # noqa: SLF001 - as Celery's own request reads it
        consumer: Any = _consumer()
        copy = request.eta is not None
        known = task.name in self._tasks or task.lease_options.latest_runs
        if (HEADER not in fields if copy else not known) or not self.begins_early(consumer):
            return
        if copy:
            header = _header_of(request)
            if header is None:
                return
            waiters: KeyWaiters
            with self._lock:
                if header.full:
                    in_group = self._group_waiters_of(header.group, task)
                    if in_group is None:
                        return
                    in_group.wait_since(request, header.since)
                    waiters = in_group
                else:
                    stored_key = carried_stored_key(task, header)
                    if not stored_key:
                        return
                    waiters = self._waiters_of(stored_key, task)
                    waiters.add_fingerprint(header.fingerprint)
        else:
            found = self._waiters_for(request)
            if found is None:
                return
            waiters, why = found
            with self._lock:
                if waiters.may_begin():
                    waiters.begun.add(request)
                    self._observe_end(request, waiters)
                    return
            if not self._may_wait(consumer):
                return
            if isinstance(waiters, GroupWaiters):
                fields[SINCE] = waiters.wait_since(request, None)
            request._eta = task.app.now() + timedelta(seconds=min(_countdown(), waiters.longest))  # noqa: SLF001
            logger.info(
                "%s[%s] %s",
                task.name,
                request.id,
                why,
            )
        request.waits_until = os_threads.boot_clock() + waiters.longest * random.uniform(0.7, 1.0)
        self._observe_end(request, waiters)

    def scheduled(self, request: Any) -> None:
        """Note that Celery has put *request* into its timer, so that it waits from now on."""
        entry = _entry_of(request)
        begin = partial(entry.fun, *entry.args)

        def countdown_ended(of: Any) -> None:
            self._countdown_ended(of, begin)

        entry.fun, entry.args = countdown_ended, (request,)
        with self._lock:
            request.waiters.add(request)
        self._start_ticking(_consumer())

    def rescheduled(self, request: Any, held: KeyIsHeld | GroupIsFull) -> None:
        """Note that *request* has ended with a reschedule, because another call holds its key, or
        its group is full.
        """
        consumer = _consumer()
        with self._lock:
            before, request.waiters = request.waiters, None
            if isinstance(before, GroupWaiters):
                before.forget_place(request)
            if not (self.by_key or self.begins_early(consumer)):
                return
            if isinstance(held, GroupIsFull):
                waiters: KeyWaiters | None
                waiters = self._group_waiters_of(held.group, request.task)
            else:
                waiters = self._waiters_of(held.stored_key, request.task)
                waiters.add_fingerprint(held.fingerprint)
                waiters.place_of(request)
            if waiters is None:
                return
            if request in waiters.begun:
                waiters.rescheduled_in_a_row += 1
                waiters.begun.discard(request)
            waiters.seen_held(os_threads.boot_clock())
        self._start_ticking(consumer)

    def ended(self, request: Any, *, answered: bool = False) -> None:
        """Note that a call has ended without a reschedule, or was revoked while it waited."""
        with self._lock:
            waiters, request.waiters = request.waiters, None
            if waiters is None or request not in waiters.begun:
                return
            waiters.call_ended(request, os_threads.boot_clock(), answered=answered)
            if waiters.latest_runs and not waiters.waiting and not waiters.begun:
                self.by_key.pop(waiters.stored_key, None)
        consumer = _consumer()
        if waiters.waiting and consumer is not None and consumer.timer is not None:
            consumer.timer.call_after(0, self._begin_ready)

    def _waiters_of(self, stored_key: str, task: Any) -> KeyWaiters:
        waiters = self.by_key.get(stored_key)
        if waiters is None:
            waiters = KeyWaiters(
                stored_key, os_threads.boot_clock(), longest=longest_countdown(task.app)
            )
            self.by_key[stored_key] = waiters
        self._tasks.add(task.name)
        waiters.each_runs = waiters.each_runs or task.lease_options.each_runs
        waiters.latest_runs = waiters.latest_runs or task.lease_options.latest_runs
        return waiters

    def _group_waiters_of(self, name: str | None, task: Any) -> GroupWaiters | None:
        """The waiting calls of the group *name*; ``None`` if the task has no limit and no rate."""
        group = task.lease_options.group
        if name is None or group is None or not group.limited:
            return None
        waiters = self.by_key.get(_group_key(name))
        if not isinstance(waiters, GroupWaiters):
            longest = longest_countdown(task.app)
            now = os_threads.boot_clock()
            ahead = task.app.now().timestamp() - now
            waiters = GroupWaiters(_group_key(name), now, longest=longest, ahead=ahead)
            self.by_key[waiters.stored_key] = waiters
        self._tasks.add(task.name)
        waiters.needs(group)
        return waiters

    def _waiters_for(self, request: Any) -> tuple[KeyWaiters, str] | None:
        """The waiting calls of the key or the group of a message that has just arrived, and what it
        waits for in words; ``None`` if the message must go to a pool child.

        A call with another fingerprint goes to a pool child, which compares it with the record and
        refuses it at once.
        """
        options, fields = request.task.lease_options, request._request_dict  # noqa: SLF001
        if (
            options.on_busy in ("raise", "ignore")
            or callable(options.key)
            or callable(options.fingerprint)
            or options.tenant is not None
        ):
            return None  # the main process must not call functions of the user
        try:
            call_id = call_id_of(request.id, fields.get("replaced_task_nesting"))
            args, kwargs, _ = request._payload  # noqa: SLF001
            key = key_of(request.task, None, call_id, args, kwargs, fields["retries"])
            group = None
            if options.group is not None and options.group.limited:
                if callable(options.group.name):
                    return None
                group = group_of(request.task, None, args, kwargs, fields["retries"])
        except Exception:  # noqa: BLE001 - the pool child reports what is wrong with the message
            return None
        waiters = self.by_key.get(key.stored)
        if waiters is None and options.latest_runs:
            # Otherwise the calls that arrive while the first one runs would be begun by the pool,
            # in the order of arrival.
            waiters = self._waiters_of(key.stored, request.task)
            waiters.add_fingerprint(key.fingerprint)
            waiters.key_is_free = True
            self._start_ticking(_consumer())
        if waiters is not None and key.fingerprint in waiters.fingerprints:
            return waiters, f"key {key.shown}: waits here: another call holds the key"
        if group is None or (waiters := self.by_key.get(_group_key(group))) is None:
            return None
        return waiters, f"key {key.shown}: waits here for its turn in the group {group}"

    def _may_wait(self, consumer: Any) -> bool:
        """Whether one more message may get a countdown. ``worker_eta_task_limit`` limits such
        messages too.
        """
        limit = consumer.app.conf.get("worker_eta_task_limit")
        return len(state.scheduled_requests) < (MAX_SCHEDULED if limit is None else limit // 2)

    def _observe_end(self, request: Any, waiters: KeyWaiters) -> None:
        """Call :meth:`ended` when *request* succeeds. Celery makes its request classes with an
        ``on_success`` of their own, so the method of the object is replaced.
        """
        request.waiters = waiters
        on_success: Callable[..., Any] = request.on_success

        def then_end(result: Any, **kwargs: Any) -> Any:
            vars(request).pop("on_success", None)
            try:
                return on_success(result, **kwargs)
            finally:
                self.ended(request, answered=not result[0])

        request.on_success = then_end

    # -- the timer ---------------------------------------------------------------------------------

    def _countdown_ended(self, request: Any, begin: Callable[[], Any]) -> None:
        """Begin *request*, once. Celery's timer calls this when the countdown ends, or earlier when
        the key is free.
        """
        entry = _entry_of(request)
        with self._lock:
            waiters, now = request.waiters, os_threads.boot_clock()
            if waiters is not None and request not in waiters.begun:
                rest = request.waits_until - now
                if rest > TICK and waiters.must_wait(now):
                    again = _consumer().timer.call_after(
                        min(_countdown(), rest), entry.fun, entry.args
                    )
                    request.scheduled_again(again)
                    return
                waiters.begun.add(request)
            # The entry of a call that begins early stays in the timer until the countdown ends.
            entry.fun, entry.args = _nothing, ()
        begin()

    def _start_ticking(self, consumer: Any) -> None:
        """Start the rounds over all waiting calls, unless they run. Celery clears the timer with a
        lost connection, so rounds that are late are started again.
        """
        with self._lock:
            now = os_threads.boot_clock()
            if now < self._due + 1.0 or consumer is None or consumer.timer is None:
                return
            self._due = now + TICK
            self._tick_number += 1
            number = self._tick_number
        consumer.timer.call_after(TICK, self._tick, (number,))

    def _tick(self, number: int) -> None:
        """Make one round over all waiting calls, and schedule the next one as long as there are
        any.
        """
        consumer = _consumer()
        with self._lock:
            if number != self._tick_number or consumer is None or consumer.timer is None:
                return
            now = os_threads.boot_clock()
            for stored_key, waiters in list(self.by_key.items()):
                waiters.remove_dropped()
                if waiters.waiting or waiters.begun:
                    waiters.last_used = now
                elif now - waiters.last_used > IDLE_FOR:
                    del self.by_key[stored_key]
            if not self.by_key:
                self._tasks.clear()
                self._due = 0.0
                return
            self._due = now + TICK
        consumer.timer.call_after(TICK, self._tick, (number,))
        self._begin_ready()
        wanted = [waiters for waiters in list(self.by_key.values()) if waiters.needs_lookup(now)]
        asks = {
            waiters.stored_key: waiters.ask(_name_if_idle(processes.current_worker()))
            for waiters in wanted
            if isinstance(waiters, GroupWaiters)
        }
        self._look_up([each.stored_key for each in wanted if each.stored_key not in asks], asks)

    def _look_up(
        self, stored_keys: Sequence[str], asks: Mapping[str, Ask] = MappingProxyType({})
    ) -> None:
        """Look up keys and groups in the lease store, in a thread or greenlet of its own, because
        the worker's loop must not wait for the store.
        """
        if not (stored_keys or asks) or self._lookup_pending:
            return
        ask = partial(self._query, processes.current_worker().app, stored_keys, asks)
        self._lookup_pending = True
        try:
            greenlets.start(ask)
        except BaseException:
            self._lookup_pending = False
            raise

    def _query(self, app: Any, stored_keys: Sequence[str], asks: Mapping[str, Ask]) -> None:
        try:
            leases = processes.process_of(app, eager=False).leases
            for some in _chunks(stored_keys, LOOKUP_BATCH):
                self._lookup_results.append((some, leases.held(some)))
            if asks:
                names = {name.removeprefix(GROUP_KEY): ask for name, ask in asks.items()}
                sent = os_threads.boot_clock()
                self._rooms.append((sent, leases.groups.room(names)))
        except LeasesError as error:
            logger.debug("cannot read which keys are held: %s", error)
        except Exception:  # noqa: BLE001 - the calls begin when their countdown ends
            logger.exception("cannot read which keys are held", code="waiting-not-read")
        finally:
            self._lookup_pending = False

    def _begin_ready(self) -> None:
        """Begin the calls that may begin now. Each begins in a callback of its own, because in some
        pools this may block.
        """
        consumer = _consumer()
        if consumer is None or consumer.timer is None or _is_stopping():
            return
        begun = []
        with self._lock:
            now = os_threads.boot_clock()
            while self._lookup_results:
                asked, held = self._lookup_results.popleft()
                for waiters in (
                    self.by_key[stored_key] for stored_key in asked if stored_key in self.by_key
                ):
                    if waiters.stored_key in held:
                        waiters.still_held(now)
                    elif not waiters.begun:
                        waiters.seen_free(now)
            while self._rooms:
                sent, rooms = self._rooms.popleft()
                for name, room in rooms.items():
                    in_group = self.by_key.get(_group_key(name))
                    if isinstance(in_group, GroupWaiters):
                        in_group.looked_up(room, now, now - sent)
            for waiters in self.by_key.values():
                while (request := waiters.next_to_begin()) is not None:
                    begun.append(request)
        for request in begun:
            consumer.timer.call_after(0, _begin_early, (request,))


def _group_key(name: str) -> str:
    """The name of a group among the stored keys, which have no NUL."""
    return GROUP_KEY + stored_group(name)


def _name_if_idle(worker: Any) -> str:
    """The name of this worker if it could run one more call now; empty if others come first."""
    active: int = len(state.active_requests)
    return str(worker.hostname) if active < (worker.concurrency or 1) else ""


def _consumer() -> Any:
    return getattr(processes.current_worker(), "consumer", None)


def _header_of(request: Any) -> Header | None:
    """The header of a copy that waits for a held key or its turn in a group; ``None`` for any other
    message.
    """
    fields = request._request_dict  # noqa: SLF001 - as Celery's own request reads it
    written = fields.get(HEADER)
    if not isinstance(written, Mapping) or True not in (written.get("held"), written.get("full")):
        return None
    return read_header(
        fields, request.task.name, call_id_of(request.id, fields.get("replaced_task_nesting"))
    )


def _rank_of(request: Any) -> int:
    """The place of a call among those of its key: its order, or its first arrival without one."""
    fields = request._request_dict  # noqa: SLF001 - as Celery's own request reads it
    call_id = call_id_of(request.id, fields.get("replaced_task_nesting"))
    if order := order_of(fields, call_id):
        return order
    header = read_header(fields, request.task.name, call_id)
    return (header.arrived if header is not None else 0) or int(fields.get(ARRIVED) or 0)


def _countdown() -> float:
    """A random countdown of about a minute, so that calls that arrived together do not begin
    together.
    """
    return FIRST_COUNTDOWN_UNTIL_FREE * random.uniform(0.75, 1.0)


def _begin_early(request: Any) -> None:
    """Begin *request* before its countdown is over, unless Celery has begun or dropped it
    meanwhile.
    """
    if _waits(request):
        _entry_of(request)()


def _nothing() -> None:
    """The timer's callback for a call that has begun early."""


def _entry_of(request: Any) -> Any:
    """The entry of *request* in Celery's timer. With greenlets the timer returns an object that has
    the entry as an attribute.
    """
    scheduled = request._eta_timer_entry  # noqa: SLF001 - as Celery's consumer cancels it
    return getattr(scheduled, "entry", scheduled)


def _waits(request: Any) -> bool:
    """Whether *request* is still in Celery's timer: it has not begun, and was neither revoked nor
    dropped with a lost connection.
    """
    return request.waiters is not None and request in state.scheduled_requests


def _is_there(request: Any) -> bool:
    """Whether Celery still has *request*."""
    known = (state.scheduled_requests, state.reserved_requests, state.active_requests)
    return request.waiters is not None and any(request in requests for requests in known)


def _is_stopping() -> bool:
    return any(
        wanted is not None and wanted is not False
        for wanted in (state.should_stop, state.should_terminate)
    )


def _chunks(keys: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    return (keys[start : start + size] for start in range(0, len(keys), size))


waiting_calls: Final = WaitingCalls()
"""The waiting calls of this process."""
