"""The gate of a cooldown group: failures of one dependency close it for all its keys, one probe opens it again. Pure.

A gate is *open* (there is none), *closed* for a while, or *half-open*: its time is over, and one probe may try whether
the dependency is back. All times are seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from celery_leases.core.policies import CooldownPolicy


@dataclass(frozen=True, slots=True)
class Gate:
    """A gate that is not open, as its store saw it a moment ago.

    ``closed_for``: how long no body starts; 0 when it is half-open. ``trips``: how often it closed in a row.
    ``probe``: the token of the attempt that probes, whose slot lasts ``probe_for`` unless it is renewed.
    ``reason``, ``rule`` and ``message`` say what closed it, as they would for a single key.
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
    def shut_for(self) -> float:
        """How long nothing can start here, as far as is known: the time it is closed, or its probe's slot."""
        return self.closed_for if self.closed_for > 0 else self.probe_for


@dataclass(frozen=True, slots=True)
class Closing:
    """A failure of the group. ``policy`` grows with each trip; ``told`` is the wait the answer asked for, jitter
    included, which counts ``instead``, or where it is the longer one.
    """

    policy: CooldownPolicy
    reason: str
    rule: str | None = None
    message: str = ""
    told: float | None = None
    instead: bool = True

    def wait(self, trips: int) -> float:
        """Seconds to close for, the *trips*-th time in a row."""
        if self.told is not None and self.instead:
            return self.told
        return max(self.told or 0.0, self.policy.longest(trips))


def closed(group: str, gate: Gate | None, closing: Closing, token: str) -> Gate:
    """The gate after *closing*, seen by the attempt with *token*; a standing time is extended, never cut.

    It trips once per closing: not again while it is closed, and not by a body that began before it closed and fails
    only now, when the gate is half-open.
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
    return replace(shut, probe=None if given_back else gate.probe, probe_for=0.0 if given_back else gate.probe_for)


def admits(gate: Gate | None, token: str) -> bool:
    """Whether a body may start: the gate is open, or half-open and its probe's slot is free or held by *token*."""
    return gate is None or (gate.half_open and gate.probe in (None, token))


def remembered_for(gate: Gate, policy: CooldownPolicy) -> float:
    """How long a store keeps a closed gate in mind: its time, and the quiet time that makes its trips forgotten."""
    return gate.closed_for + policy.quiet
