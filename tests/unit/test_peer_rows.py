"""docs/comparison.md, the cases that can be played, and the tests that are named after them speak
of the same rows.
"""

import re
from pathlib import Path

from benchmarks.peers.cases import ALL
from benchmarks.peers.columns import PACKAGES
from benchmarks.peers.table import BEGIN, END, NUMBERS, differences, on_page, put_on_page
from tests.unit.doc_pages import ROOT, markdown_rows, page, section


def rows_of(title: str) -> list[str]:
    """The first cells of the tables below a heading, without those of their heads."""
    return [row[0] for row in markdown_rows(section(page("comparison"), title)) if row[0]]


def test_every_row_is_a_test_whose_name_begins_with_it() -> None:
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = {row.upper() for row in re.findall(r"^def test_([mcx]\d+)_", tests, re.MULTILINE)}
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
