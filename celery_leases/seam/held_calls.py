"""Calls that wait in a worker for a held key, and are begun as soon as the key is free.

Such a call waits as every call with a countdown does: its message is with this worker, unacknowledged, and Celery's
timer begins it when its time has come. Here its time is brought forward. There is no second message, nothing is written
anywhere, and no promise depends on it: without it, the call begins when its countdown is over.

Two kinds of calls wait here:

* Copies that a pool child has published because the key was held. Their header says so.
* Messages that have just come, whose key is known to be held. They get a countdown here, as if they had been published
  with one, so that no pool child has to find out once more that they must wait.

The lease store is asked which of these keys are still held, for all of them at once. One call of a free key is begun,
in the order in which the calls came to this worker; the next one as soon as that call has ended. Where done work is
answered from its record, the others are begun together then.

Everything here happens in the worker's main process, and begins nothing but in a callback of its timer.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import count
from time import monotonic
from typing import Any, Final
from weakref import WeakSet

from celery.worker import state
from celery.worker.request import Request

from celery_leases.core.errors import LeasesError
from celery_leases.process import greenlets, native
from celery_leases.seam import apps
from celery_leases.seam.app_settings import settings_of
from celery_leases.seam.pin import HEADER, arrived, call_id_of, key_of
from celery_leases.seam.putback import KeyIsHeld
from celery_leases.signals import logger

TICK: Final = 0.05
"""Seconds between two looks at the lines."""
SOONEST_LOOK: Final = 0.1
LATEST_LOOK: Final = 1.0
"""Seconds between two questions to the lease store about one key: the longer it is held, the longer."""
LONGEST_PAUSE: Final = 10.0
"""Seconds until a key is asked for again whose calls were put back several times, although it seemed to be free."""
TOGETHER: Final = 16
"""Calls of one key that are begun together where they only need to be answered."""
KEPT_IDLE: Final = 5.0
"""Seconds for which a line without calls is kept."""
ASKED_AT_ONCE: Final = 500
"""Keys in one question to the lease store."""
LONGEST_LINES: Final = 10_000
"""Messages that are given a countdown here at most; above that they go to the pool children."""


class Line:
    """The calls of one key that wait in this worker, or that it has begun."""

    def __init__(self, stored_key: str, now: float, *, rerun: bool, longest: float) -> None:
        self.stored_key = stored_key
        #: The longest countdown the broker can be trusted with, in seconds.
        self.longest = longest
        #: Each of its calls is work of its own, so that they run one after the other.
        self.rerun = rerun
        #: Its calls, a heap by their places. Celery may end some of them without telling.
        self.waiting: list[tuple[int, int, Any]] = []
        self._count = count()
        self._places: dict[str, int] = {}
        self.begun: WeakSet[Any] = WeakSet()
        #: What its calls are about, as far as calls were put back.
        self.fingerprints: set[str | None] = set()
        #: Nobody holds the key, as far as is known here.
        self.free = False
        self.width = 1
        self.since = self.used = now
        self.look_at = now + SOONEST_LOOK
        #: How often in a row a call was put back that was begun here.
        self.in_vain = 0

    def place(self, request: Any) -> int:
        """A call keeps its place when it is put back, and comes again as another message."""
        return self._places.setdefault(request.id, len(self._places))

    def join(self, request: Any) -> None:
        """*request* waits."""
        heappush(self.waiting, (self.place(request), next(self._count), request))

    def held(self, now: float) -> None:
        """A call of it was put back, as somebody else holds the key."""
        pause = SOONEST_LOOK * 2.0 ** min(self.in_vain, 10)
        self.free, self.width, self.used = False, 1, now
        self.look_at = now + min(pause, LONGEST_PAUSE)

    def ended(self, now: float) -> None:
        """A call of it has ended otherwise, so that the key is free again, or every call has its answer."""
        self.free, self.in_vain, self.since, self.used = True, 0, now, now
        self.width = 1 if self.rerun else TOGETHER

    def still_held(self, now: float) -> None:
        """The lease store says so."""
        if any(_is_gone(request) for _, _, request in self.waiting):
            self.waiting = [place for place in self.waiting if not _is_gone(place[-1])]
            heapify(self.waiting)
        self.look_at = now + min(max((now - self.since) / 100, SOONEST_LOOK), LATEST_LOOK)

    def wants_to_know(self, now: float) -> bool:
        """Whether the lease store is to be asked about its key."""
        return bool(self.waiting) and not self.begun and not self.free and now >= self.look_at

    def next(self) -> Any:
        """A call to begin now; ``None`` if there is none."""
        while self.free and self.waiting and len(self.begun) < self.width:
            request = self.waiting[0][-1]
            if request.line is not None and request._eta_timer_entry is None:  # noqa: SLF001
                return None  # Celery is just about to enter it into its timer
            heappop(self.waiting)
            if not _is_gone(request):
                self.begun.add(request)
                return request
        return None


class HeldCalls:
    """The lines of one worker."""

    def __init__(self) -> None:
        #: By stored key; empty in a worker whose calls meet no held keys.
        self.lines: dict[str, Line] = {}
        self._tasks: set[str] = set()
        self._lock = threading.RLock()
        self._answers: deque[tuple[Sequence[str], set[str]]] = deque()
        self._asking = False
        self._due = 0.0

    def wakes(self, consumer: Any) -> bool:
        """Whether calls that wait in this worker are begun early.

        Not before Celery 5.7, which is the first that keeps the timer's entry of a request. Nor with quorum queues: the
        broker itself keeps their messages until their time has come, and a worker cannot raise their prefetch count.
        """
        if consumer is None or consumer.connection is None or not hasattr(Request, "_eta_timer_entry"):
            return False
        return bool(consumer.qos_global) or consumer.connection.transport.driver_type != "amqp"

    def receive(self, request: Any) -> None:
        """Note a message that has come; it may get a countdown here, which must happen before Celery looks for one."""
        told = request._request_dict  # noqa: SLF001 - as Celery's own request reads it
        consumer: Any = getattr(apps.worker_here(), "consumer", None)
        if not self.wakes(consumer):
            return
        if HEADER not in told if request.eta is not None else request.name not in self._tasks:
            return
        options = request.task.lease_options
        try:
            call_id = call_id_of(request.id, told.get("replaced_task_nesting"))
            header = arrived(told, request.task.name, call_id)
            copy = request.eta is not None
            if copy and not (header is not None and header.held):
                return
            args, kwargs, _ = request._payload  # noqa: SLF001
            key = key_of(request.task, header, call_id, args, kwargs, told["retries"])
        except Exception:  # noqa: BLE001 - the pool child says what is wrong with it
            return
        with self._lock:
            line = self.lines.get(key.stored)
            if copy:
                line = line or self._line(key.stored, request.task)
                line.fingerprints.add(key.fingerprint)
            elif line is None or options.on_held != "reschedule" or key.fingerprint not in line.fingerprints:
                return  # a call with other arguments is refused at once, which the record decides
            elif line.free and not line.waiting and len(line.begun) < line.width:
                line.begun.add(request)
                self._watch(request, line)
                return
            elif not self._may_wait(consumer):
                return
            else:
                countdown = line.longest * random.uniform(0.7, 1.0)
                request._eta = datetime.now(UTC) + timedelta(seconds=countdown)  # noqa: SLF001
            line.join(request)
            self._watch(request, line)
        self._run(consumer)

    def put_back(self, request: Any, held: KeyIsHeld) -> None:
        """The delivery of *request* has ended, as somebody else holds its key."""
        consumer: Any = getattr(apps.worker_here(), "consumer", None)
        if not self.wakes(consumer):
            return
        with self._lock:
            now = monotonic()
            line = self._line(held.stored_key, request.task)
            line.fingerprints.add(held.fingerprint)
            if request in line.begun:
                line.in_vain += 1
                line.begun.discard(request)
            line.place(request)
            request.line = None
            line.held(now)
        self._run(consumer)

    def ended(self, request: Any, line: Line) -> None:
        """A call of a line has ended."""
        with self._lock:
            if request.line is None:
                return
            request.line = None
            line.begun.discard(request)
            line.ended(monotonic())
        consumer: Any = getattr(apps.worker_here(), "consumer", None)
        if line.waiting and getattr(consumer, "timer", None) is not None:
            consumer.timer.call_after(0, self._begin_what_may)

    def _line(self, stored_key: str, task: Any) -> Line:
        line = self.lines.get(stored_key)
        if line is None:
            self._tasks.add(task.name)
            longest = settings_of(task.app).longest_hop
            line = Line(stored_key, monotonic(), rerun=task.lease_options.rerun, longest=longest)
            self.lines[stored_key] = line
        return line

    def _may_wait(self, consumer: Any) -> bool:
        """Whether one more message may get a countdown; ``worker_eta_task_limit`` is a limit of these too."""
        limit = consumer.app.conf.get("worker_eta_task_limit")
        return len(state.scheduled_requests) < (LONGEST_LINES if limit is None else limit // 2)

    def _watch(self, request: Any, line: Line) -> None:
        """Have the end of *request* told, whose class Celery has made with an ``on_success`` of its own."""
        request.line = line
        on_success: Callable[..., Any] = request.on_success

        def then_tell(*args: Any, **kwargs: Any) -> Any:
            try:
                return on_success(*args, **kwargs)
            finally:
                self.ended(request, line)

        request.on_success = then_tell

    # -- the timer -----------------------------------------------------------------------------------------

    def _run(self, consumer: Any) -> None:
        """Have the lines looked at; where the timer was cleared, as with a lost connection, it is asked again."""
        with self._lock:
            now = monotonic()
            if now < self._due + 1.0:
                return
            self._due = now + TICK
        consumer.timer.call_after(TICK, self._tick)

    def _tick(self) -> None:
        """Look at the lines, and again in a moment as long as there are any."""
        self._begin_what_may()
        worker = apps.worker_here()
        with self._lock:
            now = monotonic()
            for stored_key, line in list(self.lines.items()):
                if line.waiting or line.begun:
                    line.used = now
                elif now - line.used > KEPT_IDLE:
                    del self.lines[stored_key]
            if not self.lines:
                self._tasks.clear()
                self._due = 0.0
                return
            self._due = now + TICK
            asked = [line.stored_key for line in self.lines.values() if line.wants_to_know(now)][:ASKED_AT_ONCE]
            asks = bool(asked) and not self._asking
            self._asking = self._asking or asks
        worker.consumer.timer.call_after(TICK, self._tick)
        if asks:
            begin = greenlets.spawn if native.green() else native.start_thread
            begin(partial(self._ask, worker.app, asked))

    def _ask(self, app: Any, stored_keys: Sequence[str]) -> None:
        """Ask the lease store, outside the worker's loop: it may be away for seconds."""
        held = set(stored_keys)
        try:
            held = apps.parts_of(app).parts.leases.held(stored_keys)
        except LeasesError as error:
            logger.debug("it is not known which keys are held: %s", error)
        except Exception:  # noqa: BLE001 - calls wait for their countdown then
            logger.exception("it is not known which keys are held")
        finally:
            self._answers.append((stored_keys, held))
            self._asking = False

    def _begin_what_may(self) -> None:
        """Begin the calls whose turn has come."""
        with self._lock:
            now = monotonic()
            while self._answers:
                asked, held = self._answers.popleft()
                for line in (self.lines[stored_key] for stored_key in asked if stored_key in self.lines):
                    if line.stored_key in held:
                        line.still_held(now)
                    elif not line.begun:
                        line.free = True
            begun = []
            for line in self.lines.values():
                while (request := line.next()) is not None:
                    begun.append(request)
        timer: Any = apps.worker_here().consumer.timer if begun else None
        for request in begun:
            scheduled = request._eta_timer_entry  # noqa: SLF001 - as Celery's consumer cancels it
            timer.cancel(scheduled)
            entry = getattr(scheduled, "entry", scheduled)  # with greenlets the timer gives one that has the entry
            # A cancelled entry stays in the timer until its time: "celery inspect scheduled" would show its request.
            args, entry.args = entry.args, ()
            entry.fun(*args)


def _is_gone(request: Any) -> bool:
    """Whether *request* was revoked, begun by Celery's timer itself, or dropped with its connection."""
    scheduled = request._eta_timer_entry is not None  # noqa: SLF001
    return request.line is None or (scheduled and request not in state.scheduled_requests)


held_calls: Final = HeldCalls()
"""Those of this process."""
