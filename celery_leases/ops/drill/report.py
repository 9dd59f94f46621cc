"""The results of a drill as values, and the reason why a takeover missed its SLO.

Times are seconds. The SLO is the service level objective for a takeover.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from celery_leases.ops.tuning import Delivery

Taker = Literal["its own call", "another call"]
StepName = Literal["child", "double", "pause", "worker"]

STEPS: dict[StepName, str] = {
    "child": "kill the pool process that runs a call; the call must run again",
    "double": "deliver a message three times; the task must run once",
    "pause": "pause a worker for longer than the ttl; another call must take the key over, and the "
    "paused call must lose its lease",
    "worker": "kill a whole worker; another call must take the key over, and the call of the dead "
    "worker must run again",
}
"""The steps in their order, and what each one does."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """How long takeovers may take with the app's settings: the *ttl* of leases and the *delivery*
    of messages.
    """

    ttl: float
    slo: float
    delivery: Delivery

    def of(self, step: StepName, who: Taker) -> float | None:
        """The longest time that the takeover of *step* may take; ``None``: at once."""
        if step == "child":
            return None
        ttl = self.ttl
        return (
            self.delivery.key_free(ttl)
            if who == "another call"
            else self.delivery.work_resumed(ttl)
        )

    def why_missed(self, step: StepName, who: Taker) -> str:
        """Which setting makes the takeover of *step* miss the SLO, and what to write instead."""
        bound = self.of(step, who)
        if bound is None:
            return (
                "the worker noticed the death of its pool process late, or its stores answered "
                "late; see the events"
            )
        if bound > self.slo:
            longest = self.delivery.longest_ttl(self.slo)
            advice = (
                f"write lease_ttl={int(longest)} or less"
                if longest is not None
                else "no lease_ttl of 10 s or more meets this SLO"
            )
            return (
                f"the ttl: the key of a dead worker is free when its lease of {self.ttl:g} s has "
                f"ended; {advice}"
            )
        return (
            f"not the settings: they allow {bound:.0f} s; this machine or a server was slow, see "
            "the events"
        )


@dataclass(frozen=True, slots=True)
class Takeover:
    """The seconds until a call had the key; *took* is ``None`` if it had not after *waited*."""

    who: Taker
    took: float | None
    waited: float
    bound: float | None
    why: str | None = None


@dataclass(frozen=True, slots=True)
class StepReport:
    """The result of one step: its takeovers, and a sentence for each other problem.

    ``seen``: the events, each with the seconds since the step began.
    """

    step: StepName
    slo: float
    ttl: float
    takeovers: Sequence[Takeover] = ()
    wrong: Sequence[str] = ()
    seen: Sequence[tuple[float, str]] = ()

    @property
    def met(self) -> bool:
        """Whether every takeover was in time and there was no other problem."""
        return not self.wrong and all(each.why is None for each in self.takeovers)

    def as_json(self) -> dict[str, Any]:
        """The values that ``leases drill --json`` prints."""
        return {
            "step": self.step,
            "met": self.met,
            "takeover_slo": self.slo,
            "ttl": self.ttl,
            "takeovers": [asdict(each) for each in self.takeovers],
            "wrong": [*self.wrong],
            "seen": [{"at": at, "what": what} for at, what in self.seen],
        }
