"""The findings of ``leases doctor``: what is wrong with a set-up, and what to write instead.
Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
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


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """One server: its ``part`` in the set-up, its address without a password, and its version.

    ``latency`` is the median of some round trips, ``clock_ahead`` how far its clock is ahead of the
    local one, both in seconds. ``trouble``: why the server did not answer.
    """

    part: str
    address: str
    version: str | None = None
    latency: float | None = None
    clock_ahead: float | None = None
    trouble: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Examination:
    """The servers that were examined, and the findings; none if nothing is wrong."""

    servers: Sequence[ServerFacts]
    findings: Sequence[Finding]

    @property
    def healthy(self) -> bool:
        """Whether all findings are notes."""
        return all(finding.severity is Severity.NOTE for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "servers": [server.as_json() for server in self.servers],
            "findings": [finding.as_json() for finding in self.findings],
        }
