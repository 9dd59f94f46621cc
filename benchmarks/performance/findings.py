"""The result of a measurement: tables for the page, and figures for the goals."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.performance.figures import Figure

Table = Sequence[Sequence[str]]
"""Rows of cells; the first row has the heads."""


@dataclass(frozen=True)
class Finding:
    """*name* is that of the measurement; *text*, below its tables, explains how it was done."""

    name: str
    tables: Sequence[Table]
    text: str
    facts: Mapping[str, Figure] = field(default_factory=dict)

    def markdown(self) -> str:
        """The Markdown for the page."""
        return "\n\n".join([*(drawn(table) for table in self.tables), self.text])


def drawn(table: Table) -> str:
    """A table in Markdown."""
    head, *rows = table
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
