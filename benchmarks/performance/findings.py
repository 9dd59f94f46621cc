"""What a measurement gives: tables for the page, and the figures by which it is judged."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.performance.figures import Figure

Table = Sequence[Sequence[str]]
"""Rows of cells; the first row is the head."""


@dataclass(frozen=True)
class Finding:
    """*name* is that of the measurement; *text*, below its tables, says how it was made."""

    name: str
    tables: Sequence[Table]
    text: str
    facts: Mapping[str, Figure] = field(default_factory=dict)

    def markdown(self) -> str:
        """As it stands on the page."""
        return "\n\n".join([*(drawn(table) for table in self.tables), self.text])


def drawn(table: Table) -> str:
    """A table in Markdown."""
    head, *rows = table
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
