"""Starts Celery workers from a process that has already imported Celery and this package.

A worker needs a second of CPU time for its imports, and the tests start hundreds of workers. So
each test process has one preloaded process, which forks a guard (see ``guard.py``). The guard forks
the worker, which sets its environment and import path, and runs ``celery`` as ``python -m celery``
does. The worker itself only imports the app.

With ``CELERY_LEASES_TEST_EXEC=1`` each worker is started by ``exec``, as users start theirs. ``make
test-all`` does so.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Final

from tests.support import guard

EXEC_VARIABLE: Final = "CELERY_LEASES_TEST_EXEC"
"""If this variable is set, workers are not forked from a preloaded process."""

POOLS: Final = ("prefork", "solo", "threads")
"""The pools whose workers may be forked. The others patch modules before these are imported."""

_READ_AT_IMPORT: Final = ("PYTHON", "LD_", "PSYCOPG", "KOMBU", "C_FORCE_ROOT")
"""The prefixes of variables that are read at the import, before a fork could set them."""

_SET_BY_FORK: Final = ("PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE")

_MODULES: Final = (
    *("celery.bin.celery", "celery.bin.worker", "celery.apps.worker"),
    *("celery.worker.consumer", "celery.worker.strategy", "celery.app.trace", "celery.app.amqp"),
    *("celery.concurrency.prefork", "celery.concurrency.solo", "celery.concurrency.thread"),
    *("celery.worker.autoscale", "celery.events.state", "celery.worker.pidbox"),
    *("celery.backends.redis", "celery.backends.rpc", "celery.backends.database"),
    *("kombu.transport.redis", "kombu.transport.pyamqp", "kombu.asynchronous.hub", "redis"),
    *("sqlalchemy.dialects.postgresql.psycopg", "sqlalchemy.dialects.mysql.pymysql"),
    *("sqlalchemy.dialects.sqlite", "sqlalchemy.orm", "psycopg", "pymysql"),
    *("celery_leases.client", "celery_leases.worker.request", "celery_leases.worker.delivery"),
    *("celery_leases.worker.child_exit", "celery_leases.worker.outbox"),
    *("celery_leases.worker.checks.startup", "celery_leases.components"),
    *("celery_leases.attempt.run", "celery_leases.builtin_tasks", "celery_leases.cli"),
    *("celery_leases.stores.sql.records", "celery_leases.stores.redis.leases"),
)


class Preloaded:
    """The preloaded process of this test process, which the first worker starts."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._environment: dict[str, str] = {}
        self._owner = 0

    def can_run(self, argv: Sequence[str], env: Mapping[str, str]) -> bool:
        """Whether a fork has the same effect as executing *argv* with *env*."""
        if EXEC_VARIABLE in os.environ or list(argv[:3]) != [sys.executable, "-m", "celery"]:
            return False
        if not hasattr(socket, "send_fds") or "-P" not in argv:
            return False
        if argv[argv.index("-P") + 1] not in POOLS:
            return False
        mine = {**os.environ, "C_FORCE_ROOT": "1"}
        return all(
            mine.get(name) == env.get(name)
            for name in {*mine, *env}
            if name.startswith(_READ_AT_IMPORT) and name not in _SET_BY_FORK
        )

    def start(self, task: Mapping[str, Any], env: Mapping[str, str]) -> ForkedGuard:
        """Fork a guard for *task*, a task of ``guard.py``, whose command also runs in a fork."""
        if self._socket is None or self._owner != os.getpid():
            self._begin()
        assert self._socket is not None
        to_guard, from_owner = os.pipe()[::-1]
        from_guard, to_owner = os.pipe()
        socket.send_fds(
            self._socket,
            [b"%d\n" % len(body := json.dumps([task, dict(env)]).encode())],
            [from_owner, to_owner],
        )
        self._socket.sendall(body)
        os.close(from_owner)
        os.close(to_owner)
        return ForkedGuard(open(to_guard, "wb"), open(from_guard, "rb", buffering=0))  # noqa: PTH123

    def _begin(self) -> None:
        ours, its = socket.socketpair()
        with its:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(its.fileno())],
                pass_fds=[its.fileno()],
                env={**os.environ, "C_FORCE_ROOT": "1"},
                cwd=Path(__file__).parents[2],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._socket, self._owner = ours, os.getpid()
        atexit.register(self.end)

    def end(self) -> None:
        """End the preloaded process and all its guards."""
        if self._socket is not None and self._owner == os.getpid():
            self._socket.close()
            self._socket = None
            assert self._process is not None
            self._process.wait()


class ForkedGuard:
    """The part of ``subprocess.Popen`` that a guarded process uses."""

    def __init__(self, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        self.stdin = stdin
        self.stdout = stdout

    def wait(self) -> int:
        """Return at once: the guard has reported its end, and the preloaded process reaps it."""
        return 0


preloaded: Final = Preloaded()


# -- in the preloaded process ----------------------------------------------------------------------


def _serve(connection: socket.socket) -> None:
    """Fork a guard for each request, until the test process closes the connection or dies."""
    for name in _MODULES:
        with contextlib.suppress(ImportError):
            import_module(name)
    gc.collect()
    gc.freeze()
    while True:
        head, fds, _, _ = socket.recv_fds(connection, 64, 2)
        _collect()
        if not head:
            break
        size, _, body = head.partition(b"\n")
        while len(body) < int(size):
            body += connection.recv(int(size) - len(body))
        if os.fork() == 0:
            connection.close()
            _be_guard(*json.loads(body), *fds)
        for fd in fds:
            os.close(fd)
    with contextlib.suppress(ChildProcessError):  # the guards end when their owner ends
        while True:
            os.waitpid(-1, 0)


def _collect() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _be_guard(task: dict[str, Any], env: dict[str, str], stdin: int, stdout: int) -> None:
    code = 1
    try:
        os.setsid()
        os.dup2(stdin, 0)
        os.dup2(stdout, 1)
        os.close(stdin)
        os.close(stdout)
        guard.guard({**task, "parent": os.getppid()}, lambda task: _fork_worker(task, env))
        code = 0
    finally:
        os._exit(code)


def _fork_worker(task: dict[str, Any], env: dict[str, str]) -> int:
    """Fork the command of *task*; returns its process id."""
    ready, running = os.pipe()
    pid = os.fork()
    if pid:
        os.close(running)
        os.read(ready, 1)  # like Popen, return once the command has its session and its log
        os.close(ready)
        return pid
    code = 1
    try:
        _become(task, env)
        os.close(running)
        runpy.run_module("celery", run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else bool(ended.code)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 - as the interpreter does for an uncaught exception
        sys.excepthook(*sys.exc_info())
    finally:
        _exit(code)
    raise AssertionError  # never reached


def _become(task: dict[str, Any], env: dict[str, str]) -> None:
    """Do what ``exec`` would do to this process."""
    os.setsid()
    guard.die_with_guard()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log = os.open(task["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for fd, target in ((os.open(os.devnull, os.O_RDONLY), 0), (log, 1), (log, 2)):
        os.dup2(fd, target)
    os.environ.clear()
    os.environ.update(env)
    time.tzset()
    os.chdir(task["cwd"] or ".")
    sys.path[:] = [
        os.getcwd(),  # noqa: PTH109 - as the interpreter does
        *filter(None, env.get("PYTHONPATH", "").split(os.pathsep)),
        *sys.path[1:],
    ]
    sys.argv = ["celery", *task["argv"][3:]]
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115


def _exit(code: int) -> None:
    """Do what the interpreter does at its exit."""
    with contextlib.suppress(BaseException):
        import threading

        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()  # type: ignore[attr-defined]
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as given:
        given.set_inheritable(False)
        _serve(given)
