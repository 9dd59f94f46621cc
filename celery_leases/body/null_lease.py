"""The object that stands for the lease in code that runs without one: in a direct call of a task,
in ``map``, or outside any task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar
from uuid import uuid4

from celery_leases.body.effects import (
    EffectReply,
    call_without_lease,
    checked_arguments,
)
from celery_leases.effect import VERIFY_AFTER, OnUncertain
from celery_leases.record import Attempt
from celery_leases.text.durations import Duration

T = TypeVar("T")


class Unleased:
    """Has the methods of a lease, in code that runs without one. Nothing is stored."""

    key = ""
    token = ""
    fence = 0
    attempt = 0
    held = False
    lost = False
    previous: Attempt | None = None
    progress: Any = None

    def remaining(self) -> float:
        """Return 0."""
        return 0.0

    def check(self) -> None:
        """Do nothing."""

    def extend(self, seconds: Duration) -> None:
        """Do nothing."""

    def effect(
        self,
        name: str,
        call: Callable[[str], Any],
        *,
        reference: Callable[[Any], Any] | None = None,
        verify: Callable[[str], Any] | None = None,
        verify_after: float = VERIFY_AFTER,
        uncertain: OnUncertain = "stop",
    ) -> EffectReply:
        """Make the call, with a random idempotency key."""
        return call_without_lease(
            uuid4().hex, checked_arguments(call, reference, verify, verify_after, uncertain)
        )

    def save_progress(self, value: Any) -> None:
        """Do nothing."""

    def each(
        self, items: Iterable[T], *, name: str = "items", every: int | None = None
    ) -> Iterator[T]:
        """Iterate over *items*."""
        return iter(items)

    def complete(self, result: Any, session_or_connection: Any) -> Any:
        """Return *result*; there is no record to complete."""
        return result

    def guard(self, session_or_connection: Any) -> None:
        """Do nothing; there is no record to guard."""

    def __repr__(self) -> str:
        return "<no lease>"
