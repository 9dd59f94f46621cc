"""``docs/performance.md`` and the README: what the measurements write there, each between marks of
its own.
"""

from pathlib import Path
from typing import Final

from benchmarks import pages
from benchmarks.environments import ROOT

PAGE: Final = ROOT / "docs" / "performance.md"
README: Final = ROOT / "README.md"
BEGIN: Final = "<!-- {}: written by make bench -->"
END: Final = "<!-- end of {} -->"


def shown(name: str, page: Path = PAGE) -> str:
    """What the page shows of a measurement; raises ValueError without its marks."""
    return pages.part(page, BEGIN.format(name), END.format(name))


def show(name: str, text: str, page: Path = PAGE) -> None:
    """Replace what the page shows of a measurement; raises ValueError without its marks."""
    pages.put(page, BEGIN.format(name), END.format(name), text)
