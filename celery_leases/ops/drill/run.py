"""One drill: it starts workers and queues, and deletes everything at the end."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
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

from celery_leases.attempt.process import Process
from celery_leases.errors import LeasesError
from celery_leases.ops.drill import cleanup
from celery_leases.ops.drill.report import Bounds, StepName, StepReport, Takeover, Taker
from celery_leases.ops.drill.worker import (
    VARIABLE,
    Note,
    Notes,
    WorkerConfig,
    finish_file,
    register,
    unused_body,
)
from celery_leases.worker import processes
from celery_leases.worker.processes import METRICS_DIRECTORY

T = TypeVar("T")
WORKERS: Final = 2
CONCURRENCY: Final = 2
START_TIMEOUT: Final = 60.0
"""Seconds to wait for events that have no SLO, such as the start of a worker."""
BROKER_TIMEOUT: Final = 5.0
POLL_INTERVAL: Final = 0.02
KILLED: Final = "killed worker"
"""The note that a whole worker was killed."""
_BROKERS: Final = ("redis", "amqp")
_EVENT_TEXTS: Final = {
    "began": "started the task of {call}",
    "lost": "stopped the task of {call}: its lease is lost",
    "returned": "finished the task of {call}",
    "call_rescheduled": "rescheduled {call}",
    "call_dropped": "dropped a message of {call}",
    "result_replayed": "answered {call} with its saved result",
    "lease_lost": "found the lease of {call} lost",
    "outcome_refused": "reported an outcome of {call}, which was refused",
    "attempt_settled": "wrote the outcome of {call}",
    "crash_seen": "saw that the process of {call} died",
    "attempt_abandoned": "took over {call}, whose lease had ended",
}
"""What a worker has done, by the kind of the note."""


class DrillWorker:
    """One worker with its pool, in its own process group."""

    def __init__(self, config: WorkerConfig) -> None:
        self.config = config
        self.number = config.number
        self._log = Path(config.directory) / f"worker-{config.number}.log"
        others = {name: each for name, each in os.environ.items() if name != METRICS_DIRECTORY}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "celery_leases.ops.drill.worker"],
                env={**others, VARIABLE: config.as_text(), "TMPDIR": config.directory},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def alive(self) -> bool:
        """Whether its main process exists, paused or not."""
        return self._process.poll() is None

    def last_log_line(self) -> str:
        """The last line of its log."""
        lines = self._log.read_text(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "its log is empty")

    def kill_child(self, pid: int) -> None:
        """Kill the process *pid*, which must belong to its pool."""
        if not self.alive or os.getpgid(pid) != self._process.pid:
            raise ProcessLookupError(f"{pid} is not a process of this worker")
        os.kill(pid, signal.SIGKILL)

    def pause(self) -> None:
        """Stop all its processes, until :meth:`resume`."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue all its processes."""
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill all its processes and wait for the main one, which may already be dead."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()

    def _signal(self, sig: signal.Signals) -> None:
        if self._process.returncode is None:  # not reaped, so its pid is not reused
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, sig)


class DrillImpossible(LeasesError):
    """The drill could not start or continue; the message says why."""


class Drill:
    """Two workers of *app* with their own queues; a context manager.

    *app_name* is the value of ``celery -A``. At the end, unless the process is killed by SIGKILL,
    the workers are killed, and their queues, records and leases are deleted.
    """

    def __init__(self, app: Celery, app_name: str, bounds: Bounds) -> None:
        self.app, self.bounds = app, bounds
        self._app_name = app_name
        self._name = f"celery_leases.ops.drill.{uuid4().hex[:12]}"
        self._queues = [self._name, *(self.queue_of(number) for number in range(1, WORKERS + 1))]
        self._calls: list[tuple[str, str]] = []
        self._workers: dict[int, DrillWorker] = {}
        self._restore: list[Callable[[], object]] = []

    # -- beginning and end -------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self.process = self._check_servers()
        self._task = register(self.app, self.bounds.ttl, unused_body)
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
                *self._delete("queues", lambda: cleanup.delete_queues(self.app, self._queues)),
                *self._delete("keys", lambda: cleanup.delete_keys(self.process, self._calls)),
            ]
        for restore in self._restore:
            restore()
        if left:
            raise DrillImpossible("; ".join(left)) from None

    def _delete(self, what: str, delete: Callable[[], None]) -> Iterator[str]:
        try:
            delete()
        except Exception as error:  # noqa: BLE001 - whatever a broker's or a store's client raises
            yield (
                f"the workers are killed, but {what} that start with {self._name} could not be "
                f"deleted: {_line(error)}"
            )

    def _check_servers(self) -> Process:
        """The stores of the app; raises if the broker or a store cannot be used."""
        process = processes.process_of(self.app, eager=False)
        process.check_once()
        process.leases.held([self._name])
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
            raise DrillImpossible(f"the broker is {kind}; the drill needs Redis or RabbitMQ")
        return process

    def _end_by_signals(self) -> None:
        """Make SIGTERM and SIGHUP end the drill as Ctrl-C does."""
        if threading.current_thread() is not threading.main_thread():
            return
        for sig in (signal.SIGTERM, signal.SIGHUP):
            before = signal.signal(sig, _interrupt)
            self._restore.append(partial(signal.signal, sig, before))

    def _start_workers(self) -> None:
        for number in range(1, WORKERS + 1):
            config = WorkerConfig(
                self._app_name,
                str(self._directory),
                number,
                [self._name, self.queue_of(number)],
                self.bounds.ttl,
                CONCURRENCY,
            )
            self._workers[number] = DrillWorker(config)
        if not self.wait_for(
            lambda notes: {n.worker for n in notes if n.what == "ready"} == {*self._workers},
            START_TIMEOUT,
        ):
            raise DrillImpossible(f"the workers were not ready within {START_TIMEOUT:g} s")

    # -- what steps do -----------------------------------------------------------------------------

    def queue_of(self, number: int) -> str:
        """The queue that only the worker with this number consumes."""
        return f"{self._name}.{number}"

    def key(self, step: StepName) -> str:
        """The key that a step uses."""
        return f"{self._name}:{step}"

    def publish(self, key: str, *, worker: int | None = None, call: str | None = None) -> str:
        """Publish a call of *key*, to *worker* or to both; returns its id."""
        call = call or str(uuid4())
        self._calls.append((key, call))
        queue = self._name if worker is None else self.queue_of(worker)
        self._task.apply_async((key,), queue=queue, task_id=call)
        return call

    def finish(self, key: str) -> None:
        """Let the running calls of *key* end."""
        finish_file(self._directory, key).touch()

    def worker(self, number: int) -> DrillWorker:
        """The worker with this number."""
        return self._workers[number]

    def other(self, number: int) -> int:
        """The number of the other worker."""
        return next(each for each in self._workers if each != number)

    def wait_for(self, find: Callable[[list[Note]], T | None], within: float) -> T | None:
        """Wait until *find* returns something for the notes, and return it; ``None`` after
        *within* seconds.
        """
        until = time.monotonic() + within
        while True:
            if found := find(self.notes.all()):
                return found
            for worker in self._workers.values():
                if not worker.alive and worker.number not in self._killed():
                    raise DrillImpossible(
                        f"a worker of the drill has ended unexpectedly: {worker.last_log_line()}"
                    )
            if time.monotonic() >= until:
                return None
            time.sleep(POLL_INTERVAL)

    def require(self, what: str, find: Callable[[list[Note]], T | None]) -> T:
        """As :meth:`wait_for`, for an event without which a step cannot continue."""
        found = self.wait_for(find, START_TIMEOUT)
        if found is None:
            raise DrillImpossible(f"waited {START_TIMEOUT:g} s for {what}")
        return found

    def takeover(
        self, step: StepName, who: Taker, since: Note, find: Callable[[list[Note]], Note | None]
    ) -> Takeover:
        """How long after *since* the note was written that *find* finds.

        Waits for twice the time that the SLO allows.
        """
        timeout = 2 * self.bounds.slo + 1.0
        found = self.wait_for(find, max(0.0, since.at + timeout - time.monotonic()))
        took = found.at - since.at if found is not None else None
        missed = took is None or took > self.bounds.slo
        return Takeover(
            who,
            took,
            timeout,
            self.bounds.of(step, who),
            self.bounds.why_missed(step, who) if missed else None,
        )

    def note_action(self, what: str, key: str, worker: int) -> Note:
        """Write a note about what the drill itself has done to a worker."""
        return self.notes.write(what, key, more=str(worker))

    def report(
        self, step: StepName, takeovers: list[Takeover], wrong: list[str] | None = None
    ) -> StepReport:
        """The result of *step*, with all events of its key."""
        notes = [note for note in self.notes.all() if note.key == self.key(step)]
        begin = notes[0].at if notes else 0.0
        seen = [(round(note.at - begin, 3), self._described(note)) for note in notes]
        return StepReport(
            step, self.bounds.slo, self.bounds.ttl, takeovers, tuple(wrong or ()), tuple(seen)
        )

    def _killed(self) -> set[int]:
        return {int(note.more) for note in self.notes.all() if note.what == KILLED}

    def _described(self, note: Note) -> str:
        if not note.worker:
            return f"the drill {note.what} {note.more}"
        calls = list(dict.fromkeys(call for key, call in self._calls if key == note.key))
        call = f"call {calls.index(note.call) + 1}" if note.call in calls else "a call"
        more = f": {note.more}" if note.more else ""
        return f"worker {note.worker} {_EVENT_TEXTS[note.what].format(call=call)}{more}"


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ignore Ctrl-C, SIGTERM and SIGHUP in the ``with`` block."""
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
            with suppress(TypeError):  # a handler that was not set from Python
                signal.signal(sig, handler)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
