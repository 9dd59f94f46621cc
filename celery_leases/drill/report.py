"""What a drill has found: pure values, and why a takeover came later than its SLO allows.

Times are seconds. SLO: the service level objective for a takeover.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from celery_leases.protocol.tuning import Delivery

Who = Literal["its own call", "another call"]
StepName = Literal["child", "double", "pause", "worker"]

STEPS: dict[StepName, str] = {
    "child": "kill the pool process of a body; its own call must run again",
    "double": "deliver a message three times; the body must run once",
    "pause": "stop a worker for longer than the ttl; another call must take the key over, and the "
    "paused body must lose its lease",
    "worker": "kill a whole worker; another call must take the key over, and its own call must "
    "run again",
}
"""What each step does, in the order of the steps."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the settings of an app promise: *ttl* of the leases, and *delivery* of messages."""

    ttl: float
    slo: float
    delivery: Delivery

    def of(self, step: StepName, who: Who) -> float | None:
        """The longest that the takeover of *step* takes by the settings; ``None``: at once."""
        if step == "child":
            return None
        ttl = self.ttl
        return (
            self.delivery.key_free(ttl)
            if who == "another call"
            else self.delivery.work_resumed(ttl)
        )

    def why_missed(self, step: StepName, who: Who) -> str:
        """Which setting makes the takeover of *step* later than the SLO, and what to write."""
        timeout, sweep = self.delivery.visibility_timeout or 0.0, self._sweep()
        bound = self.of(step, who)
        if bound is None:
            return (
                "the worker found the death of its pool process late, or its stores did not answer "
                "at once; see what was seen"
            )
        if who == "its own call" and timeout >= self.slo:
            return (
                f"the broker: Redis delivers the message of a dead worker again after the "
                f"visibility_timeout of {timeout:g} s; lower it in broker_transport_options"
            )
        if who == "its own call" and timeout + sweep > self.slo:
            return (
                f"the sweep: after the visibility_timeout of {timeout:g} s a worker looks for such "
                f"messages every {sweep:g} s; lower unacked_restore_interval and "
                "unacked_restore_throttle in broker_transport_options"
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
            "what was seen"
        )

    def _sweep(self) -> float:
        return self.delivery.redelivery - (self.delivery.visibility_timeout or 0.0)


@dataclass(frozen=True, slots=True)
class Takeover:
    """How soon a call had the key: *took* is ``None`` if it had not within *waited*."""

    who: Who
    took: float | None
    waited: float
    bound: float | None
    why: str | None = None


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step has found: its takeovers, and what went wrong otherwise, a sentence each.

    ``seen``: what happened, each with the seconds since the step began.
    """

    step: StepName
    slo: float
    ttl: float
    takeovers: Sequence[Takeover] = ()
    wrong: Sequence[str] = ()
    seen: Sequence[tuple[float, str]] = field(default=())

    @property
    def met(self) -> bool:
        """Whether every takeover was in time, and nothing else was wrong."""
        return not self.wrong and all(each.why is None for each in self.takeovers)

    def as_json(self) -> dict[str, Any]:
        """As ``leases drill --json`` prints it."""
        return {
            "step": self.step,
            "met": self.met,
            "takeover_slo": self.slo,
            "ttl": self.ttl,
            "takeovers": [
                {
                    "who": each.who,
                    "took": each.took,
                    "waited": each.waited,
                    "bound": each.bound,
                    "why": each.why,
                }
                for each in self.takeovers
            ],
            "wrong": list(self.wrong),
            "seen": [{"at": at, "what": what} for at, what in self.seen],
        }
