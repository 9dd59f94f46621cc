"""Deployments for tests: a broker, a lease store, a record store, a worker, and its caller."""

import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any, Literal, Self
from uuid import uuid4

import pytest
import redis
from celery import _state, signals
from kombu.exceptions import ChannelError
from redis.exceptions import RedisError
from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool

from celery_leases.keys import stored_key
from celery_leases.ops.client import OperatorClient
from celery_leases.stores.sql.rows import to_record
from celery_leases.stores.sql.schema import Tables
from celery_leases.testing.waits import wait_until
from tests.support.workers import QUEUE_VARIABLE, LocalWorker

APP = "tests.apps.leased"
PATIENCE = 30.0

REDIS_REDIS_POSTGRES = ("redis", "redis", "postgres")
RABBIT_DATABASE_POSTGRES = ("rabbit", "database", "postgres")
REDIS_DATABASE_SQLITE = ("redis", "database", "sqlite")
RABBIT_REDIS_SQLITE = ("rabbit", "redis", "sqlite")
REDIS_DATABASE_MARIADB = ("redis", "database", "mariadb")
RABBIT_REDIS_MARIADB = ("rabbit", "redis", "mariadb")
PAIRWISE = (
    *(REDIS_REDIS_POSTGRES, RABBIT_DATABASE_POSTGRES),
    *(REDIS_DATABASE_MARIADB, RABBIT_REDIS_MARIADB),
    *(REDIS_DATABASE_SQLITE, RABBIT_REDIS_SQLITE),
)
"""Each pair of a broker, a lease store and a record store occurs."""
BOTH_WAYS = (REDIS_REDIS_POSTGRES, RABBIT_DATABASE_POSTGRES)
"""The shortest list with both brokers and both lease stores."""
POOL_STORES = {
    "prefork": REDIS_REDIS_POSTGRES,
    "threads": REDIS_DATABASE_SQLITE,
    "solo": REDIS_REDIS_POSTGRES,
    "gevent": RABBIT_REDIS_SQLITE,
    "eventlet": RABBIT_DATABASE_POSTGRES,
}
"""Each pool on one combination, so that all combinations occur.

An idle greenlet worker does not restore messages that others left unacknowledged on Redis.
"""

SIGNALS = [getattr(signals, name) for name in signals.__all__]
"""All signals of Celery."""

_databases = count(1)


def spelled(combination: tuple[str, ...]) -> str:
    return "-".join(combination)


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def until(condition: Callable[[], object], what: str) -> None:
    """Wait for *what*."""
    wait_until(lambda: bool(condition()), PATIENCE, what)


def got(result: Any, **options: Any) -> Any:
    """What a call results in, which raises its error; *options* are those of ``get()``."""
    return result.get(timeout=PATIENCE, **options)


def stages(*combinations: tuple[str, ...], drained: bool = True, **options: Any) -> Any:
    """A fixture ``module_stage`` with a worker on each of the combinations; *options* are those of
    :class:`Stage`. Unless *drained* is false, nothing may be left in the queue at the end.
    """

    @pytest.fixture(scope="module", params=combinations, ids=spelled)
    def module_stage(request: pytest.FixtureRequest, stage_factory: Any) -> Iterator[Stage]:
        made: Stage = stage_factory(request.param, **options)
        yield made
        if drained:
            made.close_when_drained(request.session)
        else:
            made.close()

    return module_stage


def imported_anew(name: str, env: Mapping[str, str]) -> Any:
    """Import a task module again under *env*, with an app of its own."""
    before = {
        loaded: sys.modules.pop(loaded)
        for loaded in list(sys.modules)
        if loaded.startswith("tests.apps.")
    }
    shared = set(_state._on_app_finalizers)
    connected = {made: list(made.receivers) for made in SIGNALS}
    try:
        with environment(env):
            return importlib.import_module(name)
    finally:
        for loaded in [loaded for loaded in sys.modules if loaded.startswith("tests.apps.")]:
            del sys.modules[loaded]
        sys.modules.update(before)
        # Otherwise Celery would register the tasks of each app with all other apps,
        _state._on_app_finalizers.intersection_update(shared)
        # and what happens in this process would be reported to the receivers of this app.
        for made, receivers in connected.items():
            made.receivers[:] = receivers
            made.sender_receivers_cache.clear()


class Stage:
    """Broker, stores, one worker, and the tasks for a caller. Close it, or use it as a context
    manager.

    ``app`` and ``tasks`` belong to the caller; they are imported from *home* for this deployment
    alone. ``env`` is the worker's environment, and *module* what it imports.
    """

    def __init__(
        self,
        combination: tuple[str, ...],
        urls: Mapping[str, str],
        directory: Path,
        *,
        module: str | None = None,
        home: str = APP,
        worker: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.broker, self.lease_store, self.record_store = combination
        self.home = home
        self.directory = directory
        self.journal = directory / "journal"
        self.queue = f"leases-{uuid4().hex[:12]}"
        number = next(_databases) % 15 + 1
        self.redis_url = f"{urls['redis'].rpartition('/')[0]}/{number}"
        self.broker_url = urls["rabbit"] if self.broker == "rabbit" else self.redis_url
        self.database_url = urls.get(self.record_store) or f"sqlite:///{directory}/leases.db"
        with redis.Redis.from_url(self.redis_url) as client:
            client.flushdb()
        self.env = {
            "JOURNAL": str(self.journal),
            "CELERY_BROKER_URL": self.broker_url,
            "CELERY_RESULT_BACKEND": self.redis_url,
            "LEASES_DATABASE_URL": self.database_url,
            "LEASES_URL": "database" if self.lease_store == "database" else self.redis_url,
            QUEUE_VARIABLE: self.queue,
            **(env or {}),
        }
        self.module = module or home
        self._engine = create_engine(
            self.database_url, poolclass=NullPool, isolation_level="AUTOCOMMIT"
        )
        Tables().create(self._engine)
        self.tasks = imported_anew(home, self.env)
        self.app = self.tasks.app
        # Celery reads its own variables from the environment of the moment, and that is not the
        # caller's any more.
        self.app.conf.update(broker_url=self.broker_url, result_backend=self.redis_url)
        self.app.set_current()
        self.worker = self.new_worker(**(worker or {}))

    def new_worker(self, **options: Any) -> LocalWorker:
        chosen: dict[str, Any] = {
            "concurrency": 4,
            "cwd": Path.cwd(),
            "queue": self.queue,
            "env": self.env,
        } | options
        return LocalWorker(self.module, directory=self.directory, **chosen)

    def __enter__(self) -> Self:
        self.worker.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.worker.teardown()
        self.app.close()
        self._engine.dispose()

    def close_when_drained(self, session: pytest.Session) -> None:
        """Close it once nothing is left in the queue; after a failed test, at once."""
        try:
            if not session.testsfailed:
                self.wait_until_drained()
        finally:
            self.close()

    # -- calling -----------------------------------------------------------------------------------

    def send(self, task: str, *args: Any, **options: Any) -> Any:
        """Publish a call by name; repeat with one ``task_id`` for copies of one call."""
        return self.app.send_task(f"{self.home}.{task}", args=args, **options)

    def side_queue(self) -> str:
        """A queue that the worker does not consume; see :meth:`forward` and :meth:`redeliver`."""
        return f"{self.queue}-{uuid4().hex[:8]}"

    def forward(
        self, side: str, copies: int = 1, *, to: str | None = None, **changed: object
    ) -> list[str]:
        """Publish each message of *side* to the worker *copies* times; returns the ids in order.

        *changed* are headers to replace, *to* is another queue than the worker's.
        """
        ids = []
        target = to or self.queue
        with self.app.connection_for_write() as connection:
            channel = connection.default_channel
            producer = connection.Producer()
            while (message := channel.basic_get(side)) is not None:
                names = ("correlation_id", "reply_to", "priority", "delivery_mode")
                properties = {
                    name: message.properties[name] for name in names if name in message.properties
                }
                kind = {
                    "content_type": message.content_type,
                    "content_encoding": message.content_encoding,
                }
                headers = {**message.headers, **changed}
                ids.append(headers["id"])
                for _ in range(copies):
                    producer.publish(
                        message.body, routing_key=target, headers=headers, **kind, **properties
                    )
                channel.basic_ack(message.delivery_tag)
            channel.queue_delete(side)
        return ids

    def redeliver(self, side: str) -> None:
        """Return the one message of *side* to its queue as redelivered, and let it be consumed."""
        with self.app.connection_for_write() as connection:
            channel = connection.default_channel
            message = channel.basic_get(side)
            assert message is not None
            channel.basic_reject(message.delivery_tag, requeue=True)
        self.consume(side)

    def consume(self, queue: str, worker: LocalWorker | None = None) -> None:
        """Make a worker, by default that of the deployment, consume one more queue."""
        host = f"{(worker or self.worker).name}@{os.uname().nodename}"
        assert self.app.control.add_consumer(queue, destination=[host], reply=True, timeout=10)

    def stop_consuming(self, worker: LocalWorker) -> None:
        """Make a worker stop consuming, so that it can be killed.

        Of a killed process, kombu loses a message that was only taken from its Redis queue.
        """
        host = f"{worker.name}@{os.uname().nodename}"
        answer = self.app.control.cancel_consumer(
            self.queue, destination=[host], reply=True, timeout=10
        )
        assert answer
        if self.broker == "redis":
            with redis.Redis.from_url(self.broker_url) as client:
                wait_until(
                    lambda: not _waits_for_messages(client, worker), PATIENCE, "the end of BRPOP"
                )
            for _ in range(2):  # what it has read is noted by then
                assert self.app.control.ping(destination=[host], timeout=PATIENCE)

    def redeliver_expired(self, task: str, *args: Any, **options: Any) -> Any:
        """Deliver a message a second time after its ``expires``; returns its result.

        RabbitMQ drops messages that expire in its queue, so only the worker knows the expiry.
        """
        first, second = self.side_queue(), self.side_queue()
        result = self.send(task, *args, queue=first, **options)
        with self.app.connection_for_write() as connection:
            connection.default_channel.queue_declare(second, durable=True, auto_delete=False)
        past = (datetime.now(UTC) - timedelta(seconds=5)).isoformat()
        self.forward(first, to=second, expires=past)
        self.redeliver(second)
        return result

    def gate(self) -> Path:
        """A path for a file that does not exist; a body with this gate continues once it does."""
        return self.directory / f"gate-{uuid4().hex[:8]}"

    def hold(self, task: str, name: str, *, by: str = "gate", **options: Any) -> tuple[Path, Any]:
        """Call a task whose body has begun and waits; returns its gate and its result."""
        gate = self.gate()
        result = getattr(self.tasks, task).delay(name, **{by: str(gate)}, **options)
        self.wait_for("begin", name=name)
        return gate, result

    # -- journal, log and records ------------------------------------------------------------------

    def events(self, what: str | None = None, **match: Any) -> list[dict[str, Any]]:
        """The complete lines of the journal, the oldest first."""
        whole, _, _ = (self.journal.read_text() if self.journal.exists() else "").rpartition("\n")
        found = [json.loads(line) for line in whole.splitlines()]
        wanted = match if what is None else {"what": what} | match
        return [
            event
            for event in found
            if all(event.get(name) == value for name, value in wanted.items())
        ]

    def wait_for(
        self, what: str, number: int = 1, timeout: float = PATIENCE, **match: Any
    ) -> list[dict[str, Any]]:
        """Wait until the journal has *number* lines, and return them."""
        wait_until(
            lambda: len(self.events(what, **match)) >= number, timeout, f"{number} x {what} {match}"
        )
        return self.events(what, **match)

    def log(self, about: str) -> list[str]:
        """The lines of the worker's log that contain *about*."""
        return [line for line in self.worker.full_log().splitlines() if about in line]

    def wait_for_log(
        self, about: str, text: str, number: int = 1, timeout: float = PATIENCE
    ) -> list[str]:
        """Wait for *number* log lines with *about* and *text*, and return them."""

        def seen() -> list[str]:
            return [line for line in self.log(about) if text in line]

        wait_until(
            lambda: len(seen()) >= number, timeout, f"{number} log lines of {about} with {text!r}"
        )
        return seen()

    def row(self, task: str, key: str) -> dict[str, Any]:
        """The whole row of a key, with the fields of its details."""
        found = self.find_row(task, key)
        assert found is not None, f"no row of {key}"
        return found

    def find_row(self, task: str, key: str) -> dict[str, Any] | None:
        """The same, or ``None``."""
        query = text("SELECT * FROM celery_leases_records WHERE stored_key = :key")
        with self._engine.connect() as connection:
            found = (
                connection.execute(query, {"key": stored_key(f"{self.home}.{task}", key)})
                .mappings()
                .first()
            )
        if found is None:
            return None
        record = to_record({**found, "now": 0}, lenient=True)
        before = record.previous
        return {
            **found,
            "ended": record.ended,
            "generation": record.generation,
            "retries": record.retries,
            "retention": record.retention,
            "failures": record.failures,
            "quick_retries": record.quick_retries,
            "cooldowns": record.cooldowns,
            "previous_ended": before.ended if before is not None else None,
            "previous_host": before.host if before is not None else None,
        }

    def wait_for_state(
        self, task: str, key: str, state: str, timeout: float = PATIENCE
    ) -> dict[str, Any]:
        """Wait until the row is in *state*, and return it."""
        wait_until(
            lambda: (self.find_row(task, key) or {}).get("state") == state,
            timeout,
            f"{key} to be {state}",
        )
        return self.row(task, key)

    @property
    def client(self) -> OperatorClient:
        """A client for the stores of this deployment."""
        return OperatorClient(self.env["LEASES_URL"], self.database_url)

    def is_held(self, task: str, key: str) -> bool:
        """Whether the key has a live lease."""
        return self.client.status(key, task=f"{self.home}.{task}").holder is not None

    # -- left messages -----------------------------------------------------------------------------

    def left_over(self) -> dict[str, Any]:
        """All messages that wait at the broker or in the worker."""
        left: dict[str, Any] = {}
        with self.app.connection_for_read() as connection:
            try:
                left["queue"] = connection.default_channel.queue_declare(
                    self.queue, passive=True
                ).message_count
            except ChannelError:
                left["queue"] = 0
        if self.broker == "redis":
            with redis.Redis.from_url(self.broker_url) as client:
                left["unacked"] = client.hlen("unacked")
        if self.worker.alive:
            left |= self._in_worker()
        return {where: what for where, what in left.items() if what}

    def _in_worker(self) -> dict[str, Any]:
        hosts = [f"{self.worker.name}@{os.uname().nodename}"]
        inspect = self.app.control.inspect(destination=hosts, timeout=5)
        parts: dict[str, Any] = {}
        for what in ("scheduled", "reserved", "active"):
            answer = getattr(inspect, what)()
            parts[what] = (
                "no answer"
                if answer is None
                else [entry for part in answer.values() for entry in part]
            )
        return parts

    def wait_until_drained(self, timeout: float = PATIENCE) -> None:
        """Return when no message is left at the broker or in the worker."""
        wait_until(
            lambda: not self._left_over_or_busy(),
            timeout,
            f"{self.queue} to be empty: {self.left_over()}",
        )

    def _left_over_or_busy(self) -> Mapping[str, Any] | Literal["busy"]:
        try:
            return self.left_over()
        except (OSError, RedisError):
            return "busy"


def _waits_for_messages(client: redis.Redis, worker: LocalWorker) -> bool:
    """Whether the main process of *worker* has a BRPOP that Redis has not answered, or has not read
    the answer.
    """
    sockets = set()
    for entry in Path(f"/proc/{worker.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            sockets.add(str(entry.readlink()))
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    its = [row for row in rows if f"socket:[{row[9]}]" in sockets]
    ports = {int(row[1].partition(":")[2], 16) for row in its}
    if any(int(row[4].partition(":")[2], 16) for row in its):
        return True
    clients: Any = client.client_list()
    return any(
        "b" in each["flags"] and int(each["addr"].rpartition(":")[2]) in ports for each in clients
    )
