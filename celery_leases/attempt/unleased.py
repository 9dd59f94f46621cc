"""The object that replaces the lease where a body runs without one: in a direct call, in ``map``,
or outside any task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar
from uuid import uuid4

from celery_leases.attempt.effect_arguments import EffectReply, calls_of, unleased
from celery_leases.common.durations import Duration
from celery_leases.protocol.effects import VERIFY_AFTER, OnUncertain
from celery_leases.protocol.records import Attempt

T = TypeVar("T")


class Unleased:
    """Replaces the lease where a body runs without one: in a direct call, in ``map``, or outside
    any task.
    """

    key = ""
    token = ""
    fence = 0
    attempt = 0
    held = False
    lost = False
    previous: Attempt | None = None
    progress: Any = None

    def remaining(self) -> float:
        """Always 0: there is no lease."""
        return 0.0

    def check(self) -> None:
        """Do nothing: there is no lease to lose."""

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
        """Make the call, with an idempotency key of its own."""
        return unleased(uuid4().hex, calls_of(call, reference, verify, verify_after, uncertain))

    def save_progress(self, value: Any) -> None:
        """Do nothing: there is no next attempt."""

    def each(
        self, items: Iterable[T], *, name: str = "items", every: int | None = None
    ) -> Iterator[T]:
        """Iterate over *items*."""
        return iter(items)

    def complete(self, result: Any, session_or_connection: Any) -> Any:
        """There is no record to complete; returns *result*."""
        return result

    def guard(self, session_or_connection: Any) -> None:
        """There is no record to guard."""

    def __repr__(self) -> str:
        return "<no lease>"
