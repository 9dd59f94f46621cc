"""The stored form of gates: a name of bounded length, and the reason of the closing as JSON."""

from __future__ import annotations

import hashlib
import json
from typing import Final

from celery_leases.groups.group import Gate
from celery_leases.keys import bounded, is_short_form

GATE_NAME_MAX: Final = 255


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
    """A gate from the JSON *text* of :func:`reason_json`. Times are seconds; *probe* is the token
    in the probe slot, and for how long it still holds the slot.
    """
    try:
        fields = json.loads(text)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        fields = {}
    token, probe_for = probe or (None, 0.0)
    reason, message = str(fields.get("reason") or ""), str(fields.get("message") or "")
    return Gate(
        group,
        trips,
        max(0.0, closed_for),
        reason,
        fields.get("rule"),
        message,
        token,
        max(0.0, probe_for),
    )
