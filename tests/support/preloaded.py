"""Starts Celery workers and commands from a process that has already imported Celery and this
package.

A worker needs a second of CPU time for its imports, and the tests start hundreds of workers. So
each test process has one preloaded process, which forks a guard (see ``guard.py``). The guard forks
the worker, which sets its environment and import path, and runs ``celery`` as ``python -m celery``
does. The worker itself only imports the app. The commands of ``commands.py`` run in the same way.

With ``CELERY_LEASES_TEST_EXEC=1`` each of them is started by ``exec``, as users start theirs.
``make test-all`` does so.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
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
from importlib import import_module, metadata
from pathlib import Path
from typing import IO, Any, Final

from tests.support import guard

EXEC_VARIABLE: Final = "CELERY_LEASES_TEST_EXEC"
"""If this variable is set, workers and commands are not forked from a preloaded process."""

POOLS: Final = ("prefork", "solo", "threads")
"""The pools whose workers may be forked. The others patch modules before these are imported."""

_READ_AT_IMPORT: Final = ("PYTHON", "LD_", "PSYCOPG", "KOMBU")
"""The prefixes of variables that are read at the import, before a fork could set them.

Celery reads C_FORCE_ROOT then too, which is set for workers and has no effect on other commands.
"""

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
    *("celery_leases.worker.child_exit", "celery_leases.outbox.calls"),
    *("celery_leases.worker.checks.startup", "celery_leases.attempt.process"),
    *("celery_leases.attempt.run", "celery_leases.builtin_tasks", "celery_leases.cli"),
    *("celery_leases.stores.sql.records", "celery_leases.stores.redis.leases"),
    *("celery_leases.stores.sql.leases", "celery_leases.stores.sql.effects"),
    *("celery_leases.stores.sql.outbox", "celery_leases.stores.database_write_check"),
    *("celery.app.control", "celery.app.events", "celery.app.log", "celery.fixups.django"),
    *("celery.worker.consumer.delayed_delivery", "billiard.heap", "billiard.sharedctypes"),
    *("billiard.synchronize", "billiard.popen_fork", "encodings.idna", "sqlite3"),
    # With these, each child of a prefork pool parses the declaration of one C function.
    *("pycparser.c_parser", "cffi.cparser"),
)


class Preloaded:
    """The preloaded process of this test process, which the first worker or command starts."""

    def __init__(self) -> None:
        self._sockets: dict[tuple[str, ...], socket.socket] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def can_run(self, argv: Sequence[str], env: Mapping[str, str]) -> bool:
        """Whether a fork has the same effect as executing *argv*, a worker, with *env*."""
        if list(argv[:3]) != [sys.executable, "-m", "celery"] or "-P" not in argv:
            return False
        return (
            argv[argv.index("-P") + 1] in POOLS
            and env.get("C_FORCE_ROOT") == "1"
            and self.can_run_command(argv, env)
        )

    def can_run_command(self, argv: Sequence[str], env: Mapping[str, str]) -> bool:
        """Whether a fork has the same effect as executing *argv*, a module or a script of Python
        that is no worker, with *env*.
        """
        if EXEC_VARIABLE in os.environ or not hasattr(socket, "send_fds"):
            return False
        if argv[0] != sys.executable or not (argv[1] == "-m" or argv[1].endswith(".py")):
            return False
        return all(
            os.environ.get(name) == env.get(name)
            for name in {*os.environ, *env}
            if name.startswith(_READ_AT_IMPORT) and name not in _SET_BY_FORK
        )

    def start(
        self, task: Mapping[str, Any], env: Mapping[str, str], modules: tuple[str, ...] = ()
    ) -> ForkedGuard:
        """Fork a guard for *task*, a task of ``guard.py``, whose command also runs in a fork.

        The command finds *modules* imported.
        """
        to_guard, from_owner = os.pipe()[::-1]
        from_guard, to_owner = os.pipe()
        _request(self._server_with(modules), [task, dict(env)], [from_owner, to_owner])
        return ForkedGuard(open(to_guard, "wb"), open(from_guard, "rb", buffering=0))  # noqa: PTH123

    def _server_with(self, modules: tuple[str, ...]) -> socket.socket:
        """The socket of a preloaded process that has imported *modules* too."""
        if self._owner != os.getpid():
            self._sockets = {}
            self._begin()
        if modules not in self._sockets:
            ours, its = socket.socketpair()
            _request(self._sockets[()], list(modules), [its.detach()])
            self._sockets[modules] = ours
        return self._sockets[modules]

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
        self._sockets[()], self._owner = ours, os.getpid()
        atexit.register(self.end)

    def end(self) -> None:
        """End the preloaded process and all its guards."""
        if self._sockets and self._owner == os.getpid():
            for each in self._sockets.values():
                each.close()
            self._sockets, self._owner = {}, 0
            assert self._process is not None
            self._process.wait()


def _request(server: socket.socket, what: list[Any], fds: list[int]) -> None:
    """Send *what* and *fds*, which are closed here."""
    body = json.dumps(what).encode()
    socket.send_fds(server, [b"%d\n" % len(body)], fds)
    server.sendall(body)
    for fd in fds:
        os.close(fd)


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


def _serve(connection: socket.socket, modules: Sequence[str]) -> None:
    """Fork a guard for each request, until the test process closes the connection or dies.

    A request that is a list of modules forks a process that imports them too, and serves another
    connection.
    """
    # Celery and redis read the metadata of all distributions again and again.
    metadata.entry_points = functools.cache(metadata.entry_points)
    metadata.version = functools.cache(metadata.version)
    for name in modules:
        with contextlib.suppress(ImportError):
            import_module(name)
    metadata.entry_points(group="celery.result_backends")
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
            asked = json.loads(body)
            if len(fds) == 2:
                _be_guard(*asked, *fds)
            _serve(socket.socket(fileno=fds[0]), asked)
            os._exit(0)
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
        if task["argv"][1] == "-m":
            runpy.run_module(task["argv"][2], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(task["argv"][1], run_name="__main__")
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else bool(ended.code)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        code = -signal.SIGINT
    except BaseException:  # noqa: BLE001 - as the interpreter does for an uncaught exception
        sys.excepthook(*sys.exc_info())
    finally:
        _exit(code)
    raise AssertionError  # never reached


def _become(task: dict[str, Any], env: dict[str, str]) -> None:
    """Do what ``exec`` would do to this process."""
    os.setsid()
    guard.prepare_command()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    log = os.open(task["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    errors = log
    if task["errors"]:
        errors = os.open(task["errors"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for fd, target in ((os.open(os.devnull, os.O_RDONLY), 0), (log, 1), (errors, 2)):
        os.dup2(fd, target)
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ.clear()
    os.environ.update(env)
    time.tzset()
    os.chdir(task["cwd"] or ".")
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]  # the command may have another package of this name
    argv = task["argv"]
    sys.path[:] = [
        # As the interpreter does.
        os.getcwd() if argv[1] == "-m" else str(Path(argv[1]).resolve().parent),  # noqa: PTH109
        *filter(None, env.get("PYTHONPATH", "").split(os.pathsep)),
        *(place for place in sys.path[1:] if place not in inherited),
    ]
    sys.argv = argv[2:] if argv[1] == "-m" else argv[1:]
    sys.dont_write_bytecode = bool(env.get("PYTHONDONTWRITEBYTECODE"))
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115


def _exit(code: int) -> None:
    """Do what the interpreter does at its exit."""
    import threading

    with contextlib.suppress(BaseException):  # a signal during the wait for threads
        threading._shutdown()  # type: ignore[attr-defined]
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()  # type: ignore[attr-defined]
        sys.stdout.flush()
        sys.stderr.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as given:
        given.set_inheritable(False)
        _serve(given, _MODULES)
