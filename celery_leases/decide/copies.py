"""Numbers the messages of a call, and names the marks that are stored about them beside its key."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Self

from celery_leases.keys import bounded

_WRITTEN: Final = re.compile(r"([1-9][0-9]{0,17}) ([0-9a-f]{32})", re.ASCII)

WAITER: Final = "waiter:"
_WAITER_MARK: Final = re.compile(WAITER + r"(.+?)/[0-9]+(?:/[0-9]{10,})?", re.ASCII | re.DOTALL)


@dataclass(frozen=True, slots=True, order=True)
class Copy:
    """One message of a call. Copies are ordered: a copy is later than the delivery that has
    published it.

    Number 0 is a message that no leased delivery has published. If one message is delivered twice,
    two copies with one number are published; the nonce distinguishes and orders them.

    A delivery is superfluous only if a later copy is known to be published. So the last copy of a
    call is never superfluous, even if the mark store has lost a mark, has not executed a command,
    or returns an old value.
    """

    number: int = 0
    nonce: str = ""

    def __str__(self) -> str:
        return f"{self.number} {self.nonce}"

    def after(self, nonce: str) -> Self:
        """The next copy, with a *nonce* of 32 hexadecimal digits."""
        return type(self)(self.number + 1, nonce)

    @classmethod
    def read(cls, text: object) -> Self | None:
        """The copy that ``str()`` has written; ``None`` for another text, which proves no copy."""
        found = _WRITTEN.fullmatch(text) if isinstance(text, str) else None
        return cls(int(found[1]), found[2]) if found is not None else None


UNCOPIED: Final = Copy()
"""A message that no leased delivery has published."""


def callbacks_mark(call_id: str) -> str:
    """The name of the mark that says: the callbacks of this call are sent."""
    return bounded(f"callbacks:{call_id}")


def waiter_mark(call_id: str, retries: int, failure_fence: int | None = None) -> str:
    """The name of the mark that has the latest copy of a call, after so many of Celery's *retries*.

    A message that was published after the failure under *failure_fence* is not a copy of the
    earlier messages, and has a mark of its own.
    """
    return bounded(f"{WAITER}{call_id}/{retries}" + (f"/{failure_fence}" if failure_fence else ""))


def waiting_call(name: str, value: str) -> str | None:
    """The id of the call whose latest copy a mark has; ``None`` for another mark, for that of a
    call that has ended, and for an id that is too long for the name.
    """
    found = _WAITER_MARK.fullmatch(name)
    return found[1] if found is not None and Copy.read(value) is not None else None
