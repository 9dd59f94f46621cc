"""Events that the workers of a drill write to a file, and that the drill reads."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Note:
    """An event of *key* at the time *at*, in seconds of this machine's monotonic clock.

    ``worker`` is the number of the drill's worker, 0 for the drill itself; ``pid`` is the process
    that wrote the note.
    """

    what: str
    at: float
    worker: int
    pid: int
    key: str = ""
    call: str = ""
    more: str = ""


class Notes:
    """A file that several processes append to.

    Each note is one write, so that a killed process does not leave half a line.
    """

    def __init__(self, path: Path, worker: int = 0) -> None:
        self._path = path
        self._worker = worker
        self._offset = 0
        self._notes: list[Note] = []

    def write(self, what: str, key: str = "", call: str = "", more: str = "") -> Note:
        """Append a note with the current time, and return it."""
        note = Note(what, time.monotonic(), self._worker, os.getpid(), key, call, more)
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, json.dumps(asdict(note)).encode() + b"\n")
        finally:
            os.close(descriptor)
        return note

    def all(self) -> list[Note]:
        """All notes so far, in the order in which they were written."""
        self._notes.extend(self._read_new())
        return self._notes

    def _read_new(self) -> Iterator[Note]:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            written = file.read()
        whole = written[: written.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            yield Note(**json.loads(line))
