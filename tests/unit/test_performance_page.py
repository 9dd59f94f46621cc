"""docs/performance.md shows what was measured: its tables, the README's sentence and the code speak
of the same.
"""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import environments, pages
from benchmarks.performance import goals, page, roster, summary
from benchmarks.performance.__main__ import MEASUREMENTS, QUICK
from benchmarks.performance.figures import Figure, figure, quantile, ratio
from benchmarks.performance.findings import drawn
from benchmarks.performance.goals import GOALS, Goal
from benchmarks.performance.journal import BEGUN, ENDED, Entry, Journal, Writer
from tests.unit.doc_pages import ROOT, markdown_rows

PERFORMANCE = ROOT / "benchmarks" / "performance"


def test_every_measurement_has_its_table_on_the_page() -> None:
    assert {path.stem for path in (PERFORMANCE / "measures").glob("[!_]*.py")} == {*MEASUREMENTS}
    for name in MEASUREMENTS:
        head, *rows = markdown_rows(page.shown(name))
        assert rows, name
        assert all(
            len(row) == len(head) for row in markdown_rows(page.shown(name).split("\n\n")[0])
        ), name
        assert name in page.PAGE.read_text().split("## To repeat it")[1], name


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
    assert len(page.README.read_text().split(summary.sentence(table))[0].splitlines()) < 45, (
        "it stands near the top"
    )


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
