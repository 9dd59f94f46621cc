"""The servers of a run, and for each contender its stores, its workers, and its caller."""

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

import psycopg
import redis

from benchmarks.environments import ROOT, interpreter
from benchmarks.performance import machine, roster, settings
from benchmarks.performance.journal import ENDED, Journal
from benchmarks.performance.machine import CpuByPid
from benchmarks.performance.roster import Contender
from celery_leases.testing.waits import wait_until
from tests.support.process import GuardedProcess
from tests.support.servers import PostgresServer, RedisServer

APP = "benchmarks.performance.app"
QUIET = "--without-gossip --without-mingle --without-heartbeat"
PATIENCE = 120.0
"""How long to wait for something that should happen, in seconds."""
POSTGRES = {
    **dict.fromkeys(("fsync", "synchronous_commit", "full_page_writes"), "on"),
    "shared_buffers": "256MB",
    "max_connections": "1200",
    "max_wal_size": "4GB",
    "checkpoint_timeout": "1h",
}
SETTLING = 1.5
WORKERS = 2
"""Pool children, or processes, of a worker."""


class NotDone(RuntimeError):
    """A contender did not finish in time; the message ends with its log."""


class Caller:
    """The process of :mod:`benchmarks.performance.caller` in the environment of a contender."""

    def __init__(self, argv: Sequence[str | Path], env: Mapping[str, str], log: Path) -> None:
        self._log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                argv,
                env=env,
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def wait_ready(self) -> None:
        """Return when it answers."""
        self._heard()

    def send(self, action: str, **arguments: Any) -> Any:
        """Send an action and return the answer; raises NotDone if the process has ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": action, **arguments}) + "\n")
        self._process.stdin.flush()
        return self._heard()

    def publish(
        self, keys: Sequence[str], task: str = "job", seconds: float = 0.0
    ) -> dict[str, float]:
        """Publish; returns the time of the first message (epoch) and the CPU seconds of all."""
        published: dict[str, float] = self.send(
            "publish", keys=list(keys), task=task, seconds=seconds
        )
        return published

    def trace(self, keys: Sequence[str]) -> dict[str, float]:
        """Seconds of CPU and of time per task."""
        traced: dict[str, float] = self.send("trace", keys=list(keys))
        return traced

    def close(self) -> None:
        """Stop the process."""
        self._process.kill()
        self._process.communicate()

    def _heard(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise NotDone(self._log.read_text(errors="replace")[-3000:])
        return json.loads(line)


class Worker:
    """The processes that run the tasks of a contender, and their journal; a context manager."""

    def __init__(
        self, commands: Sequence[Sequence[str | Path]], env: Mapping[str, str], place: Path
    ) -> None:
        self.journal = Journal(Path(env[settings.JOURNAL]))
        self._processes = [
            GuardedProcess(command, log=place / f"worker-{number}.log", env=env, cwd=ROOT)
            for number, command in enumerate(commands)
        ]

    @property
    def mains(self) -> list[int]:
        """The process ids of the processes that were started directly."""
        return [process.pid for process in self._processes]

    def pids(self) -> list[int]:
        """All process ids, including pool children."""
        return [pid for main in self.mains for pid in machine.tree(main)]

    def ended(self, number: int, patience: float = PATIENCE) -> None:
        """Return when the journal has *number* records; raises NotDone."""
        self.until(lambda: len(self.journal) >= number, f"{number} records", patience)

    def until(self, seen: Callable[[], object], what: str, patience: float = PATIENCE) -> None:
        """Return when *seen* is true; raises NotDone."""
        deadline = time.monotonic() + patience
        while not seen():
            if time.monotonic() > deadline or not all(process.alive for process in self._processes):
                raise NotDone(
                    f"waited for {what}; the journal has {len(self.journal)} records\n{self.logs()}"
                )
            time.sleep(0.005)

    def pause(self) -> None:
        """SIGSTOP all processes, so that only the contender whose turn it is uses CPU."""
        for process in self._processes:
            process.pause()

    def resume(self) -> None:
        """Continue all processes."""
        for process in self._processes:
            process.resume()

    def logs(self) -> str:
        """The end of their logs."""
        return "\n".join(process.logs()[-2000:] for process in self._processes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._processes:
            process.end()


class Stage:
    """One contender with two Redis databases and a PostgreSQL database of its own, which are
    created once for a run.
    """

    def __init__(self, contender: Contender, bench: "Bench", directory: Path) -> None:
        self.contender = contender
        self.bench = bench
        self.directory = directory
        self.database = bench.postgres.new_database()
        self.python = interpreter(contender.environment)
        number = 2 * roster.ALL.index(contender)
        self._redis = [f"{bench.redis.url.rpartition('/')[0]}/{number + extra}" for extra in (0, 1)]
        self._prepared: set[str] = set()
        self._settled = contender is not roster.LEASES

    def env(self, *, notes: str = "", database: str = "") -> dict[str, str]:
        """The environment of a process; each has its own journal with these kinds of records."""
        broker, locks = self._redis
        theirs = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("CELERY", "BENCH"))
        }
        return {
            **theirs,
            settings.CONTENDER: self.contender.name,
            settings.BROKER: broker,
            settings.LOCKS: locks,
            settings.DATABASE: database or self.database,
            settings.JOURNAL: str(self.directory / uuid4().hex),
            settings.NOTES: notes,
            "C_FORCE_ROOT": "1",
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(self.directory),
        }

    def prepare(self, database: str = "") -> None:
        """Create its tables, once for each database; raises NotDone."""
        env = self.env(database=database)
        if env[settings.DATABASE] in self._prepared:
            return
        command: list[str | Path] = [
            self.python,
            "-W",
            "ignore",
            "-m",
            "benchmarks.performance.prepare",
        ]
        made = subprocess.run(
            command, env=env, cwd=ROOT, capture_output=True, text=True, check=False
        )
        if made.returncode:
            raise NotDone(made.stderr[-3000:])
        self._prepared.add(env[settings.DATABASE])

    def settle(self, run: Callable[[], object]) -> None:
        """Wait until an empty lease store is settled: the first second after its first task costs
        more.
        """
        if not self._settled:
            run()
            time.sleep(SETTLING)
            self._settled = True

    @contextmanager
    def caller(self, database: str = "") -> Iterator[Caller]:
        """Its caller, once it answers."""
        self.prepare(database)
        argv: list[str | Path] = [
            self.python,
            "-W",
            "ignore",
            "-m",
            "benchmarks.performance.caller",
        ]
        caller = Caller(argv, self.env(database=database), self.directory / "caller.log")
        try:
            caller.wait_ready()
            yield caller
        finally:
            caller.close()

    def worker(
        self, *, pool: str = "prefork", concurrency: int = WORKERS, notes: str = ENDED
    ) -> Worker:
        """Start its worker, or both processes of a contender without Celery; the journal has these
        kinds of records.
        """
        self.prepare()
        python: list[str | Path] = [self.python, "-W", "ignore", "-m"]
        name = f"{self.contender.name}-{uuid4().hex[:8]}@%h"
        celery = f"celery -A {APP} worker -P {pool} -c {concurrency} -n {name} -l WARNING {QUIET}".split()
        other = f"benchmarks.performance.contenders.{self.contender.name}"
        commands = (
            [celery]
            if self.contender.on_celery
            else [[other, str(number)] for number in range(WORKERS)]
        )
        return Worker(
            [[*python, *command] for command in commands], self.env(notes=notes), self.directory
        )

    def forget_messages(self) -> None:
        """Empty its queue: messages of a stopped worker would be delivered again."""
        broker, _ = self._redis
        with redis.Redis.from_url(broker) as client:
            client.flushdb()

    def sql(self, statement: str, database: str = "") -> list[tuple[Any, ...]]:
        """Execute a statement in its database."""
        url = (database or self.database).replace("+psycopg", "", 1)
        with psycopg.connect(url, autocommit=True) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []


class Running:
    """A worker that has run some tasks, and its caller."""

    def __init__(self, stage: Stage, caller: Caller, worker: Worker) -> None:
        self.stage = stage
        self.caller = caller
        self.worker = worker
        self.journal = worker.journal

    def warm_up(self, tasks: int = 20) -> None:
        """Run some tasks, so that connections are open and statements prepared."""
        self.stage.settle(lambda: self.run(1))
        self.run(tasks)

    def run(self, tasks: int) -> None:
        """Run *tasks* tasks to their end."""
        self.caller.publish(keys(tasks))
        self.caller.send("settle")


class Bench:
    """A private Redis and a private PostgreSQL with fsync; a context manager."""

    def __init__(self) -> None:
        self.redis = RedisServer()
        self.postgres = PostgresServer(settings=POSTGRES)
        self._stages: dict[Contender, Stage] = {}
        self._exit = ExitStack()

    def __enter__(self) -> Self:
        directory = self._exit.enter_context(tempfile.TemporaryDirectory(prefix="bench-"))
        self._directory = Path(directory)
        self._exit.enter_context(self.redis)
        self._exit.enter_context(self.postgres)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._exit.close()

    def stage(self, contender: Contender) -> Stage:
        """The stage of a contender, created when it is first used."""
        if contender not in self._stages:
            directory = self._directory / contender.name
            directory.mkdir()
            self._stages[contender] = Stage(contender, self, directory)
        return self._stages[contender]

    @contextmanager
    def running(self, contenders: Sequence[Contender], **options: Any) -> Iterator[list[Running]]:
        """Warmed-up workers and callers of the contenders; if there are several, the workers are
        paused.
        """
        with ExitStack() as stack:
            stages = [self.stage(contender) for contender in contenders]
            for stage in stages:
                stage.forget_messages()
            callers = [stack.enter_context(stage.caller()) for stage in stages]
            workers = [stack.enter_context(stage.worker(**options)) for stage in stages]
            made = [Running(*parts) for parts in zip(stages, callers, workers, strict=True)]
            for one in made:
                one.warm_up()
                if len(made) > 1:
                    one.worker.pause()
            yield made

    def client(self) -> redis.Redis:
        """A client of the Redis server."""
        return redis.Redis.from_url(self.redis.url)

    @contextmanager
    def without_autovacuum(self) -> Iterator[None]:
        """Disable autovacuum in the block, so that PostgreSQL writes nothing by itself."""
        with psycopg.connect(
            self.postgres.url.replace("+psycopg", "", 1), autocommit=True
        ) as connection:
            connection.execute("ALTER SYSTEM SET autovacuum = off")
            connection.execute("SELECT pg_reload_conf()")
            at_work = "SELECT count(*) FROM pg_stat_activity WHERE backend_type LIKE 'autovacuum%'"
            wait_until(
                lambda: connection.execute(at_work).fetchone() == (0,),
                PATIENCE,
                "the end of autovacuum",
            )
            try:
                yield
            finally:
                connection.execute("ALTER SYSTEM RESET autovacuum")
                connection.execute("SELECT pg_reload_conf()")

    def redis_trips(self) -> int:
        """How often the server has read from clients so far."""
        with self.client() as client:
            return int(client.info("stats")["total_reads_processed"])

    def messages(self) -> int:
        """How many messages were published so far."""
        with self.client() as client:
            pushed: Any = client.info("commandstats").get("cmdstat_lpush", {"calls": 0})
            return int(pushed["calls"])

    def redis_cpu(self) -> CpuByPid:
        """The CPU of the Redis server so far."""
        return machine.cpu([self.redis.pid])

    def postgres_pids(self) -> list[int]:
        """The processes of the PostgreSQL server, including one for each connection."""
        return machine.tree(self.postgres.pid)


def keys(number: int, prefix: str = "") -> list[str]:
    """*number* unique keys that start with *prefix*."""
    unique = uuid4().hex[:12]
    return [f"{prefix}{unique}-{each}" for each in range(number)]


def turns(running: Sequence[Running], rounds: int) -> Iterator[Running]:
    """Each contender once in every round; each round starts with another one."""
    for number in range(rounds):
        first = number % len(running)
        yield from [*running[first:], *running[:first]]
