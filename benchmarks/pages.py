"""The parts of pages that a benchmark writes, each between two marks."""

from pathlib import Path


def part(page: Path, begin: str, end: str) -> str:
    """The text between the two marks; raises ValueError without them."""
    _, rest = page.read_text().split(begin)
    shown, _ = rest.split(end)
    return shown.strip("\n")


def put(page: Path, begin: str, end: str, text: str) -> None:
    """Replace the text between the two marks; raises ValueError without them."""
    before, rest = page.read_text().split(begin)
    _, after = rest.split(end)
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}")
