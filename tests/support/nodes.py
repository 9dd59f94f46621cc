"""Nodes for pytest-celery that are local processes instead of Docker containers.

pytest-celery asks its nodes for ``name, id, status, logs(), ready(), celeryconfig, kill(),
reload(), restart(), teardown(), exec_run()`` and takes any object that has them.
"""

import shlex
import signal
import subprocess
import sys
from typing import Any
from urllib.parse import urlsplit

import celery

from tests.support.servers import LocalServer
from tests.support.workers import LocalWorker

__all__ = ["LocalWorker", "ServerNode", "WorkerNode"]


def _number(sig: str | int) -> int:
    return getattr(signal, sig) if isinstance(sig, str) else sig


def _exec(command: str | list[str]) -> tuple[int, bytes]:
    argv = shlex.split(command) if isinstance(command, str) else command
    if argv and argv[0] in {"python", "python3"}:
        argv = [sys.executable, *argv[1:]]
    done = subprocess.run(
        argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60, check=False
    )
    return done.returncode, done.stdout


class ServerNode:
    """A started private server in the role of the container of a ``CeleryTestBroker`` or
    ``CeleryTestBackend``.

    Tests may share the server, so ``teardown`` does not stop it. ``restart`` also starts a killed
    server.
    """

    def __init__(self, server: LocalServer) -> None:
        self.server = server

    @property
    def name(self) -> str:
        """The server's kind and port."""
        return f"{self.server.name.lower()}-{self.server.port}"

    @property
    def id(self) -> str:
        """Its process id with the length of a container id."""
        return f"{self.server.pid:012d}"

    @property
    def status(self) -> str:
        """``running`` or ``exited``."""
        return "running" if self.server.alive else "exited"

    @property
    def celeryconfig(self) -> dict[str, Any]:
        """The addresses for the app in the worker (``url``) and in the test (``host_url``),
        which are the same here.
        """
        url = self.server.url
        parts = urlsplit(url)
        return {
            "url": url,
            "host_url": url,
            "hostname": parts.hostname,
            "port": parts.port,
            "vhost": parts.path.removeprefix("/"),
        }

    def ready(self) -> bool:
        """Whether the server is alive. It was ready when it was started."""
        return self.server.alive

    def logs(self) -> str:
        """Its log since the last start."""
        return self.server.logs()

    def kill(self, signal: str | int = "SIGKILL") -> None:
        """Send a signal to the server. SIGKILL kills all its processes."""
        if _number(signal) == _number("SIGKILL"):
            self.server.kill()
        else:
            self.server.process.send(_number(signal))

    def reload(self) -> None:
        """Do nothing: nothing is cached."""

    def restart(self, timeout: float = 60.0) -> None:
        """Stop and start the server on the same port; ``timeout`` in seconds."""
        self.server.restart(timeout=timeout)

    def teardown(self) -> None:
        """Do nothing: the fixture that started the server stops it."""

    def exec_run(self, cmd: str | list[str]) -> tuple[int, bytes]:
        """Run a command on this machine; returns exit code and output."""
        return _exec(cmd)


class WorkerNode:
    """A local worker in the role of the container of a ``CeleryTestWorker``."""

    def __init__(self, worker: LocalWorker) -> None:
        self.worker = worker

    @property
    def name(self) -> str:
        """The worker's node name."""
        return self.worker.name

    @property
    def id(self) -> str:
        """The process id of its main process with the length of a container id."""
        return f"{self.worker.pid:012d}"

    @property
    def status(self) -> str:
        """``running`` or ``exited``."""
        return "running" if self.worker.alive else "exited"

    @property
    def celeryconfig(self) -> dict[str, Any]:
        """A worker has no address of its own."""
        return {}

    def ready(self) -> bool:
        """Wait until the worker consumes."""
        self.worker.wait_ready()
        return True

    def logs(self) -> str:
        """Its log since the last start."""
        return self.worker.logs()

    def kill(self, signal: str | int = "SIGKILL") -> None:
        """Send a signal to the main process and wait for its end, as Docker does for SIGKILL."""
        self.worker.kill(_number(signal))
        if _number(signal) == _number("SIGKILL"):
            self.worker.wait()

    def reload(self) -> None:
        """Do nothing: nothing is cached."""

    def restart(self, timeout: float = 60.0) -> None:
        """Stop with a warm shutdown and start again; ``timeout`` in seconds."""
        self.worker.restart(timeout=timeout)

    def teardown(self) -> None:
        """End the worker and its children."""
        self.worker.teardown()

    def exec_run(self, cmd: str | list[str]) -> tuple[int, bytes]:
        """Run a command on this machine, with this Python; returns exit code and output."""
        return _exec(cmd)

    def version(self) -> str:
        """Celery's version."""
        return str(celery.__version__)

    def log_level(self) -> str:
        """The worker's log level."""
        return self.worker.log_level

    def worker_name(self) -> str:
        """The part of the node name before the ``@``."""
        return self.worker.name

    def worker_queue(self) -> str:
        """The queue it consumes."""
        return self.worker.queue
