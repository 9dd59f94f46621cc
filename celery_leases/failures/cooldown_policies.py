"""The delay after the n-th failure: exponential growth up to a cap, with jitter that only shortens
it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from celery_leases.errors import LeaseConfigurationError
from celery_leases.text.durations import Duration, seconds

SIX_HOURS: Final = 6 * 3600.0
SHORTEST_QUIET: Final = 86_400.0
"""Seconds without a failure after which counts start at zero, at least."""
MANY: Final = 10**15
"""The highest count of failures that is used: no key reaches it, and a float can hold it."""


@dataclass(frozen=True, slots=True, init=False)
class CooldownPolicy:
    """The delays after failures: ``base`` seconds, times ``factor`` at each further failure, up to
    ``cap``.

    ``jitter`` is the part of a delay that is random: with 0.5 the delay is uniformly distributed
    between half of its full length and its full length, which is the upper bound that users see.
    Durations may have any form of :func:`~celery_leases.text.durations.seconds`. A value out of
    range raises :class:`LeaseConfigurationError`.
    """

    base: float
    factor: float
    cap: float
    jitter: float

    def __init__(
        self,
        base: Duration = 300.0,
        factor: float = 2.0,
        cap: Duration = SIX_HOURS,
        jitter: float = 0.5,
    ) -> None:
        put = object.__setattr__  # the instance is frozen
        put(self, "base", seconds(base, "CooldownPolicy: base"))
        put(self, "cap", seconds(cap, "CooldownPolicy: cap"))
        put(self, "factor", _number("factor", factor, 1, 1000))
        put(self, "jitter", _number("jitter", jitter, 0, 1))
        if self.cap < self.base:
            raise LeaseConfigurationError(
                f"CooldownPolicy: cap={self.cap:g} is below base={self.base:g} (seconds); raise cap or lower base"
            )

    @classmethod
    def of(cls, value: CooldownPolicy | Duration, what: str = "a cooldown") -> CooldownPolicy:
        """*value* itself if it is a policy; otherwise a policy with that duration as its base, and
        a cap of 6 h, or of the base if that is longer.

        Raises :class:`LeaseConfigurationError`, in which the value is called *what*.
        """
        if isinstance(value, CooldownPolicy):
            return value
        base = seconds(value, what)
        return cls(base, cap=max(base, SIX_HOURS))

    @property
    def quiet(self) -> float:
        """Seconds without a failure after which the delays start at ``base`` again: twice the cap,
        at least a day.
        """
        return max(2 * self.cap, SHORTEST_QUIET)

    def longest(self, n: int) -> float:
        """The upper bound of the delay after failure *n* (1 is the first), in seconds."""
        steps = min(max(n, 1), MANY) - 1
        # Logarithms are compared first, because the power itself may overflow.
        if steps * math.log(self.factor) > math.log(self.cap / self.base) + 1:
            return self.cap
        return min(self.cap, self.base * self.factor**steps)

    def delay(self, n: int, rand: float) -> float:
        """The delay after failure *n* in seconds; *rand* is a random number in [0, 1)."""
        return self.longest(n) * (1 - self.jitter * (1 - rand))


def _number(name: str, value: object, least: float, most: float) -> float:
    # The chained comparison is false for NaN.
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise LeaseConfigurationError(
            f"CooldownPolicy: {name}={value!r} is not usable; write a number from {least:g} to {most:g}"
        )
    return float(value)
