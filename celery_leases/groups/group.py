"""The gate of a cooldown group: a failure of a shared dependency closes it for all keys of the
group, and a successful probe opens it. Pure.

A gate is *open* (at most its history is stored), *closed* for some time, or *half-open*: that time
is over, and one attempt may probe the dependency. A gate *blocks* while no attempt may start. All
times are seconds.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from typing import Final

from celery_leases.failures.cooldown_policies import CooldownPolicy
from celery_leases.keys import bounded, is_short_form

GATE_NAME_MAX: Final = 255
"""Characters in the stored name of a gate."""


@dataclass(frozen=True, slots=True)
class Gate:
    """A gate that is not open, as its store returned it.

    ``closed_for``: the time until it is half-open; 0 if it is. ``trips``: how often it closed in a
    row. ``probe``: the owner token of the attempt that probes; its slot ends in ``probe_for``
    unless it is renewed. ``reason``, ``rule`` and ``message`` describe the failure that closed it.
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
        """Whether an attempt may probe, or probes now."""
        return self.closed_for <= 0

    def is_probed_by(self, token: str) -> bool:
        """Whether the gate is half-open and *token* holds the slot of the probe."""
        return self.half_open and self.probe == token

    @property
    def blocked_for(self) -> float:
        """For how long no attempt may start: until the gate is half-open, or until the slot of the
        probe ends.
        """
        return self.closed_for if self.closed_for > 0 else self.probe_for


@dataclass(frozen=True, slots=True)
class Closing:
    """A failure of the group that closes its gate.

    The gate stays closed for the delay of ``policy``, which grows with each trip, or for
    ``server_delay`` (from the response, jitter included) if that is longer. ``instead``: a server
    delay replaces that of the policy, also if it is shorter.
    """

    policy: CooldownPolicy
    reason: str
    rule: str | None = None
    message: str = ""
    server_delay: float | None = None
    instead: bool = True

    def wait(self, trips: int) -> float:
        """Seconds for which the gate is closed, the *trips*-th time in a row."""
        if self.server_delay is not None and self.instead:
            return self.server_delay
        return max(self.server_delay or 0.0, self.policy.longest(trips))


def closed(group: str, gate: Gate | None, closing: Closing, token: str) -> Gate:
    """The gate after *closing*; *gate* is the gate before, *token* the owner token of the attempt
    that failed.

    A longer time replaces the current one, a shorter one does not. Only the failure of a probe
    counts a trip more: attempts that had begun before the gate closed count none.
    """
    if gate is None:
        trips, current = 1, 0.0
    else:
        trips, current = gate.trips + gate.is_probed_by(token), gate.closed_for
    wait = closing.wait(trips)
    after = Gate(group, trips, wait, closing.reason, closing.rule, closing.message)
    if gate is None:
        return after
    if current >= wait:
        after = gate
    probe_ends = gate.probe == token
    return replace(
        after,
        probe=None if probe_ends else gate.probe,
        probe_for=0.0 if probe_ends else gate.probe_for,
    )


def admits(gate: Gate | None, token: str) -> bool:
    """Whether the attempt with *token* may start: the gate is open, or half-open and the probe's
    slot is free or its own.
    """
    return gate is None or (gate.half_open and gate.probe in (None, token))


def gate_retention(gate: Gate, policy: CooldownPolicy) -> float:
    """Seconds after which a store may delete a closed gate: the time for which it is closed, and
    then the quiet time after which its trips no longer count.
    """
    return gate.closed_for + policy.quiet


# -- the stored form ------------------------------------------------------------------------------


def gate_name(group: str) -> str:
    """The name of a group's gate: the group's name, whose tail is hashed if it is long, as in a
    stored key.

    The name of a gate maps to itself. So a gate is found by its group's name and by its listed
    name.
    """
    if "\0" not in group:
        return group if is_short_form(group) else bounded(group)
    # A text column cannot store NUL. The name made here has the full length, which no other name
    # with this digest has.
    digest = hashlib.sha256(group.encode()).hexdigest()
    plain = group.replace("\0", "").ljust(GATE_NAME_MAX, "-")
    return f"{plain[: GATE_NAME_MAX - 1 - len(digest)]}#{digest}"


def reason_json(gate: Gate) -> str:
    """Why *gate* was closed, as JSON without empty fields."""
    fields = {"reason": gate.reason, "rule": gate.rule, "message": gate.message}
    return json.dumps(
        {name: value for name, value in fields.items() if value}, separators=(",", ":")
    )


def gate_from(
    group: str, trips: int, closed_for: float, text: str, probe: tuple[str, float] | None
) -> Gate:
    """A gate from the JSON *text* of :func:`reason_json`. *probe* is the token in the probe slot,
    and for how long it still holds the slot.
    """
    try:
        fields = json.loads(text)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        fields = {}
    reason, message = (str(fields.get(name) or "") for name in ("reason", "message"))
    token, probe_for = probe or (None, 0.0)
    closed = trips, max(0.0, closed_for), reason, fields.get("rule"), message
    return Gate(group, *closed, token, max(0.0, probe_for))
