"""The WAL, transaction ids, row locks and round trips to Redis of a first run and of a replay."""

from dataclasses import dataclass, fields

from benchmarks.performance import roster
from benchmarks.performance.bench import Bench, Caller, Stage, keys
from benchmarks.performance.figures import Figure, figure
from benchmarks.performance.findings import Finding

CONTENDERS = (roster.ROWS, roster.TIGHT, roster.LEASES_DATABASE, roster.LEASES)
WITHOUT_REPLAY = (roster.ROWS,)
FULL = 500
QUICK = 100
"""Tasks."""
WARM_UP = 64


@dataclass(frozen=True)
class Writes:
    """The work of the servers for one task: bytes, transaction ids, rows and round trips."""

    wal: float
    xids: float
    locks: float
    trips: float


def measure(bench: Bench, quick: bool) -> Finding:
    """Tasks one after the other in one process, then other calls of the same keys."""
    tasks = QUICK if quick else FULL
    rows = [["per task", "WAL, bytes", "transaction ids", "rows locked", "Redis round trips"]]
    facts: dict[str, Figure] = {}
    for contender in CONTENDERS:
        with bench.stage(contender).caller() as caller, bench.without_autovacuum():
            for run, each in _runs(bench.stage(contender), caller, tasks).items():
                title = f"{contender.heading}: {'a first run' if run == 'run' else 'a replay'}"
                rows.append(
                    [
                        title,
                        f"{each.wal:,.0f}",
                        f"{each.xids:.2f}",
                        f"{each.locks:.2f}",
                        f"{each.trips:.2f}",
                    ]
                )
                for field in fields(each):
                    facts[f"{field.name} {run} {contender.name}"] = figure(
                        [getattr(each, field.name)]
                    )
    for ours, other in ((roster.LEASES, roster.TIGHT), (roster.LEASES_DATABASE, roster.ROWS)):
        wal, by_hand = (facts[f"wal run {contender.name}"].median for contender in (ours, other))
        facts[f"wal run {ours.name} / {other.name}"] = figure([wal / by_hand])
    return Finding("writes", [rows], f"{tasks} tasks.", facts)


def _runs(stage: Stage, caller: Caller, tasks: int) -> dict[str, Writes]:
    warm, names = keys(WARM_UP), keys(tasks)
    stage.settle(lambda: caller.trace(keys(1)))
    caller.trace(warm)
    runs = {"run": _counted(stage, caller, names)}
    if stage.contender not in WITHOUT_REPLAY:
        caller.trace(warm)
        runs["replay"] = _counted(stage, caller, names)
    return runs


def _counted(stage: Stage, caller: Caller, names: list[str]) -> Writes:
    trips, lockers, (wal, xids) = stage.bench.redis_trips(), _lockers(stage), _counters(stage)
    caller.trace(names)
    wal_after, xids_after = _counters(stage)
    left, trips_after = _lockers(stage), stage.bench.redis_trips()
    locked = sum(left.get(row, locker) != locker for row, locker in lockers.items())
    totals = (wal_after - wal, xids_after - xids, locked, trips_after - trips)
    return Writes(*(total / len(names) for total in totals))


def _counters(stage: Stage) -> tuple[int, int]:
    """The end of the WAL, and the next transaction id."""
    lsn = "pg_current_wal_insert_lsn() - '0/0'::pg_lsn"
    ((wal, xid),) = stage.sql(f"SELECT {lsn}, pg_snapshot_xmax(pg_current_snapshot())::text")
    return int(wal), int(xid)


def _lockers(stage: Stage) -> dict[str, str]:
    """The transaction that last locked each version of a row."""
    versions = f"SELECT ctid::text || ' ' || xmin::text, xmax::text FROM {stage.contender.records}"  # noqa: S608
    return dict(stage.sql(versions))
