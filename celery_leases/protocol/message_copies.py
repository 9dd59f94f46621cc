"""Which copy of a call a message is, and the marks about its copies that stand beside its key."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Self

from celery_leases.protocol.keys import bounded

_WRITTEN: Final = re.compile(r"([1-9][0-9]{0,17}) ([0-9a-f]{32})", re.ASCII)


@dataclass(frozen=True, slots=True, order=True)
class Copy:
    """One message of a call. Copies are ordered: the copy that a delivery publishes is later than
    the delivery's own.

    Number 0 is a message that no leased delivery has published. Two deliveries of one message
    publish two copies with one number; the nonce distinguishes and orders them.

    A delivery is superfluous only if a later copy than its own is known to be published. So the
    last copy of a call is never superfluous, even if a store of marks lost a mark, did not execute
    a command, or returns an old value.
    """

    number: int = 0
    nonce: str = ""

    def __str__(self) -> str:
        return f"{self.number} {self.nonce}"

    def after(self, nonce: str) -> Self:
        """The next copy, under a *nonce* of 32 hexadecimal digits."""
        return type(self)(self.number + 1, nonce)

    @classmethod
    def read(cls, text: object) -> Self | None:
        """The copy that ``str()`` has written; ``None`` for any other text, which does not prove
        that a copy exists.
        """
        found = _WRITTEN.fullmatch(text) if isinstance(text, str) else None
        return cls(int(found[1]), found[2]) if found is not None else None


UNCOPIED: Final = Copy()
"""A message that no leased delivery has published."""


def callbacks_mark(call_id: str) -> str:
    """The mark that the callbacks of a call have been sent."""
    return bounded(f"callbacks:{call_id}")


def waiter_mark(call_id: str, retries: int, failure_fence: int | None = None) -> str:
    """The mark of the latest copy of a call; *retries* counts Celery's retries of the call.

    A fresh message that waits for the failure under *failure_fence* is not a copy of the earlier
    ones, and has a mark of its own.
    """
    return bounded(f"waiter:{call_id}/{retries}" + (f"/{failure_fence}" if failure_fence else ""))
