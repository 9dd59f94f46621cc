"""What the private servers have in common: a port, a home directory, and a guarded process."""

import abc
import contextlib
import os
import shutil
import signal
import socket
import tempfile
from pathlib import Path
from typing import ClassVar, Literal, Self

from tests.support.process import GuardedProcess, NotReady

RestartMode = Literal["smart", "fast", "immediate"]
"""PostgreSQL's shutdown modes: ``smart`` waits for clients, ``fast`` disconnects them,
``immediate`` is a crash.
"""

_TRIES = 5
_ROOM = 6 * 2**30


class ServerMissing(RuntimeError):
    """The program of a server is not installed. The message says what to install."""


def directory_in_memory() -> Path | None:
    """A directory of Linux whose files are in memory, if it has room for the servers of a test run;
    else ``None``.
    """
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK) or shutil.disk_usage(shared).free < _ROOM:
        return None
    return shared


def free_port() -> int:
    """A TCP port of 127.0.0.1 that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class LocalServer(abc.ABC):
    """A private server; a context manager. Its port and data stay the same until ``stop()``.

    The server ends at ``stop()``, and when this Python process ends in any way; its files are
    removed. Times are seconds. ``start`` raises ServerMissing if the program is not installed, and
    NotReady if the server does not start.
    """

    name: ClassVar[str]
    """The name of the product, for messages."""
    stop_signals: ClassVar[dict[str, int]] = {"smart": signal.SIGTERM, "fast": signal.SIGTERM}
    start_timeout: ClassVar[float] = 30.0
    homes: ClassVar[Path | None] = None
    """Where the home directories are made, if not in the default directory for temporary files."""

    def __init__(self) -> None:
        self._process: GuardedProcess | None = None
        self._home: Path | None = None
        self._port = 0

    @abc.abstractmethod
    def _launch(self, home: Path, port: int) -> GuardedProcess:
        """Start the process; raise ServerMissing if its program is not installed."""

    @abc.abstractmethod
    def _await_ready(self, process: GuardedProcess) -> None:
        """Wait until the server accepts clients; raise NotReady."""

    @property
    @abc.abstractmethod
    def url(self) -> str:
        """The URL for clients."""

    @property
    def port(self) -> int:
        """The TCP port on 127.0.0.1; 0 before the first start."""
        return self._port

    @property
    def home(self) -> Path:
        """The directory of data and log. Raises RuntimeError if the server was never started."""
        if self._home is None:
            raise RuntimeError(
                f"{self.name} is not started: call start() or use it as a context manager"
            )
        return self._home

    @property
    def process(self) -> GuardedProcess:
        """The process. Raises RuntimeError if the server was never started."""
        if self._process is None:
            raise RuntimeError(
                f"{self.name} is not running: call start() or use it as a context manager"
            )
        return self._process

    @property
    def pid(self) -> int:
        """Process id of the server's first process."""
        return self.process.pid

    @property
    def alive(self) -> bool:
        """Whether the server's process exists, paused or not."""
        return self._process is not None and self._process.alive

    def start(self) -> Self:
        """Start, on the same port with the same data as before, and wait until the server accepts
        clients.
        """
        if self.alive:
            return self
        chosen = self._port
        for attempt in range(_TRIES):
            port = chosen or free_port()
            home = self._home or Path(
                tempfile.mkdtemp(prefix=f"celery-leases-{self.name.lower()}-", dir=self.homes)
            )
            self._home = home
            try:
                self._process = self._launch(home, port)
                self._await_ready(self._process)
            except BaseException as error:
                self._end_process()
                if not chosen:
                    self._remove_home()
                # Another process may have bound the port since free_port().
                if (
                    not chosen
                    and isinstance(error, NotReady)
                    and self._port_taken(error)
                    and attempt < _TRIES - 1
                ):
                    continue
                raise
            self._port = port
            return self
        raise AssertionError("unreachable: the last try returns or raises")

    @staticmethod
    def _port_taken(error: NotReady) -> bool:
        return any(sign in str(error) for sign in ("in use", "eaddrinuse", "already running on"))

    def stop(self, timeout: float = 10.0) -> None:
        """Shut down, with SIGKILL after ``timeout``, and remove the data; may be called twice."""
        try:
            self._shut_down("fast", timeout)
        finally:
            self._remove_home()
            self._port = 0

    def kill(self) -> None:
        """SIGKILL all processes of the server. ``start()`` uses the same port and data again."""
        self._end_process()

    def pause(self) -> None:
        """SIGSTOP all processes of the server. Connections stay open and get no answer."""
        self.process.pause()

    def resume(self) -> None:
        """SIGCONT all processes of the server."""
        self.process.resume()

    def restart(self, mode: RestartMode = "fast", timeout: float = 30.0) -> Self:
        """Stop in this mode, and start again on the same port with the same data."""
        self._shut_down(mode, timeout)
        return self.start()

    def logs(self) -> str:
        """What the server has written since its last start."""
        return self._process.logs() if self._process else ""

    def _shut_down(self, mode: RestartMode, timeout: float) -> None:
        process = self._process
        if process is not None and (number := self.stop_signals.get(mode)) is not None:
            process.resume()
            process.send(number)
            with contextlib.suppress(TimeoutError):
                process.wait(timeout)
        self._end_process()

    def _end_process(self) -> None:
        if self._process is not None:
            self._process.end()

    def _remove_home(self) -> None:
        if self._home is not None:
            shutil.rmtree(self._home, ignore_errors=True)
            self._home = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.url if self._port else 'stopped'} seen from {os.getpid()}>"
