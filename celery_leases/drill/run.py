"""One drill: its workers and queues, its steps, and the end, which leaves nothing behind."""

from __future__ import annotations

import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar
from uuid import uuid4

from celery import Celery

from celery_leases.drill import leftovers
from celery_leases.drill.notes import Note, Notes
from celery_leases.drill.processes import DrillWorker
from celery_leases.drill.report import Bounds, StepName, StepReport, Takeover, Who
from celery_leases.drill.task import never, register
from celery_leases.drill.worker import Orders, finish_file
from celery_leases.errors import LeasesError
from celery_leases.worker import app_components

T = TypeVar("T")
WORKERS: Final = 2
CONCURRENCY: Final = 2
STARTED_WITHIN: Final = 60.0
"""Seconds for what no SLO is about: a worker's start, the first run of a body."""
BROKER_TIMEOUT: Final = 5.0
OFTEN: Final = 0.02
KILLED: Final = "killed worker"
"""The note of a worker that was killed as a whole."""
_BROKERS: Final = ("redis", "amqp")
_SPOKEN: Final = {
    "began": "began the body of {call}",
    "lost": "stopped the body of {call}: its lease is lost",
    "returned": "came to the end of the body of {call}",
    "call_rescheduled": "rescheduled {call}",
    "call_dropped": "dropped a message of {call}",
    "result_replayed": "answered {call} without a run",
    "lease_lost": "found the lease of {call} lost",
    "outcome_refused": "had the outcome of {call} refused",
    "attempt_settled": "wrote the outcome of {call}",
    "crash_seen": "found, for {call}, that the attempt before had died",
}
"""By the kind of a note, what a worker has done."""


class DrillImpossible(LeasesError):
    """The drill could not begin, or could not go on; the message says why."""


class Drill:
    """Two workers of *app* with queues of their own; a context manager.

    *app_name* is the word behind ``celery -A``. When it ends, in any way but SIGKILL, the workers
    are killed, and queues, records and leases are deleted.
    """

    def __init__(self, app: Celery, app_name: str, bounds: Bounds) -> None:
        self.app, self.bounds = app, bounds
        self._app_name = app_name
        self._name = f"celery_leases.drill.{uuid4().hex[:12]}"
        self._queues = [self._name, *(self.queue_of(number) for number in range(1, WORKERS + 1))]
        self._calls: list[tuple[str, str]] = []
        self._workers: dict[int, DrillWorker] = {}
        self._restored: list[Callable[[], object]] = []

    # -- beginning and end -------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self.parts = self._answering()
        self._task = register(self.app, self.bounds.ttl, never)
        self._end_by_signals()
        self._directory = Path(tempfile.mkdtemp(prefix="celery-leases-drill-"))
        self.notes = Notes(self._directory / "notes")
        try:
            self._start_workers()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with _uninterrupted():
            for worker in self._workers.values():
                worker.kill()
            shutil.rmtree(self._directory, ignore_errors=True)
            left = [
                *self._deleted("queues", lambda: leftovers.delete_queues(self.app, self._queues)),
                *self._deleted("keys", lambda: leftovers.delete_keys(self.parts, self._calls)),
            ]
        for restore in self._restored:
            restore()
        if left:
            raise DrillImpossible("; ".join(left)) from None

    def _deleted(self, what: str, delete: Callable[[], None]) -> Iterator[str]:
        try:
            delete()
        except Exception as error:  # noqa: BLE001 - whatever a broker's or a store's client raises
            yield (
                f"the workers are killed, but {what} that begin with {self._name} could not be "
                f"deleted: {_line(error)}"
            )

    def _answering(self) -> app_components.AppParts:
        """The stores of the app; raises unless they and the broker answer, and tables are there."""
        parts = app_components.parts_of(self.app, eager=False)
        parts.check_once()
        parts.leases.held([self._name])
        try:
            with self.app.connection_for_write() as connection:
                kind = connection.transport.driver_type
                if kind in _BROKERS:
                    connection.ensure_connection(
                        max_retries=1, interval_start=0, timeout=BROKER_TIMEOUT
                    )
        except Exception as error:  # noqa: BLE001 - whatever a broker's client raises
            raise DrillImpossible(f"the broker does not answer: {_line(error)}") from None
        if kind not in _BROKERS:
            raise DrillImpossible(
                f"the broker is {kind}; the drill works on Redis and RabbitMQ only"
            )
        return parts

    def _end_by_signals(self) -> None:
        """Let SIGTERM and SIGHUP end the drill as Ctrl-C does."""
        if threading.current_thread() is not threading.main_thread():
            return
        for sig in (signal.SIGTERM, signal.SIGHUP):
            before = signal.signal(sig, _interrupt)
            self._restored.append(partial(signal.signal, sig, before))

    def _start_workers(self) -> None:
        for number in range(1, WORKERS + 1):
            orders = Orders(
                self._app_name,
                str(self._directory),
                number,
                [self._name, self.queue_of(number)],
                self.bounds.ttl,
                CONCURRENCY,
            )
            self._workers[number] = DrillWorker(orders)
        if not self.saw(
            lambda notes: {n.worker for n in notes if n.what == "ready"} == {*self._workers},
            STARTED_WITHIN,
        ):
            raise DrillImpossible(f"the workers were not ready within {STARTED_WITHIN:g} s")

    # -- what steps do -----------------------------------------------------------------------------

    def queue_of(self, number: int) -> str:
        """The queue that only the worker with that number consumes."""
        return f"{self._name}.{number}"

    def key(self, step: StepName) -> str:
        """The key of a step."""
        return f"{self._name}:{step}"

    def publish(self, key: str, *, worker: int | None = None, call: str | None = None) -> str:
        """Publish a call of *key*, to *worker* or to both; returns its id."""
        call = call or str(uuid4())
        self._calls.append((key, call))
        queue = self._name if worker is None else self.queue_of(worker)
        self._task.apply_async((key,), queue=queue, task_id=call)
        return call

    def finish(self, key: str) -> None:
        """Let the bodies of *key* end."""
        finish_file(self._directory, key).touch()

    def worker(self, number: int) -> DrillWorker:
        """The worker with that number."""
        return self._workers[number]

    def other(self, number: int) -> int:
        """The number of the other worker."""
        return next(each for each in self._workers if each != number)

    def saw(self, look: Callable[[list[Note]], T | None], within: float) -> T | None:
        """What *look* finds in the notes, as soon as it finds something; ``None`` after *within*
        seconds.
        """
        until = time.monotonic() + within
        while True:
            if found := look(self.notes.all()):
                return found
            for worker in self._workers.values():
                if not worker.alive and worker.number not in self._killed():
                    raise DrillImpossible(
                        f"a worker of the drill has ended by itself: {worker.last_words()}"
                    )
            if time.monotonic() >= until:
                return None
            time.sleep(OFTEN)

    def awaited(self, what: str, look: Callable[[list[Note]], T | None]) -> T:
        """As :meth:`saw`, for what must happen before a step can go on."""
        found = self.saw(look, STARTED_WITHIN)
        if found is None:
            raise DrillImpossible(f"waited {STARTED_WITHIN:g} s for {what}")
        return found

    def takeover(
        self, step: StepName, who: Who, since: Note, look: Callable[[list[Note]], Note | None]
    ) -> Takeover:
        """How long after *since* the note came that *look* finds; waits twice as long as the SLO
        allows.
        """
        patience = 2 * self.bounds.slo + 1.0
        found = self.saw(look, max(0.0, since.at + patience - time.monotonic()))
        took = found.at - since.at if found is not None else None
        missed = took is None or took > self.bounds.slo
        return Takeover(
            who,
            took,
            patience,
            self.bounds.of(step, who),
            self.bounds.why_missed(step, who) if missed else None,
        )

    def did(self, what: str, key: str, worker: int) -> Note:
        """Note what the drill itself has done to a worker."""
        return self.notes.write(what, key, more=str(worker))

    def report(
        self, step: StepName, takeovers: list[Takeover], wrong: list[str] | None = None
    ) -> StepReport:
        """What *step* has found, with all that was seen of its key."""
        notes = [note for note in self.notes.all() if note.key == self.key(step)]
        begin = notes[0].at if notes else 0.0
        seen = [(round(note.at - begin, 3), self._said(note)) for note in notes]
        return StepReport(
            step, self.bounds.slo, self.bounds.ttl, takeovers, tuple(wrong or ()), tuple(seen)
        )

    def _killed(self) -> set[int]:
        return {int(note.more) for note in self.notes.all() if note.what == KILLED}

    def _said(self, note: Note) -> str:
        if not note.worker:
            return f"the drill {note.what} {note.more}"
        calls = list(dict.fromkeys(call for key, call in self._calls if key == note.key))
        call = f"call {calls.index(note.call) + 1}" if note.call in calls else "a call"
        more = f": {note.more}" if note.more else ""
        return f"worker {note.worker} {_SPOKEN[note.what].format(call=call)}{more}"


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ignore Ctrl-C, SIGTERM and SIGHUP for a moment."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        sig: signal.signal(sig, signal.SIG_IGN)
        for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for sig, handler in before.items():
            with suppress(TypeError):  # a handler that Python has not set
                signal.signal(sig, handler)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
