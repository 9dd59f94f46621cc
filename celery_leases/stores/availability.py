"""For how long a database has been answering this process, or the main process of its worker.

With database leases, an expired lease proves that its holder died only if the database was
available: during an outage no process can renew a lease or write an outcome. So a process takes
over a running row only after the database has answered for so long that every live holder has
retried.
"""

from __future__ import annotations

import math
from mmap import mmap
from struct import Struct
from typing import Final
from zlib import crc32

from celery_leases.decide.after_run import LONGEST_SETTLE_PAUSE
from celery_leases.decide.claim import ALWAYS

GRACE: Final = LONGEST_SETTLE_PAUSE + 1.0
"""Seconds for which the database must have answered: a live holder retries its outcome within
``LONGEST_SETTLE_PAUSE`` and its renewal within 1 s, and either takes some time.
"""

SILENCE: Final = 1.0
"""The longest pause in seconds between two answers that counts as availability. An answer that took
longer does not count.
"""

NEVER: Final = -ALWAYS
"""A time before every other time."""


_FORM: Final = Struct("<?LdQd")
_memory: Final = mmap(-1, _FORM.size + 4)
"""Shared by a process and its forks: true once the main process of the worker has seen something,
what that was last, and a checksum, because a child may read while it is written.
"""


class Availability:
    """What the answers to this process show. Local times are in seconds, times of the database in
    microseconds.

    Threads share an instance without a lock: if two threads write at once, the database counts as
    available for less time, never for more. *database* identifies it among the forks of a process.
    """

    def __init__(self, grace: float = GRACE, database: str = "") -> None:
        self.grace = grace
        self._database = crc32(database.encode())
        #: When the last claim was answered, the database's clock in that answer, and for how long
        #: the database had been answering.
        self._last = (-math.inf, 0, 0.0)
        self._failed = -math.inf

    def answered(self, sent: float, at: float, now: int) -> int:
        """A statement that was sent at *sent* was answered at *at*; the database's clock said
        *now*. Returns :meth:`takeover_until` as it was without this answer.
        """
        until = self.takeover_until(sent)
        last, _, answering = self._last
        if self._broken(sent):
            answering = 0.0
        else:
            answering += min(max(0.0, at - last), SILENCE)
        self._last = at, now, answering
        return until

    def failed(self, at: float) -> None:
        """A statement failed without an answer."""
        self._failed = at

    def takeover_until(self, sent: float) -> int:
        """The time by the database's clock until which a claim sent at *sent* may take over a
        running row.

        This is the time of sending, as this process estimates it, or an earlier one. So a claim
        that a frozen database executes later takes over nothing. The claim adds a third of the
        row's ttl, which is the least that a live holder has left.
        """
        last, now, answering = self._last
        if not self.grace:
            return ALWAYS
        if self._broken(sent) or answering < self.grace:
            if not _memory[0]:
                return NEVER
            last, now, answering = self._seen_by_main_process()
            if sent - last > SILENCE or answering < self.grace:
                return NEVER
        return now + int((sent - last) * 1e6)  # another thread may have got its answer since

    def share(self) -> None:
        """Let the forks of this process use what it has seen. Only one thread of a worker's main
        process may call this.
        """
        seen = _FORM.pack(True, self._database, *self._last)
        _memory[:] = seen + crc32(seen).to_bytes(4, "little")

    def _seen_by_main_process(self) -> tuple[float, int, float]:
        read = _memory[:]
        seen, checksum = read[: _FORM.size], int.from_bytes(read[_FORM.size :], "little")
        _, database, last, now, answering = _FORM.unpack(seen)
        return (
            (last, now, answering)
            if crc32(seen) == checksum and database == self._database
            else (-math.inf, 0, 0.0)
        )

    def _broken(self, sent: float) -> bool:
        last = self._last[0]
        return sent - last > SILENCE or self._failed >= last
