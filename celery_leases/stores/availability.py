"""For how long a database has been answering claims, as one process has seen it.

With database leases, an expired lease shows that its holder has died only if the database was
available to the holder: during an outage no process can renew a lease or write an outcome. So a
process takes a running row over only after it has seen the database answer for long enough that
every live holder has tried again.
"""

from __future__ import annotations

import math
from typing import Final

from celery_leases.protocol.claims import ALWAYS
from celery_leases.protocol.settlement import LONGEST_SETTLE_PAUSE

GRACE: Final = LONGEST_SETTLE_PAUSE + 1.0
"""Seconds for which the database must have answered: a live holder retries its outcome within
``LONGEST_SETTLE_PAUSE`` and its renewal within 1 s, and either takes some time.
"""

SILENCE: Final = 1.0
"""Seconds without a claim after which the evidence is void; an answer that took longer does not
count.
"""

NEVER: Final = -ALWAYS
"""A time before every other time."""


class Evidence:
    """The evidence from claims. Times are seconds of a local clock; times of the database are
    microseconds.

    Threads share it without a lock: a thread that overwrites another's answer makes the evidence
    weaker, never stronger.
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

    def takes_until(self, sent: float) -> int:
        """Until which time of the database's clock a claim sent at *sent* may take a running row
        over.

        It is the time of sending, as well as this process can tell, so a claim that a frozen
        database executes later takes nothing. The claim adds a third of the row's ttl, which is the
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
