"""For how long a database has been answering claims, as one process has seen it.

Where the claimed row is the lease, a lapsed lease says that its holder has died only if the database was there for the
holder: during an outage nobody can renew or write an outcome. So a running row is taken over only by a process that has
seen the database answer for long enough, for every living holder to have tried again.
"""

from __future__ import annotations

import math
from typing import Final

from celery_leases.core.claims import ALWAYS
from celery_leases.core.outcomes import LONGEST_SETTLE_PAUSE

GRACE: Final = LONGEST_SETTLE_PAUSE + 1.0
"""Seconds for which the database must have answered: a living holder tries to write its outcome again within
``LONGEST_SETTLE_PAUSE`` and tries to renew within 1 s, and either takes a moment."""

SILENCE: Final = 1.0
"""Seconds without a claim after which nothing is known any more; an answer that took longer counts for no more."""

NEVER: Final = -ALWAYS
"""A moment before every other one."""


class Evidence:
    """What claims have shown. Times are seconds of a local clock, moments of the database are microseconds.

    Threads share it without a lock: one that overwrites another's answer makes the evidence weaker, never stronger.
    """

    def __init__(self, grace: float = GRACE) -> None:
        self.grace = grace
        #: When the last claim was answered, what the database's clock said, for how long it had been answering.
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
        """A claim was not answered."""
        self._failed = at

    def takes_until(self, sent: float) -> int:
        """Until which moment of the database a claim sent at *sent* may take a running row over.

        It is the moment of sending, as well as this process can tell: a claim that a frozen database carries out later
        must not. The claim allows a third of the row's ttl on top, which a living holder has left at the least.
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
