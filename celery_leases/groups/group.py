"""A cooldown group: a failure of a shared dependency closes it for all its keys, and a successful
probe opens it. Pure.

A group is *open* (at most its history is stored), *closed* for some time, or *due for a probe*:
that time is over, and one attempt may probe the dependency. A group *blocks* while no attempt may
start. All times are seconds.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Final

from celery_leases.failures.cooldown_policies import CooldownPolicy
from celery_leases.keys import bounded, is_short_form

GROUP_NAME_MAX: Final = 255
"""Characters in the stored name of a group, at most."""


@dataclass(frozen=True, slots=True)
class ClosedGroup:
    """A group that is not open, as its store returned it.

    ``closed_for``: the time until it is due for a probe; 0 if it is. ``in_a_row``: how often it
    closed in a row. ``probe``: the owner token of the attempt that probes; its slot ends in
    ``probe_for`` unless it is renewed. ``reason``, ``rule`` and ``message`` describe the failure
    that closed it.
    """

    group: str
    in_a_row: int
    closed_for: float
    reason: str
    rule: str | None = None
    message: str = ""
    probe: str | None = None
    probe_for: float = 0.0

    @property
    def probe_due(self) -> bool:
        """Whether an attempt may probe, or probes now."""
        return self.closed_for <= 0

    @property
    def blocked_for(self) -> float:
        """For how long no attempt may start: until the group is due for a probe, or until the slot
        of the probe ends.
        """
        return self.closed_for if self.closed_for > 0 else self.probe_for


@dataclass(frozen=True, slots=True)
class Closed:
    """What a store has of a group that is not open; times are milliseconds by its clock.

    The group is closed until ``ends``. From then on the limit of the group is one, until ``counts``
    if it is not opened before. ``alone``: the token of the last attempt that took a slot under this
    limit; it is the probe as long as it holds that slot. ``why``: the result of
    :func:`reason_json`.
    """

    in_a_row: int
    ends: float
    counts: float
    why: str
    alone: str = ""


@dataclass(frozen=True, slots=True)
class Closing:
    """A failure of the group that closes it.

    The group stays closed for the delay of ``policy``, which grows with each closing in a row, or
    for ``server_delay`` (from the response, jitter included) if that is longer. ``instead``: a
    server delay replaces that of the policy, also if it is shorter.
    """

    policy: CooldownPolicy
    reason: str
    rule: str | None = None
    message: str = ""
    server_delay: float | None = None
    instead: bool = True

    def wait(self, in_a_row: int) -> float:
        """Seconds for which the group is closed, the *in_a_row*-th time in a row."""
        if self.server_delay is not None and self.instead:
            return self.server_delay
        return max(self.server_delay or 0.0, self.policy.longest(in_a_row))


# -- the stored form ------------------------------------------------------------------------------


def stored_group(group: str) -> str:
    """The stored name of a group: its name, whose tail is hashed if it is long, as in a stored key.

    A stored name maps to itself. So a group is found by its own name and by its listed name.
    """
    if "\0" not in group:
        return group if is_short_form(group) else bounded(group)
    # A text column cannot store NUL. The name made here has the full length, which no other name
    # with this digest has.
    digest = hashlib.sha256(group.encode()).hexdigest()
    plain = group.replace("\0", "").ljust(GROUP_NAME_MAX, "-")
    return f"{plain[: GROUP_NAME_MAX - 1 - len(digest)]}#{digest}"


def reason_json(closing: Closing) -> str:
    """Why *closing* closed the group, as JSON without empty fields."""
    fields = {"reason": closing.reason, "rule": closing.rule, "message": closing.message}
    return json.dumps(
        {name: value for name, value in fields.items() if value}, separators=(",", ":")
    )


def closed_group_from(
    group: str, closed: Closed, closed_for: float, probe_for: float
) -> ClosedGroup:
    """*group*; ``probe_for``: for how long its probe still holds its slot, 0 without
    one.
    """
    try:
        fields = json.loads(closed.why)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        fields = {}
    reason, message = (str(fields.get(name) or "") for name in ("reason", "message"))
    why = reason, fields.get("rule"), message
    probe = closed.alone if probe_for > 0 else None
    return ClosedGroup(group, closed.in_a_row, _known(closed_for), *why, probe, _known(probe_for))


def _known(seconds: float) -> float:
    """A rest of time, without the digits that the difference of two times has too many."""
    return round(max(0.0, seconds), 6)
