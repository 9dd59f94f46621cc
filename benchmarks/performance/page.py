"""The parts of ``docs/explanation/performance.md`` and the README that measurements write."""

from pathlib import Path
from typing import Final

from benchmarks import pages
from benchmarks.environments import ROOT

PAGE: Final = ROOT / "docs/explanation/performance.md"
README: Final = ROOT / "README.md"
BEGIN: Final = "<!-- {}: written by make bench -->"
END: Final = "<!-- end of {} -->"


def shown(name: str, page: Path = PAGE) -> str:
    """The part of a measurement on the page; raises ValueError without its marks."""
    return pages.part(page, BEGIN.format(name), END.format(name))


def show(name: str, text: str, page: Path = PAGE) -> None:
    """Replace the part of a measurement on the page; raises ValueError without its marks."""
    pages.put(page, BEGIN.format(name), END.format(name), text)
