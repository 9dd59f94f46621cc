"""How long a key waits after its n-th failure: exponential growth up to a cap, with jitter that
only shortens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from celery_leases.common.durations import Duration, seconds
from celery_leases.errors import LeaseConfigurationError

SIX_HOURS: Final = 6 * 3600.0
QUIET_MINIMUM: Final = 86_400.0
MANY: Final = 10**15
"""The highest count of failures that is used: no key reaches it, and a float can hold the
result.
"""


@dataclass(frozen=True, slots=True, init=False)
class CooldownPolicy:
    """The waits of a key: ``base`` seconds, times ``factor`` at every further failure, never above
    ``cap``.

    ``jitter`` is the part of a wait that chance may take away: 0.5 makes it U(0.5, 1) of its full
    length, so the full length is an upper bound that can be shown to people. Durations may be
    written in any form of :func:`~celery_leases.common.durations.seconds`; a value out of range
    raises :class:`LeaseConfigurationError`.
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
        put = object.__setattr__  # the way into a frozen instance
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
        """*value* itself if it is a policy; else one with that duration as its base, and a cap of 6
        h or the base.

        Raises :class:`LeaseConfigurationError`, which calls the value *what*.
        """
        if isinstance(value, CooldownPolicy):
            return value
        base = seconds(value, what)
        return cls(base, cap=max(base, SIX_HOURS))

    @property
    def quiet(self) -> float:
        """Seconds without a failure after which growth starts anew: twice the cap, at least a
        day.
        """
        return max(2 * self.cap, QUIET_MINIMUM)

    def longest(self, n: int) -> float:
        """The upper bound of the wait after failure *n* (1 is the first), in seconds."""
        steps = min(max(n, 1), MANY) - 1
        # Compared by logarithms first: the power itself overflows long before n is large.
        if steps * math.log(self.factor) > math.log(self.cap / self.base) + 1:
            return self.cap
        return min(self.cap, self.base * self.factor**steps)

    def delay(self, n: int, rand: float) -> float:
        """The wait after failure *n* in seconds; *rand* is a random number in [0, 1)."""
        return self.longest(n) * (1 - self.jitter * (1 - rand))


def _number(name: str, value: object, least: float, most: float) -> float:
    # The chained comparison refuses NaN as well.
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise LeaseConfigurationError(
            f"CooldownPolicy: {name}={value!r} is not usable; write a number from {least:g} to {most:g}"
        )
    return float(value)
