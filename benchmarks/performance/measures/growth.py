"""Whether a task costs more when the table of records is large."""

from collections import defaultdict
from contextlib import ExitStack

from benchmarks.performance import machine, roster
from benchmarks.performance.bench import Bench, Stage, keys
from benchmarks.performance.figures import Figure, figure, ratio
from benchmarks.performance.findings import Finding

CONTENDER = roster.LEASES_DATABASE
FULL = (1_000_000, 40, 32)
QUICK = (10_000, 6, 16)
"""Rows, rounds, and tasks in each turn."""
WARM_UP = 64
COPIED = """INSERT INTO {table} ({columns})
SELECT {values} FROM {table} template, generate_series(1, {rows}) AS number WHERE template.stored_key = '{template}'"""
UNIQUE = {
    "stored_key": "'bench:job|' || md5(number::text)",
    "key": "md5(number::text)",
    "expires_at": "template.expires_at + number",
}


def measure(bench: Bench, quick: bool) -> Finding:
    """First runs and replays in turns, in an empty database and in one with many finished rows."""
    number, rounds, tasks = QUICK if quick else FULL
    stage = bench.stage(CONTENDER)
    databases = {rows: bench.postgres.new_database() for rows in (0, number)}
    wall: dict[tuple[str, int], list[float]] = defaultdict(list)
    server: dict[tuple[str, int], list[float]] = defaultdict(list)
    with ExitStack() as stack:
        callers = {
            rows: stack.enter_context(stage.caller(database))
            for rows, database in databases.items()
        }
        for rows, caller in callers.items():
            caller.trace(keys(WARM_UP))
            if rows:
                _fill(stage, databases[rows], rows)
            caller.trace(keys(WARM_UP))
        pids = bench.postgres_pids()
        for each in range(rounds):
            for rows, caller in list(callers.items())[:: 1 if each % 2 else -1]:
                names = keys(tasks)
                caller.trace(names[:1])
                for run in ("first run", "replay"):
                    before = machine.cpu(pids)
                    traced = caller.trace(names[1:])
                    server[run, rows].append(
                        1e6 * machine.used(before, machine.cpu(pids)) / (tasks - 1)
                    )
                    wall[run, rows].append(1e6 * traced["wall"])
    size, indexes, width = _sizes(stage, databases[number])
    head = [
        "",
        "time, empty, µs",
        f"time, {number:,} rows, µs",
        "ratio",
        "PostgreSQL's CPU, empty, µs",
    ]
    table = [[*head, f"with {number:,} rows, µs", "ratio"]]
    facts: dict[str, Figure] = {}
    for run in ("first run", "replay"):
        row = [f"a {run}"]
        for name, samples in (("time", wall), ("cpu", server)):
            facts[f"growth {name} {run}"] = ratio(samples[run, number], samples[run, 0])
            row += [figure(samples[run, rows]).shown(0) for rows in databases]
            row.append(facts[f"growth {name} {run}"].shown())
        table.append(row)
    text = (
        f"{rounds} rounds of {tasks - 1} tasks. The table of {number:,} finished rows takes {size / 2**20:,.0f} MiB, "
        f"{indexes / 2**20:,.0f} of them for indexes; a row without its indexes takes {width:,.0f} bytes."
    )
    return Finding("growth", [table], text, {**facts, "row bytes": figure([width])})


def _fill(stage: Stage, database: str, rows: int) -> None:
    """Copy a finished row *rows* times, each with its own key."""
    table = CONTENDER.records
    finished = f"SELECT stored_key FROM {table} WHERE state = 'done' LIMIT 1"  # noqa: S608
    ((template,),) = stage.sql(finished, database)
    of_table = f"information_schema.columns WHERE table_name = '{table}'"
    found = stage.sql(f"SELECT column_name FROM {of_table}", database)  # noqa: S608
    columns = [str(name) for (name,) in found]
    values = ", ".join(UNIQUE.get(name, f'template."{name}"') for name in columns)
    quoted = ", ".join(f'"{name}"' for name in columns)
    stage.sql(
        COPIED.format(table=table, columns=quoted, values=values, rows=rows, template=template),
        database,
    )
    stage.sql(f"VACUUM ANALYZE {table}", database)
    stage.sql("CHECKPOINT", database)


def _sizes(stage: Stage, database: str) -> tuple[int, int, float]:
    table = CONTENDER.records
    sizes = (
        f"pg_total_relation_size('{table}'), pg_indexes_size('{table}'), pg_table_size('{table}')"
    )
    (row,) = stage.sql(f"SELECT {sizes}, (SELECT count(*) FROM {table})", database)  # noqa: S608
    total, indexes, heap, rows = (int(each) for each in row)
    return total, indexes, heap / rows
