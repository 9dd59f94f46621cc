"""What a PostgreSQL and a Redis carry: ``python -m benchmarks.scale [rows] [--write]``.

With 10,000,000 rows, the default, it takes half an hour and 12 GB on disk. Two databases of one
private server have the same finished rows, one in a plain table and one in the partitions of
docs/how-to/partitions.md; a seventh of the rows has expired. They take turns, the latter with and
without the page's settings for plans. CPU is that of all processes of the server. ``--write`` puts
the tables into docs/explanation/scale.md.
"""

from __future__ import annotations

import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg

from benchmarks import pages
from benchmarks.performance import machine
from benchmarks.performance.figures import figure, ratio
from celery_leases.call import Call
from celery_leases.decide.answers import Acquired
from celery_leases.keys import CallKey
from celery_leases.options import DATABASE, LeaseOptions
from celery_leases.record import Ended, Outcome, Record, State
from celery_leases.stores.redis.leases import RedisLeaseStore
from celery_leases.stores.sql.connections import engine_for
from celery_leases.stores.sql.records import SqlRecordStore
from tests.support.servers.postgres import PostgresServer
from tests.support.servers.redis import RedisServer

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/explanation/scale.md"
SETTINGS = {
    "shared_buffers": "1GB",
    "full_page_writes": "on",
    "max_wal_size": "8GB",
    "autovacuum": "off",
    "maintenance_work_mem": "512MB",
}
DAYS = 7
"""The default of ``lease_retention``: a seventh of all rows expires each day."""
FILL = """INSERT INTO celery_leases_records ({columns})
SELECT {values} FROM celery_leases_records template, generate_series(1, {rows}) AS number"""
DAY = 86_400_000_000
VALUES = {
    "stored_key": "'scale|' || md5(number::text)",
    "key": "md5(number::text)",
    "started_at": f"template.started_at - {DAYS + 1} * {DAY} + number * ({DAYS}.0 * {DAY} / {{rows}})",
    "expires_at": f"template.expires_at - {DAYS + 1} * {DAY} + number * ({DAYS}.0 * {DAY} / {{rows}})",
}
ROUNDS = 20
CALLS = 100
BATCH = 500
OF_WAL = 5_000
LEASES = 50_000
PEAK = 5
WORKER = 1_900.0
"""µs of CPU that a worker spends for a task (docs/explanation/performance.md)."""
ONE = "celery_leases_records_7"


class Side:
    """One of the two databases."""

    def __init__(self, server: PostgresServer, url: str) -> None:
        self.server = server
        self.records = SqlRecordStore(engine_for(url))
        self.url = url.replace("+psycopg", "")
        self.connection: psycopg.Connection[Any] | None = None

    def sql(self, statement: str) -> list[Any]:
        """The rows of a statement, if it has some. The connection stays open, as the CPU of an
        ended process would be lost.
        """
        if self.connection is None:
            self.connection = psycopg.connect(self.url, autocommit=True)
        cursor = self.connection.execute(statement.encode())
        return cursor.fetchall() if cursor.description else []

    def close(self) -> None:
        """Close the connections; later ones may be opened."""
        self.records.database.close()
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def cost(self, work: Callable[..., object], *given: object) -> tuple[float, float, int]:
        """The seconds, the seconds of the server's CPU, and the bytes of WAL that *work* takes."""
        lsn = "SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn"
        wal, pids = int(self.sql(lsn)[0][0]), machine.tree(self.server.pid)
        cpu, began = machine.cpu(pids), time.perf_counter()
        work(*given)
        took = time.perf_counter() - began
        used = machine.used(cpu, machine.cpu(machine.tree(self.server.pid)))
        return took, used, int(self.sql(lsn)[0][0]) - wal

    def begin(self, key: str) -> Record | None:
        """A claim of the key; the record if the body may run."""
        answer = self.records.claim(call_of(key), DATABASE)
        return answer.record if isinstance(answer, Acquired) else None

    def run(self, keys: list[str]) -> None:
        """The statements of a first run, for each key."""
        for key in keys:
            record = self.begin(key)
            assert record is not None
            done = Outcome(
                State.DONE, Ended.RETURNED, attempt=1, failures=0, crashes=0, result="1",
                retention=DAYS * 86_400.0,
            )  # fmt: skip
            assert self.records.settle(record, done)

    def replay(self, keys: list[str]) -> None:
        """The statement of a call of finished work, for each key."""
        assert not any(self.begin(key) for key in keys)


def fresh(number: int) -> list[str]:
    """Stored keys that nobody has used."""
    return [f"scale|{uuid4().hex}" for _ in range(number)]


def call_of(key: str, ttl: float = 15.0) -> Call:
    """A new call of a key."""
    options, host = LeaseOptions(ttl=ttl), "worker-1.example/1234"
    return Call("scale", uuid4().hex, CallKey(key, key), options, token=uuid4().hex, host=host)


def sides(server: PostgresServer, rows: int) -> tuple[Side, Side, float]:
    """A plain and a partitioned database with so many rows each, and the seconds that the page's
    script took.
    """
    plain = Side(server, server.new_database())
    plain.records.migrate()
    plain.run(["scale|template"])
    columns = [name for (name,) in plain.sql(
        "SELECT column_name FROM information_schema.columns WHERE table_name = 'celery_leases_records'"
    )]  # fmt: skip
    values = [VALUES.get(name, f'template."{name}"').format(rows=rows) for name in columns]
    quoted = ", ".join(f'"{name}"' for name in columns)
    plain.sql(FILL.format(columns=quoted, values=", ".join(values), rows=rows))
    plain.sql("VACUUM ANALYZE celery_leases_records")
    plain.close()
    partitioned = Side(server, server.database_url("partitioned"))
    template = plain.url.rpartition("/")[2]
    Side(server, server.url).sql(f"CREATE DATABASE partitioned TEMPLATE {template}")
    script, *_ = scripts()
    took = partitioned.cost(partitioned.sql, script)[0]
    partitioned.records.migrate()
    partitioned.sql("VACUUM ANALYZE celery_leases_records")
    return plain, partitioned, took


def scripts() -> list[str]:
    """The scripts of the page on partitions."""
    text = (ROOT / "docs/how-to/partitions.md").read_text()
    return re.findall(r"^```sql\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def measured(plain: Side, custom: Side, generic: Side, rows: int) -> Iterator[list[str]]:
    """The rows of the table: what, for each side, and the ratio of the last to the first."""
    every, batch = (plain, custom, generic), min(BATCH, rows // 1000)
    costs: dict[str, dict[Side, list[tuple[float, float, int]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for side in every:
        side.run(fresh(CALLS))
    for turn in range(ROUNDS):
        for side in every[:: 1 if turn % 2 else -1]:
            keys = fresh(CALLS)
            costs["first run"][side].append(side.cost(side.run, keys))
            costs["replay"][side].append(side.cost(side.replay, keys))
            costs["purge"][side].append(side.cost(side.records.purge, batch))

    def row(what: str, kind: str, part: int, scale: float, digits: int = 0) -> list[str]:
        samples = [[scale * cost[part] for cost in costs[kind][side]] for side in every]
        shown = [figure(values).shown(digits) for values in samples]
        return [what, *shown, ratio(samples[-1], samples[0]).shown()]

    of_table = r"relkind = 'r' AND relname ~ '^celery_leases_records(_\d+)?$'"
    size = f"SELECT sum({{}}(oid))::bigint FROM pg_class WHERE {of_table}"  # noqa: S608
    for what, function in (("table", "pg_table_size"), ("indexes", "pg_indexes_size")):
        sizes = [int(side.sql(size.format(function))[0][0]) / rows for side in (plain, generic)]
        yield alike(f"bytes a row, {what}", sizes)
    yield row("a first run, time, µs", "first run", 0, 1e6 / CALLS)
    yield row("a first run, CPU of PostgreSQL, µs", "first run", 1, 1e6 / CALLS)
    yield row("a replay, time, µs", "replay", 0, 1e6 / CALLS)
    yield row("a replay, CPU of PostgreSQL, µs", "replay", 1, 1e6 / CALLS)
    yield row(f"a purge of {batch} rows, time, ms", "purge", 0, 1e3, 1)
    yield row("a purged row, CPU of PostgreSQL, µs", "purge", 1, 1e6 / batch, 1)
    yield row("a purged row, WAL, bytes", "purge", 2, 1 / batch)
    for compressed in ("off", "lz4"):
        wals = []
        for side in (plain, generic):
            side.sql(f"ALTER SYSTEM SET wal_compression = {compressed}")
            side.sql("SELECT pg_reload_conf()")
            side.sql("CHECKPOINT")
            keys = fresh(max(100, min(OF_WAL, rows // 10)))
            wals.append(side.cost(side.run, keys)[2] / len(keys))
        what = f"a first run, WAL, the first {len(keys):,} after a checkpoint, bytes"
        yield alike(f"{what}, `wal_compression = {compressed}`", wals)
    vacuums = [side.cost(side.sql, "VACUUM celery_leases_records")[1] for side in (plain, generic)]
    yield alike("VACUUM of all, CPU of PostgreSQL, s", vacuums, digits=1)


def alike(what: str, values: list[float], digits: int = 0) -> list[str]:
    """A row of the table in which plans make no difference."""
    plain, partitioned = values
    shown = f"{partitioned:,.{digits}f}"
    return [what, f"{plain:,.{digits}f}", shown, shown, f"{partitioned / plain:.2f}"]


def dropped(partitioned: Side) -> list[str]:
    """What it takes to drop nine tenths of the rows of a partition."""
    at = f"SELECT percentile_disc(0.9) WITHIN GROUP (ORDER BY expires_at) FROM {ONE}"  # noqa: S608
    counted = f"SELECT count(*) FROM {ONE}"  # noqa: S608
    before, cutoff = int(partitioned.sql(counted)[0][0]), int(partitioned.sql(at)[0][0])
    script = scripts()[-1].replace("extract(epoch FROM now()) * 1000000", str(cutoff))
    took, cpu, wal = partitioned.cost(partitioned.sql, script)
    gone = before - int(partitioned.sql(counted)[0][0])
    return [
        f"{gone:,} of {before:,}",
        f"{took:.2f}", f"{1e6 * cpu / gone:,.1f}", f"{wal / gone:,.0f}",
    ]  # fmt: skip


def redis_table() -> list[list[str]]:
    """What Redis does for a key without a duplicate: acquire and release."""
    with RedisServer() as server:
        store = RedisLeaseStore.from_url(server.url)

        def memory() -> int:
            return int(store._client.info("memory")["used_memory"])  # noqa: SLF001

        calls = [call_of(key, 600.0) for key in fresh(LEASES)]
        store.acquire(calls[0])
        before, pids = memory(), [server.pid, *machine.tree(server.pid)]
        cpu = machine.cpu(pids)
        for each in calls[1:]:
            store.acquire(each)
        taken = machine.cpu(pids)
        size = (memory() - before) / (len(calls) - 1)
        for each in calls:
            store.release(each.key.stored, each.token)
        over = machine.cpu(pids)
        store.close()
    one, two = (1e6 * machine.used(*pair) / LEASES for pair in ((cpu, taken), (taken, over)))
    return [
        ["Redis", "measured"],
        ["memory of a held lease, bytes", f"{size:,.0f}"],
        ["CPU of an acquire, µs", f"{one:,.1f}"],
        ["CPU of a release, µs", f"{two:,.1f}"],
        ["keys a second that one core of Redis carries, from these", f"{1e6 / (one + two):,.0f}"],
    ]


def calculated(run: float, purge: float, wal: float, row: float, redis: float) -> list[list[str]]:
    """What so many keys a day take: *run*, *purge* and *redis* are µs of CPU for a key, *wal* and
    *row* bytes.
    """
    table = [["keys a day", "10⁶", "10⁸", "10⁹"]]
    a_day, kept = (10**6, 10**8, 10**9), (7, 7, 1)
    mean = [keys / 86_400 for keys in a_day]

    def cores(at_peak: float, always: float = 0.0) -> list[str]:
        both = ((rate * (at_peak + always), rate * (PEAK * at_peak + always)) for rate in mean)
        return [", ".join(each(value / 1e6 for value in pair)) for pair in both]

    def each(values: Iterable[float]) -> list[str]:
        return [f"{float(f'{value:.2g}'):,g}" for value in values]

    table.append(["keys a second: mean, peak", *(f"{a}, {b}" for a, b in zip(
        each(mean), each(PEAK * rate for rate in mean), strict=True
    ))])  # fmt: skip
    table.append(["cores of workers, with bodies that do nothing", *cores(WORKER)])
    table.append(["cores of PostgreSQL, with the purge", *cores(run, purge)])
    table.append(["cores of Redis", *cores(redis)])
    table.append(["WAL a day, most of it full pages, GB", *each(n * wal / 1e9 for n in a_day)])
    table.append(["transaction ids a day, millions", *each(2 * n / 1e6 for n in a_day)])
    table.append(["`lease_retention`, days", *each(kept)])
    rows = [n * days for n, days in zip(a_day, kept, strict=True)]
    table.append(["rows, millions", *each(n / 1e6 for n in rows)])
    table.append(["their disk, GB", *each(n * row / 1e9 for n in rows)])
    return table


def shown(table: list[list[str]]) -> str:
    """A table in Markdown."""
    head, *rest = (f"| {' | '.join(row)} |" for row in table)
    return "\n".join([head, "|" + " --- |" * len(table[0]), *rest])


def main(rows: int, write: bool) -> None:
    """Measure, and print or write the tables."""
    with PostgresServer(settings=SETTINGS) as server:
        plain, custom, took = sides(server, rows)
        generic = Side(server, f"{server.database_url('partitioned')}?options={GENERIC}")
        table = [[f"{rows:,} rows", "plain table", "16 partitions", "with generic plans", "ratio"]]
        for row in measured(plain, custom, generic, rows):
            table.append(row)
            print(*row, sep=" | ", flush=True)
        head = ["rows dropped with the files of a partition", "time, s"]
        drop = [[*head, "CPU of PostgreSQL a row, µs", "WAL a row, bytes"], dropped(custom)]
        for side in (plain, custom, generic):
            side.close()
    redis = redis_table()

    def number(row: list[str], column: int = 1) -> float:
        return float(row[column].split()[0].replace(",", ""))

    found = {row[0]: row for row in table}
    run, purge = "a first run, CPU of PostgreSQL, µs", "a purged row, CPU of PostgreSQL, µs"
    size = number(table[1]) + number(table[2])
    wal = next(number(row) for row in table if "compression = off" in row[0])
    needed = calculated(
        number(found[run]), number(found[purge]), wal, size, number(redis[2]) + number(redis[3])
    )
    text = (
        f"{shown(table)}\n\n{ROUNDS} rounds of {CALLS} keys; the ratio is that of the last to the first. "
        f"The script that makes the partitions took {took:,.0f} s.\n\n{shown(drop)}\n\n{shown(redis)}"
    )
    print(text, shown(needed), sep="\n\n")
    if write:
        pages.put(PAGE, BEGIN, END, text)
        pages.put(
            PAGE,
            BEGIN.replace("scale:", "calculated:"),
            "<!-- end of calculated -->",
            shown(needed),
        )


GENERIC = "-c%20plan_cache_mode%3Dforce_generic_plan%20-c%20jit%3Doff"
BEGIN, END = "<!-- scale: written by python -m benchmarks.scale -->", "<!-- end of scale -->"

if __name__ == "__main__":
    numbers = [int(given) for given in sys.argv[1:] if given.isdigit()]
    PostgresServer.homes = Path("/var/tmp")  # noqa: S108 - on disk, not in memory
    main(numbers[0] if numbers else 10_000_000, "--write" in sys.argv)
