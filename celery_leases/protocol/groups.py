"""The gate of a cooldown group: a failure of a shared dependency closes it for all keys of the
group, and a successful probe opens it. Pure.

A gate is *open* (no gate is stored), *closed* for some time, or *half-open*: its time is over, and
one probe may test the dependency. All times are seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from celery_leases.failures.cooldown_policies import CooldownPolicy


@dataclass(frozen=True, slots=True)
class Gate:
    """A gate that is not open, as its store returned it.

    ``closed_for``: how long no body starts; 0 when it is half-open. ``trips``: how often it closed
    in a row. ``probe``: the token of the attempt that probes, whose slot lasts ``probe_for`` unless
    it is renewed. ``reason``, ``rule`` and ``message`` describe what closed it, as for a single
    key.
    """

    group: str
    trips: int
    closed_for: float
    reason: str
    rule: str | None = None
    message: str = ""
    probe: str | None = None
    probe_for: float = 0.0

    @property
    def half_open(self) -> bool:
        """Whether a probe may start, or is running."""
        return self.closed_for <= 0

    @property
    def blocked_for(self) -> float:
        """For how long no body can start: the time until the gate is half-open, or the rest of its
        probe's slot.
        """
        return self.closed_for if self.closed_for > 0 else self.probe_for


@dataclass(frozen=True, slots=True)
class Closing:
    """A failure of the group. ``policy`` grows with each trip. ``server_delay`` is the wait from
    the response, jitter included; it counts ``instead`` of the policy, or if it is the longer of
    the two.
    """

    policy: CooldownPolicy
    reason: str
    rule: str | None = None
    message: str = ""
    server_delay: float | None = None
    instead: bool = True

    def wait(self, trips: int) -> float:
        """Seconds to close for, the *trips*-th time in a row."""
        if self.server_delay is not None and self.instead:
            return self.server_delay
        return max(self.server_delay or 0.0, self.policy.longest(trips))


def closed(group: str, gate: Gate | None, closing: Closing, token: str) -> Gate:
    """The gate after *closing*, as the attempt with *token* found it; the current time is extended,
    never shortened.

    The gate trips once per closing: a failure does not trip it while it is closed, nor when it is
    half-open and the body began before it closed.
    """
    if gate is None:
        trips, standing = 1, 0.0
    else:
        trips, standing = gate.trips + (gate.half_open and gate.probe == token), gate.closed_for
    wait = closing.wait(trips)
    shut = Gate(group, trips, wait, closing.reason, closing.rule, closing.message)
    if gate is None:
        return shut
    if standing >= wait:
        shut = gate
    given_back = gate.probe == token
    return replace(
        shut,
        probe=None if given_back else gate.probe,
        probe_for=0.0 if given_back else gate.probe_for,
    )


def admits(gate: Gate | None, token: str) -> bool:
    """Whether a body may start: the gate is open, or half-open and its probe's slot is free or
    belongs to *token*.
    """
    return gate is None or (gate.half_open and gate.probe in (None, token))


def gate_retention(gate: Gate, policy: CooldownPolicy) -> float:
    """How long a store keeps a closed gate: its time, and the quiet time after which its trips no
    longer count.
    """
    return gate.closed_for + policy.quiet
