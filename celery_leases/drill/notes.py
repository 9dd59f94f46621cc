"""What the workers of a drill have seen, as lines of a file that the drill reads."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Note:
    """Something happened to *key* at *at*, in seconds of this machine's monotonic clock.

    ``worker`` is the number of the drill's worker, ``pid`` the process that wrote the note.
    """

    what: str
    at: float
    worker: int
    pid: int
    key: str = ""
    call: str = ""
    more: str = ""


class Notes:
    """A file that several processes append to; each note is one write, so that a killed process
    leaves whole lines.
    """

    def __init__(self, path: Path, worker: int = 0) -> None:
        self._path = path
        self._worker = worker
        self._read_to = 0
        self._found: list[Note] = []

    def write(self, what: str, key: str = "", call: str = "", more: str = "") -> Note:
        """Append a note with the time of now; returns it."""
        note = Note(what, time.monotonic(), self._worker, os.getpid(), key, call, more)
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, json.dumps(asdict(note)).encode() + b"\n")
        finally:
            os.close(descriptor)
        return note

    def all(self) -> list[Note]:
        """All notes so far, in the order in which they were written."""
        self._found.extend(self._next())
        return self._found

    def _next(self) -> Iterator[Note]:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._read_to)
            written = file.read()
        whole = written[: written.rfind(b"\n") + 1]
        self._read_to += len(whole)
        for line in whole.splitlines():
            yield Note(**json.loads(line))
