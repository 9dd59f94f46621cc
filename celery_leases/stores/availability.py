"""For how long a database has been answering the claims of this process.

With database leases, an expired lease proves that its holder died only if the database was
available: during an outage no process can renew a lease or write an outcome. So a process takes
over a running row only after the database has answered it for so long that every live holder has
retried.
"""

from __future__ import annotations

import math
from typing import Final

from celery_leases.protocol.claim_rules import ALWAYS
from celery_leases.protocol.settlement import LONGEST_SETTLE_PAUSE

GRACE: Final = LONGEST_SETTLE_PAUSE + 1.0
"""Seconds for which the database must have answered: a live holder retries its outcome within
``LONGEST_SETTLE_PAUSE`` and its renewal within 1 s, and either takes some time.
"""

SILENCE: Final = 1.0
"""The longest pause in seconds between two claims that counts as availability. An answer that took
longer does not count.
"""

NEVER: Final = -ALWAYS
"""A time before every other time."""


class Availability:
    """What the claims of this process show. Local times are in seconds, times of the database in
    microseconds.

    Threads share an instance without a lock: if two threads write at once, the database counts as
    available for less time, never for more.
    """

    def __init__(self, grace: float = GRACE) -> None:
        self.grace = grace
        #: When the last claim was answered, the database's clock in that answer, and for how long
        #: the database had been answering.
        self._last = (-math.inf, 0, 0.0)
        self._failed = -math.inf

    def answered(self, sent: float, at: float, now: int) -> None:
        """A claim that was sent at *sent* was answered at *at*; the database's clock said *now*."""
        last, _, answering = self._last
        if self._broken(sent):
            answering = 0.0
        else:
            answering += min(max(0.0, at - last), SILENCE)
        self._last = at, now, answering

    def failed(self, at: float) -> None:
        """A claim failed without an answer."""
        self._failed = at

    def takeover_until(self, sent: float) -> int:
        """The time by the database's clock until which a claim sent at *sent* may take over a
        running row.

        This is the time of sending, as this process estimates it. So a claim that a frozen database
        executes later takes over nothing. The claim adds a third of the row's ttl, which is the
        least that a live holder has left.
        """
        last, now, answering = self._last
        if not self.grace:
            return ALWAYS
        if self._broken(sent) or answering < self.grace:
            return NEVER
        return now + int(max(0.0, sent - last) * 1e6)

    def _broken(self, sent: float) -> bool:
        last = self._last[0]
        return sent - last > SILENCE or self._failed >= last
