"""The table of ``docs/explanation/comparison.md``: formatting, reading and comparing it."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import pages
from benchmarks.environments import ROOT
from benchmarks.peers.columns import Package
from benchmarks.peers.observations import Case, Observed

PAGE = ROOT / "docs/explanation/comparison.md"
BEGIN = "<!-- written by python -m benchmarks.peers --write -->"
END = "<!-- end of the table -->"
NUMBERS = "¹²³⁴⁵⁶⁷⁸⁹"

Cells = Mapping[tuple[str, str], Observed]
"""The observations, by row and name of the package."""


def drawn(cases: Sequence[Case], packages: Sequence[Package], cells: Cells) -> str:
    """The table with its footnotes; "?" where nothing was observed."""
    notes: list[str] = []

    def cell(case: Case, package: Package) -> str:
        if note := case.unfit.get(package.name):
            if note not in notes:
                notes.append(note)
            return f"n/a {NUMBERS[notes.index(note)]}"
        return str(cells.get((case.row, package.name), "?"))

    titles = [f"{package.title} {package.version}".strip() for package in packages]
    lines = [["", "case", *titles], ["---"] * (len(packages) + 2)]
    lines += [
        [case.row, case.title, *(cell(case, package) for package in packages)] for case in cases
    ]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return "\n".join(
        [table, "", *(f"{NUMBERS[number]} {note}<br>" for number, note in enumerate(notes))]
    ).strip()


def on_page(page: Path = PAGE) -> str:
    """The table that the page shows; raises ValueError without its marks."""
    return pages.part(page, BEGIN, END)


def put_on_page(table: str, page: Path = PAGE) -> None:
    """Replace the table that the page shows; raises ValueError without its marks."""
    pages.put(page, BEGIN, END, table)


def differences(shown: str, observed: str) -> list[str]:
    """One line for each line of the page that differs from the observations."""
    ours, theirs = observed.splitlines(), shown.splitlines()
    return [f"- {line}" for line in theirs if line not in ours] + [
        f"+ {line}" for line in ours if line not in theirs
    ]
