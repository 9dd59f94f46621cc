"""Findings: what is wrong with a set-up, and what to write instead. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Severity(StrEnum):
    """How serious a finding is.

    ``error``: a worker does not start, or the guarantees do not hold. ``warning``: a worker logs it
    each time it starts. ``note``: only ``leases doctor`` shows it.
    """

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong: ``code`` is its stable name, ``problem`` says what happens, and
    ``advice`` what to write.
    """

    code: str
    severity: Severity
    problem: str
    advice: str

    @property
    def text(self) -> str:
        """Problem and advice in one line, as a worker logs them."""
        return f"{self.problem}; {self.advice}" if self.advice else self.problem

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)
