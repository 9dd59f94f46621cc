"""Redis commands and SQL statements, counted at the servers."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from threading import Event, Thread
from typing import Any, Self
from uuid import uuid4

import redis

from celery_leases.testing.waits import wait_until
from tests.integration.deployments import Stage
from tests.support.servers import PostgresServer


class RedisMonitor:
    """The commands with *about* in them that a Redis server received, by MONITOR.

    Commands inside scripts are not counted.
    """

    def __init__(self, url: str, about: str = "") -> None:
        self._url = url
        self._about = about
        self._client = redis.Redis.from_url(url)
        self._lines: list[str] = []
        self._stop = Event()
        self._started = Event()
        self._thread = Thread(target=self._listen, daemon=True)
        self._thread.start()
        self._started.wait(10)

    def _listen(self) -> None:
        client = redis.Redis.from_url(self._url, socket_timeout=None)
        with client.monitor() as monitor:
            self._started.set()
            while not self._stop.is_set():
                command = monitor.next_command()
                if command["client_type"] != "lua":
                    self._lines.append(command["command"])

    def _mark(self) -> int:
        marker = f"marker-{uuid4().hex}"
        self._client.echo(marker)
        wait_until(lambda: any(marker in line for line in self._lines), 10, "the marker in MONITOR")
        return next(place for place, line in enumerate(self._lines) if marker in line)

    def during(self, action: Callable[[], object]) -> list[str]:
        """The names of the commands that the server received while *action* ran."""
        start = self._mark()
        action()
        told = self._lines[start + 1 : self._mark()]
        return [line.split()[0].upper() for line in told if self._about in line]

    def close(self) -> None:
        self._stop.set()
        self._client.echo("end")
        self._thread.join(10)
        self._client.close()


class StatementLog:
    """The statements that a PostgreSQL server received, from its log, with BEGIN and COMMIT."""

    _STATEMENT = re.compile(r"LOG: +(?:statement|execute [^:]+): (.*)")

    def __init__(self, server: PostgresServer, run: Callable[[str], Any]) -> None:
        self._server = server
        self._run = run

    def _mark(self) -> int:
        marker = f"marker-{uuid4().hex}"
        self._run(f"SELECT '{marker}'")
        wait_until(lambda: marker in self._server.logs(), 10, "the marker in the log")
        log = self._server.logs()
        return log.rindex("\n", 0, log.index(marker))

    def during(self, action: Callable[[], object]) -> list[str]:
        """The statements that the server received while *action* ran."""
        start = self._mark()
        action()
        end = self._mark()
        told = self._STATEMENT.findall(self._server.logs()[start:end])
        return [statement for statement in told if "marker-" not in statement]


@dataclass(frozen=True)
class Writes:
    """Bytes of WAL, transaction ids, and rows that were locked but not changed."""

    wal: float
    xids: float
    row_locks: float

    def within(self, budget: Self) -> bool:
        """Whether no number exceeds that of *budget*."""
        return (
            self.wal <= budget.wal
            and self.xids <= budget.xids
            and self.row_locks <= budget.row_locks
        )


class Bench:
    """A deployment with one warmed-up child, and the logs of its servers."""

    def __init__(self, stage: Stage, postgres: PostgresServer, tape: RedisMonitor) -> None:
        self.stage = stage
        self.redis = tape
        self.sql = StatementLog(postgres, self.ask)

    def ask(self, statement: str) -> list[dict[str, Any]]:
        with self.stage._engine.connect() as connection:
            return [dict(row) for row in connection.exec_driver_sql(statement).mappings()]

    def cost(self, action: Callable[[], object]) -> tuple[list[str], list[str]]:
        """The Redis commands and SQL statements while *action* ran."""
        commands: list[str] = []

        def both() -> None:
            commands.extend(self.redis.during(action))

        statements = self.sql.during(both)
        return commands, [statement.split()[0].upper() for statement in statements]

    def writes(self, action: Callable[[], object]) -> Writes:
        """What the server wrote while *action* ran; locks are those on records that existed."""
        before, lockers = self._written(), self._lockers()
        action()
        after = self._written()
        left = self._lockers()
        locked = sum(left.get(row, locker) != locker for row, locker in lockers.items())
        return Writes(after["wal"] - before["wal"], after["xid"] - before["xid"], locked)

    def _written(self) -> dict[str, Any]:
        lsn = "(pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::bigint AS wal"
        (found,) = self.ask(
            f"SELECT {lsn}, pg_snapshot_xmax(pg_current_snapshot())::text::bigint AS xid"
        )
        return found

    def _lockers(self) -> dict[tuple[str, str], str]:
        """The transaction that last locked each version of a row."""
        rows = self.ask("SELECT ctid::text, xmin::text, xmax::text FROM celery_leases_records")
        return {(row["ctid"], row["xmin"]): row["xmax"] for row in rows}

    def version(self, key: str) -> dict[str, Any]:
        """The position of the row's tuple, and the transactions that wrote and locked it.

        Each write and each lock changes at least one of them.
        """
        (found,) = self.ask(
            f"SELECT xmin::text, xmax::text, ctid::text FROM celery_leases_records WHERE key = '{key}'"  # noqa: S608
        )
        return found

    def close(self) -> None:
        self.redis.close()
        self.stage.close()
