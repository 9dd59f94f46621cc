"""What an examination of a set-up finds: what is wrong with it, what happens, and what to write.
Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Severity(StrEnum):
    """How bad a finding is.

    ``error``: a worker does not start, or promises are broken. ``warning``: a worker says it each
    time it starts. ``note``: only the examination says it.
    """

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong: ``code`` is its stable name, ``problem`` what happens, ``advice``
    what to write.
    """

    code: str
    severity: Severity
    problem: str
    advice: str

    @property
    def text(self) -> str:
        """All of it in one line, as a worker logs it."""
        return f"{self.problem}; {self.advice}" if self.advice else self.problem

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What is known of one server: which ``part`` it plays, its address without a password, its
    version, the median of some round trips and how far its clock is ahead, both in seconds.

    ``trouble``: why it did not answer.
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
    """What was looked at, and what was found; nothing, where all is well."""

    servers: Sequence[ServerFacts]
    findings: Sequence[Finding]

    @property
    def healthy(self) -> bool:
        """Whether nothing was found but notes."""
        return all(finding.severity is Severity.NOTE for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "servers": [server.as_json() for server in self.servers],
            "findings": [finding.as_json() for finding in self.findings],
        }
