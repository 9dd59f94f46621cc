"""The tasks, workers and journal of a case, in the environment of one package."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

BRIEF = 4.0
"""How long to wait for something that should not happen, in seconds."""
PATIENCE = 30.0
"""How long to wait for something that should happen, in seconds."""


class Worker:
    """A real prefork worker in its own session, with its log."""

    def __init__(self, directory: Path, number: int, concurrency: int, beat: bool) -> None:
        self.log = directory / f"worker-{number}.log"
        options = ["--without-gossip", "--without-mingle", "--without-heartbeat"]
        if beat:
            options += ["--beat", "--schedule", str(directory / "schedule")]
        argv = [
            sys.executable,
            "-m",
            "celery",
            "-A",
            "benchmarks.peers.app",
            "worker",
            "-l",
            "INFO",
        ]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [*argv, "-c", str(concurrency), "-n", f"worker-{number}@%h", *options],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        if not until(lambda: "ready." in self.logs(), PATIENCE):
            raise RuntimeError(f"the worker did not come up:\n{self.logs()}")

    def logs(self) -> str:
        """Everything it has written."""
        return self.log.read_text(errors="replace")

    def kill(self) -> None:
        """SIGKILL the main process and its children at once, as when the machine dies."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def until(seen: Callable[[], object], patience: float) -> bool:
    """Whether *seen* became true within *patience* seconds."""
    deadline = time.monotonic() + patience
    while not seen():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


class Stage:
    """The caller of one package, and its workers; there is one for each process."""

    def __init__(self) -> None:
        from benchmarks.peers import app

        self.tasks: Any = app
        self.app = app.app
        self.directory = app.DIRECTORY
        self.gate = str(self.directory / "gate")
        self._workers: list[Worker] = []

    def another(self, concurrency: int = 4, *, beat: bool = False) -> Worker:
        """Start a worker, with a *beat* or without, and wait until it consumes."""
        self._workers.append(Worker(self.directory, len(self._workers) + 1, concurrency, beat))
        return self._workers[-1]

    def logs(self) -> str:
        """What all workers have written."""
        return "".join(worker.logs() for worker in self._workers)

    # -- calling -----------------------------------------------------------------------------------

    def call(self, task: Any, *args: Any, **options: Any) -> tuple[Any, str]:
        """The result of a call, or the name of the error that its caller got, or "None"."""
        try:
            result = task.apply_async(args, **options)
        except Exception as error:  # noqa: BLE001 - whatever the package raises is what we want to know
            return None, type(error).__name__
        return result, "" if result is not None else "None"

    def begin(self, name: object = "a", task: str = "work") -> Any:
        """The result of the first call, once its body runs and waits at the gate."""
        result = getattr(self.tasks, task).delay(name, self.gate)
        if not self.seen(1, name):
            raise RuntimeError(f"the first call did not begin:\n{self.logs()}")
        return result

    def open(self, turn: int | None = None) -> None:
        """Let the body of this turn continue, or all bodies."""
        Path(self.gate if turn is None else f"{self.gate}.{turn}").touch()

    def forward(self, side: str, copies: int) -> None:
        """Deliver the message that waits in *side* *copies* times, as a broker does after a lost
        acknowledgement.
        """
        with self.app.connection_for_write() as connection:
            channel = connection.default_channel
            producer = connection.Producer()
            message = channel.basic_get(side)
            names = ("correlation_id", "reply_to", "priority", "delivery_mode")
            properties = {
                name: message.properties[name] for name in names if name in message.properties
            }
            kind = {
                "content_type": message.content_type,
                "content_encoding": message.content_encoding,
            }
            for _ in range(copies):
                producer.publish(
                    message.body,
                    routing_key="celery",
                    headers=message.headers,
                    **kind,
                    **properties,
                )
            channel.basic_ack(message.delivery_tag)

    def locks_away(self) -> None:
        """Kill the Redis with the locks; the parent process does that."""
        (self.directory / "locks-away").touch()
        until(lambda: not self._locks_answer(), PATIENCE)

    def locks_back(self) -> None:
        """Start it again."""
        (self.directory / "locks-away").unlink()
        until(self._locks_answer, PATIENCE)

    @staticmethod
    def _locks_answer() -> bool:
        address = urlsplit(os.environ["PEERS_LOCKS"])
        try:
            with socket.create_connection((address.hostname, address.port), 1):
                return True
        except OSError:
            return False

    # -- observing ---------------------------------------------------------------------------------

    def begun(self, name: object = "a") -> list[dict[str, Any]]:
        """The bodies that have begun, the oldest first."""
        return [
            event
            for event in self.tasks.events()
            if event["what"] == "begin" and event["name"] == name
        ]

    def seen(self, runs: int, name: object = "a", patience: float = PATIENCE) -> bool:
        """Whether *runs* bodies begin in time."""
        return until(lambda: len(self.begun(name)) >= runs, patience)

    def settled(self, patience: float = 2 * PATIENCE) -> list[dict[str, Any]]:
        """The bodies of all names that have begun, once no other begins for a while."""
        start = time.monotonic()
        while True:
            found = [event for event in self.tasks.events() if event["what"] == "begin"]
            last = max([start, *(event["t"] for event in found)])
            if time.monotonic() > min(last + BRIEF, start + patience):
                return found
            time.sleep(0.1)

    def ended(self, name: object = "a") -> int:
        """How many bodies have reached their end."""
        return sum(
            event["what"] == "end" and event["name"] == name for event in self.tasks.events()
        )

    def gathered(self, patience: float = PATIENCE) -> bool:
        """Whether the end of a chain or chord is reached in time."""
        return until(
            lambda: any(event["what"] == "gather" for event in self.tasks.events()), patience
        )

    def value(self, result: Any, patience: float = PATIENCE) -> Any:
        """What the call returned, or None when it did not succeed in time."""
        until(result.ready, patience)
        return result.result if result.state == "SUCCESS" else None

    def serves_next(self, task: Any, *args: Any, patience: float = PATIENCE) -> bool:
        """Whether another call succeeds with a result, either by a run or from a saved result."""
        result, _ = self.call(task, *args)
        return result is not None and self.value(result, patience) is not None
