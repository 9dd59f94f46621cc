"""The stage of a demo: a private Redis, a directory, and real worker processes."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from celery import Celery

from example_project.demo import journal
from tests.support.process import GuardedProcess
from tests.support.servers.redis import RedisServer
from tests.support.workers import LocalWorker

ROOT = Path(__file__).parents[2]
TTL = 3.0
LONGEST_DELAY = TTL + 1.0
KEY_BOUND = TTL + LONGEST_DELAY
WORK_BOUND = TTL + TTL / 3 + LONGEST_DELAY


@dataclass(frozen=True)
class Request:
    """A web process published a call for a key; ``call_id`` is the Celery id."""

    web: str
    key: str
    call_id: str


class CommandFailed(Exception):
    """A command of the demo has ended with an error."""


class Stage:
    """Everything that a demo starts; a context manager that removes all processes and files."""

    modules: Sequence[str] = ("example_project.demo.receivers",)
    """Modules that workers import beside the application."""

    concurrency = 3
    worker_names: Sequence[str] = ("worker-a", "worker-b")

    def __init__(self, *, leases: bool = True) -> None:
        self._leases = leases
        self._stack = ExitStack()
        self._pids: set[int] = set()
        self.workers: dict[str, LocalWorker] = {}

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            undo.push(self._stack)
            with undisturbed():
                self.redis = self._stack.enter_context(RedisServer())
            # The server's directory is removed with the server, even if this process is killed.
            self.home = self.redis.home / "demo"
            self.home.mkdir()
            self._pids.add(self.redis.pid)
            self.journal = journal.Journal(self.home / "journal.jsonl")
            for name in [
                name for name in os.environ if name.startswith(("CELERY_", "LEASES_", "DEMO_"))
            ]:
                del os.environ[name]
            os.environ |= self._environment()
            os.environ |= self.furnish()
            self.app = Celery("demo", broker=self.database(0), backend=self.database(1))
            undo.pop_all()
        return self

    def furnish(self) -> dict[str, str]:
        """Start further servers of the demo, and return environment variables for the workers."""
        return {}

    def _environment(self) -> dict[str, str]:
        return {
            "CELERY_BROKER_URL": self.database(0),
            "CELERY_RESULT_BACKEND": self.database(1),
            "LEASES_URL": self.database(2),
            "LEASES_DATABASE_URL": f"sqlite:///{self.home / 'records.db'}",
            "LEASES_TTL": str(TTL),
            journal.FILE: str(self.home / "journal.jsonl"),
            journal.WITHOUT_LEASES: "" if self._leases else "1",
        }

    def database(self, number: int) -> str:
        """The URL of one of the databases of the private Redis."""
        return f"{self.redis.url.rpartition('/')[0]}/{number}"

    def environment_of(self, name: str) -> Mapping[str, str]:
        """Environment variables of one process, beside those of all processes."""
        return {}

    def start_workers(self) -> None:
        """Start all workers side by side and wait until all consume."""
        for name in self.worker_names:
            self.workers[name] = LocalWorker(
                "example_project",
                directory=self.home,
                concurrency=self.concurrency,
                name=name,
                env={journal.WORKER: name, **self.environment_of(name)},
                options=("--include", ",".join(self.modules)),
                cwd=ROOT,
            )
            self._stack.callback(self.workers[name].teardown)
            with undisturbed():
                self.workers[name].launch()
        for name in self.worker_names:
            self._pids |= {
                self.workers[name].wait_ready().pid,
                *self.workers[name].wait_for_children(),
            }

    def start(self, name: str, command: Sequence[str]) -> GuardedProcess:
        """Start a Python module, *command*; it ends with the stage at the latest."""
        with undisturbed():
            argv = [sys.executable, "-m", *command]
            env = {**os.environ, **self.environment_of(name)}
            process = GuardedProcess(argv, log=self.home / f"{name}.log", cwd=ROOT, env=env)
            self._stack.callback(process.end)
        self._pids.add(process.pid)
        return process

    def finish(self, name: str, process: GuardedProcess) -> str:
        """Wait until a process has ended, and return its output. Raises CommandFailed."""
        if process.wait(20) != 0:
            raise CommandFailed(f"{name} failed:\n{process.logs().rstrip()}")
        return process.logs()

    @property
    def requests(self) -> list[Request]:
        """The published calls, as far as the journal was read."""
        asked = [event for event in self.journal.events if event["what"] == "Asked"]
        return [
            Request(event["worker"], key, call) for event in asked for key, call in event["calls"]
        ]

    def results(self) -> dict[str, Any]:
        """The answers so far, by call id: a result, or the error as text."""
        found = {}
        for request in self.requests:
            answer = self.app.AsyncResult(request.call_id)
            if answer.ready():
                found[request.call_id] = (
                    answer.result if answer.successful() else repr(answer.result)
                )
        return found

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not cut this short
        self._pids |= {
            pid for worker in self.workers.values() if worker.alive for pid in worker.children()
        }
        self._stack.close()

    def left_behind(self) -> list[str]:
        """The processes and directories that still exist after the end."""
        deadline = time.monotonic() + 5
        while (alive := [pid for pid in self._pids if _alive(pid)]) and time.monotonic() < deadline:
            time.sleep(0.05)
        return [f"process {pid}" for pid in alive] + [
            str(self.home.parent)
        ] * self.home.parent.exists()


@contextmanager
def undisturbed() -> Iterator[None]:
    """Defer Ctrl-C and other ends until a process has started, so that it can be ended properly."""
    held: list[int] = []
    ends = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {
        signum: signal.signal(signum, lambda signum, _: held.append(signum)) for signum in ends
    }
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
    if held:
        signal.raise_signal(held[0])


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
