"""What bodies and workers write down while they run: records of one size, each appended in one
write.
"""

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
"""What can be written down: a body begins, a body ends, a task has succeeded, a call is put
back.
"""


class Entry(NamedTuple):
    """One record: what happened to which key, and when, in seconds since the epoch."""

    what: str
    time: float
    key: str


class Writer:
    """Appends to one file what is wanted of it; every process opens it by itself."""

    def __init__(self, path: str, wanted: str) -> None:
        self.wanted = wanted
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def note(self, what: str, key: str) -> None:
        """Append one record, if it is wanted; a key counts up to its 48th character."""
        if what in self.wanted:
            os.write(self._file, RECORD.pack(what.encode(), time.time(), key.encode()[:48]))


class Journal:
    """The reader's side."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __len__(self) -> int:
        """How many whole records there are."""
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
