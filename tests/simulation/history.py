"""What happens in a run, in order."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Note:
    """Something that happened, at a true time in seconds."""

    at: float
    what: str
    details: dict[str, Any]

    def __str__(self) -> str:
        details = " ".join(f"{name}={value}" for name, value in self.details.items())
        return f"{self.at:10.4f} {self.what} {details}"


@dataclass(slots=True)
class Row:
    """What a record said; ``retry_at`` in true time."""

    key: str
    task: str
    state: str
    fence: int
    owner: str
    call: str
    ended: str | None
    result: str | None
    retry_at: float
    resumes: bool
    reason: str | None = None
    crashes: int = 0
    #: When its retention is over, in true time.
    expires_at: float = math.inf
    #: The crashes in a row of each call.
    crashes_of: Mapping[str, int] = field(default_factory=dict)
    #: How its attempts ended, as far as it has them, the latest last.
    ends: tuple[str, ...] = ()
    #: When its lease ends, in true time, if the row is the lease.
    lease_until: float | None = None

    def __str__(self) -> str:
        until = f" until {self.retry_at:.2f}" if self.retry_at else ""
        return f"{self.state}{until} {self.ended} {self.call} {self.owner} {self.fence}"
