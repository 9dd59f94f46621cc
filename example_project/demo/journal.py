"""The events of a demo, one JSON line each. All its processes write them, and the demo reads them.

Times are seconds of the machine's monotonic clock.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from example_project.demo import jsonlines

FILE = "DEMO_JOURNAL"
WORKER = "DEMO_WORKER"
WITHOUT_LEASES = "DEMO_WITHOUT_LEASES"


def write(what: str, **fields: Any) -> None:
    """Append one event."""
    event = {
        "t": time.monotonic(),
        "what": what,
        "pid": os.getpid(),
        "worker": os.environ.get(WORKER),
        **fields,
    }
    jsonlines.append(Path(os.environ[FILE]), event)


class Journal:
    """Reads the journal as it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0
        self.events: list[Mapping[str, Any]] = []

    def news(self) -> list[Mapping[str, Any]]:
        """The events since the last call, in the order of their times."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as journal:
            journal.seek(self._read)
            lines = journal.read().splitlines(keepends=True)
        whole = [line for line in lines if line.endswith(b"\n")]
        self._read += sum(len(line) for line in whole)
        found = sorted((json.loads(line) for line in whole), key=lambda event: float(event["t"]))
        self.events += found
        return found
