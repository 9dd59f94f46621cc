"""The journal of bodies and workers: records of one size, each appended in one write."""

import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

RECORD: Final = struct.Struct("=c7xd48s")

BEGUN: Final = "B"
ENDED: Final = "E"
ANSWERED: Final = "A"
PUT_BACK: Final = "P"
"""The kinds of records: a body begins, a body ends, a task has succeeded, a call is
rescheduled.
"""


class Entry(NamedTuple):
    """One record: the kind, the key, and the time in seconds since the epoch."""

    what: str
    time: float
    key: str


class Writer:
    """Appends the wanted kinds of records to a file, which every process opens itself."""

    def __init__(self, path: str, wanted: str) -> None:
        self.wanted = wanted
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def note(self, what: str, key: str) -> None:
        """Append one record, if its kind is wanted; keys are cut at 48 characters."""
        if what in self.wanted:
            os.write(self._file, RECORD.pack(what.encode(), time.time(), key.encode()[:48]))


class Journal:
    """Reads the file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __len__(self) -> int:
        """The number of whole records."""
        return self.path.stat().st_size // RECORD.size if self.path.exists() else 0

    def entries(self, start: int = 0) -> list[Entry]:
        """The records from the *start*-th, in the order in which they were written."""
        return list(self._read(start))

    def _read(self, start: int) -> Iterator[Entry]:
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(start * RECORD.size)
            data = file.read()
        for what, moment, key in RECORD.iter_unpack(data[: len(data) // RECORD.size * RECORD.size]):
            yield Entry(what.decode(), moment, key.rstrip(b"\0").decode())
