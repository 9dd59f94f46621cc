"""The benchmark of docs/explanation/performance.md measures: its processes start, take turns, and
count what they should.
"""

import re
import sys
from collections.abc import Iterator

import pytest

from benchmarks import scale
from benchmarks.performance import bench as benches
from benchmarks.performance import roster
from benchmarks.performance.bench import Bench, keys
from benchmarks.performance.draining import drained
from benchmarks.performance.measures import mutex, renewals, writes
from tests.integration.test_budgets import REPLAY
from tests.unit.doc_pages import markdown_rows

TASKS = 40


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with pytest.MonkeyPatch.context() as patch, Bench() as made:
        patch.setattr(benches, "interpreter", lambda _: sys.executable)
        yield made


@pytest.mark.nightly
def test_contenders_take_turns(bench: Bench) -> None:
    turns = []
    with bench.running((roster.PLAIN, roster.LEASES)) as running:
        for one in running:
            before = len(one.journal)
            turns.append(drained(one, TASKS, one.caller.publish(keys(TASKS))["cpu"]))
            assert len(one.journal) - before == TASKS
    plain, leases = turns
    for turn in turns:
        assert turn.rate > 0
        assert turn.worker > turn.main > 0
        assert turn.publisher > 0
    assert plain.children < leases.children
    assert plain.postgres < leases.postgres


@pytest.mark.nightly
def test_writes_are_counted_as_in_the_budgets(bench: Bench) -> None:
    finding = writes.measure(bench, quick=True)
    assert finding.facts["locks replay tight"].median == 1
    assert finding.facts["wal run tight"].median < finding.facts["wal run leases"].median
    for name in ("leases", "leases_database"):
        measured = [
            round(finding.facts[f"{fact} replay {name}"].median, 1)
            for fact in ("wal", "xids", "locks")
        ]
        # PostgreSQL writes a little by itself, now and then.
        assert measured[0] <= REPLAY.wal + 5
        assert measured[1:] == [REPLAY.xids, REPLAY.row_locks]
    assert round(finding.facts["trips run leases"].median) == 2
    assert round(finding.facts["trips run leases_database"].median) == 0


@pytest.mark.nightly
def test_leases_are_renewed_while_watched(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several with one call."""
    monkeypatch.setattr(renewals, "QUICK", (20, 0.5, 5.0))
    leases, database = renewals.measure(bench, quick=True).tables[0][1:]
    for _, share, renewed, calls, _ in (leases, database):
        assert float(share) < 50
        assert 15 <= int(renewed) <= 40
        assert int(calls) < int(renewed)


@pytest.mark.nightly
def test_a_mutex_runs_every_call_alone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutex, "QUICK", (3, 0.05))
    for _, ran, _, _, _, at_once, _ in mutex.measure(bench, quick=True).tables[0][1:]:
        assert (ran, at_once) == ("3 of 3", "1")


@pytest.mark.nightly
def test_a_partitioned_table_is_measured_beside_a_plain_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, number in (("ROUNDS", 3), ("CALLS", 10), ("LEASES", 500)):
        monkeypatch.setattr(scale, name, number)
    scale.main(4000, write=False)
    printed = capsys.readouterr().out
    rows = {row[0]: row[1:] for row in markdown_rows(printed)}
    assert len(rows["a replay, CPU of PostgreSQL, µs"]) == 4
    gone, total = re.findall(r"(\d+) of (\d+)", printed)[-1]
    assert 0.85 * int(total) < int(gone) < 0.95 * int(total)
    assert 50 < float(rows["memory of a held lease, bytes"][0]) < 1000
