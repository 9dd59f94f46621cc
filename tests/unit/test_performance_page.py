"""docs/explanation/performance.md shows what was measured: its tables, the README's sentence and
the code speak of the same.
"""

import importlib.util
import os
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks import environments, pages
from benchmarks.peers.cases import ALL
from benchmarks.peers.columns import PACKAGES
from benchmarks.peers.table import BEGIN, END, NUMBERS, differences, on_page, put_on_page
from benchmarks.performance import goals, machine, page, roster, summary
from benchmarks.performance.__main__ import MEASUREMENTS, QUICK
from benchmarks.performance.draining import Turn, drained
from benchmarks.performance.figures import Figure, figure, quantile, ratio
from benchmarks.performance.findings import drawn
from benchmarks.performance.goals import GOALS, Goal
from benchmarks.performance.journal import BEGUN, ENDED, Entry, Journal, Writer
from benchmarks.performance.measures import pools
from benchmarks.performance.measures.pools import Pool
from tests.unit.doc_pages import ROOT, markdown_rows, section
from tests.unit.doc_pages import page as doc_page

PERFORMANCE = ROOT / "benchmarks" / "performance"


def test_every_measurement_has_its_table_on_the_page() -> None:
    assert {path.stem for path in (PERFORMANCE / "measures").glob("[!_]*.py")} == {*MEASUREMENTS}
    for name in MEASUREMENTS:
        head, *rows = markdown_rows(page.shown(name))
        assert rows, name
        assert all(
            len(row) == len(head) for row in markdown_rows(page.shown(name).split("\n\n")[0])
        ), name
        assert name in section((ROOT / "CONTRIBUTING.md").read_text(), "The measurements"), name


def test_every_contender_has_a_module_an_environment_and_a_row() -> None:
    shown = [row[0] for row in markdown_rows(page.shown("throughput"))]
    for contender in roster.ALL:
        assert importlib.util.find_spec(f"benchmarks.performance.contenders.{contender.name}")
        assert environments.pins(contender.environment)
        assert contender.heading in shown
        assert not contender.distribution or contender.heading != contender.title, (
            "its version is not pinned"
        )


def test_the_sentence_of_the_readme_says_what_the_table_says() -> None:
    table = markdown_rows(page.shown("summary"))
    assert table[0] == summary.HEAD
    assert page.shown("summary", page.README) == summary.sentence(table)


def test_the_sentence_takes_each_number_from_its_cell() -> None:
    rows = [
        ["Redis", "1.1", "22 %", "33 %", "44 %", "5", "6"],
        ["database", "1.2", "55 %", "66 %", "77 %", "7", "8"],
    ]
    said = summary.sentence([summary.HEAD, *rows]).replace("\n", " ")
    places = [
        said.index(number)
        for number in ("1.1 ms", "1.2 ms", "22 %", "(55 %)", "33 %", "(66 %)", "44 %", "(77 %)")
    ]
    assert places == sorted(places)


def test_every_goal_is_on_the_page_with_its_bound() -> None:
    rows = markdown_rows(page.shown("goals"))[1:]
    wanted = goals.judged(quick=QUICK in page.shown("machine"))
    assert [row[0] for row in rows] == [goal.title for goal in wanted]
    for goal, (_, measured, bound, aim) in zip(wanted, rows, strict=True):
        assert (bound, aim) == ("" if goal.bound is None else f"{goal.bound:,g}", f"{goal.aim:,g}")
        median = float(measured.split()[0].replace(",", ""))
        kept = goal.bound is None or goal.keeps(Figure(median, median, median, 1), goal.bound)
        assert measured.endswith("✗") != kept, goal.title


def test_a_goal_is_compared_with_the_shown_figure() -> None:
    goal = Goal("CPU", "cpu", bound=1.2, aim=1.0)
    assert goal.kept({"cpu": figure([1.204])})
    assert not goal.kept({"cpu": figure([1.206])})
    assert not replace(goal, more=True).kept({"cpu": figure([1.19])})
    assert goal.kept({})
    assert replace(goal, bound=None).kept({"cpu": figure([9])})
    assert goals.table({"unknown": figure([1])}, quick=False) == [["", "measured", "bound", "aim"]]
    assert {goal.sized for goal in goals.judged(quick=True)} == {False}
    assert goals.judged(quick=False) == [*GOALS]


def test_ratios_are_taken_within_rounds() -> None:
    assert ratio([2, 4, 2], [1, 2, 1]) == Figure(2, 2, 2, 3)
    assert figure([1, 2, 3, 4, 5]) == Figure(3, 2, 4, 5)
    assert figure([7]) == Figure(7, 7, 7, 1)
    assert figure([7]).shown() == "7.00"
    assert figure([1000, 2000, 3000]).shown(0) == "2,000 (1,500 to 2,500)"
    assert quantile(range(100), 0.99) == 99
    with pytest.raises(ValueError, match="shorter"):
        ratio([1, 2], [1])


def test_contenders_of_a_pool_are_compared_within_rounds() -> None:
    def turn(rate: float, cpu: float) -> Turn:
        return Turn(rate, worker=cpu, main=0, redis=1, postgres=2, publisher=0, others=0)

    made = {
        roster.PLAIN: [turn(10, 100), turn(20, 200)],
        roster.LEASES: [turn(5, 150), turn(10, 300)],
    }
    facts = pools._facts(roster.LEASES, made)
    assert facts["rate / plain"] == Figure(0.5, 0.5, 0.5, 2)
    assert facts["cpu / plain"] == Figure(1.5, 1.5, 1.5, 2)
    assert facts.keys() >= pools.SHOWN.keys()


def test_a_turn_fills_its_pool() -> None:
    assert Pool("gevent", 100).tasks(0.1) == 600
    assert Pool("gevent", 300).tasks(0.1) == 900
    assert Pool("prefork", 2).tasks(0.1) == 20


def test_a_journal_gives_back_what_was_wanted_of_it(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    assert (len(journal), journal.entries()) == (0, [])
    writer = Writer(str(journal.path), wanted=ENDED)
    for what, key in ((BEGUN, "a"), (ENDED, "a"), (ENDED, "b")):
        writer.note(what, key)
    with journal.path.open("ab") as file:
        file.write(b"E")
    assert [(what, key) for what, _, key in journal.entries()] == [(ENDED, "a"), (ENDED, "b")]
    assert [entry.key for entry in journal.entries(1)] == ["b"]
    assert len(journal) == 2
    assert isinstance(journal.entries()[0], Entry)


def test_a_part_of_a_page_is_replaced_between_its_marks(tmp_path: Path) -> None:
    copy = tmp_path / "page.md"
    copy.write_text("before\n<!-- ring: written by make bench -->\n<!-- end of ring -->\nafter\n")
    page.show("ring", drawn([["a", "b"], ["1", "2"]]), copy)
    page.show("ring", drawn([["a", "b"], ["1", "3"]]), copy)
    assert markdown_rows(page.shown("ring", copy)) == [["a", "b"], ["1", "3"]]
    assert copy.read_text().startswith("before\n<!--")
    assert copy.read_text().endswith("-->\nafter\n")
    with pytest.raises(ValueError, match="unpack"):
        pages.part(copy, "no such mark", "nor this")


def rows_of(title: str) -> list[str]:
    """The first cells of the tables below a heading, without those of their heads."""
    return [row[0] for row in markdown_rows(section(doc_page("comparison"), title)) if row[0]]


def test_every_row_is_a_test_whose_name_begins_with_it() -> None:
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = {row.upper() for row in re.findall(r"^def test_([mcrx]\d+)_", tests, re.MULTILINE)}
    assert named == {*rows_of("The difficult cases"), *rows_of("Seen in other systems")}


def test_the_page_shows_every_case_that_can_be_played() -> None:
    shown = [row[:2] for row in markdown_rows(on_page())[1:]]
    assert shown == [[case.row, case.title] for case in ALL]


def test_the_page_names_the_versions_that_are_pinned() -> None:
    head = markdown_rows(on_page())[0]
    assert head == [
        "",
        "case",
        *(f"{package.title} {package.version}".strip() for package in PACKAGES),
    ]
    assert all(package.version for package in PACKAGES[:-1])


def test_every_cell_was_observed_and_ours_are_right() -> None:
    for case, (_, _, *cells) in zip(ALL, markdown_rows(on_page())[1:], strict=True):
        for package, cell in zip(PACKAGES, cells, strict=True):
            if package.name in case.unfit:
                assert cell.startswith("n/a ")
                assert cell[-1] in NUMBERS
                assert f"\n{cell[-1]} {case.unfit[package.name]}" in on_page()
            else:
                assert cell[:2] in ("✓ ", "✗ "), (case.row, package.name)
        assert cells[-1].startswith("✓ "), case.row


def test_a_table_is_put_between_its_marks_and_compared_line_by_line(tmp_path: Path) -> None:
    copy = tmp_path / "comparison.md"
    copy.write_text(f"before\n{BEGIN}\n{END}\nafter\n")
    put_on_page("| M1 | ✓ |\n| M2 | ✓ |", copy)
    assert copy.read_text() == f"before\n{BEGIN}\n| M1 | ✓ |\n| M2 | ✓ |\n{END}\nafter\n"
    assert differences(on_page(copy), "| M1 | ✓ |\n| M2 | ✗ |") == ["- | M2 | ✓ |", "+ | M2 | ✗ |"]
    assert differences(on_page(), on_page()) == []


TASKS = 40


class Worker:
    """Ends tasks in bursts: *bursts* are the numbers of tasks that have ended at each look."""

    def __init__(self, path: Path, bursts: list[int]) -> None:
        self.journal = Journal(path)
        self.mains = [os.getpid()]
        self.paused = False
        self.writer = Writer(str(path), ENDED)
        self._bursts = bursts

    def pids(self) -> list[int]:
        return self.mains

    def ended(self, number: int) -> None:
        for _ in range(self._bursts.pop(0)):
            self.writer.note(ENDED, "a key")
        assert len(self.journal) >= number

    def resume(self) -> None:
        self.paused = False

    def pause(self) -> None:
        self.paused = True


@pytest.mark.parametrize(
    "bursts", [[4, 36], [40, 0], [39, 1]], ids=["as usual", "all at once", "all but one at once"]
)
def test_tasks_are_measured_however_fast_they_end(tmp_path, monkeypatch, bursts) -> None:
    """Also on a machine where nothing else runs until they have ended; a turn before leaves its
    records. Each task takes a second of CPU here.
    """
    worker = Worker(tmp_path / "journal", bursts)
    for number in range(3):
        worker.writer.note(ENDED, f"before {number}")

    def cpu(pids: Iterable[int]) -> machine.CpuByPid:
        return {pid: float(len(worker.journal)) for pid in pids}

    monkeypatch.setattr(machine, "cpu", cpu)
    bench = SimpleNamespace(postgres_pids=worker.pids, redis_cpu=lambda: cpu([0]))
    caller = SimpleNamespace(send=lambda _: None)
    one = SimpleNamespace(
        stage=SimpleNamespace(bench=bench), worker=worker, journal=worker.journal, caller=caller
    )
    turn = drained(cast("Any", one), TASKS, publishing=1.0)
    assert turn.rate > 0
    assert turn.worker == turn.main == pytest.approx(1e6, rel=0.05)
    assert turn.redis == turn.postgres == pytest.approx(1e6, rel=0.05)
    assert turn.publisher == 1e6 / TASKS
    assert worker.paused
