"""The stored form of gates: a name of bounded length, and the reason of the closing as JSON."""

from __future__ import annotations

import hashlib
import json
from typing import Final

from celery_leases.protocol.groups import Gate
from celery_leases.protocol.keys import bounded, is_short_form

GATE_NAME_MAX: Final = 255


def gate_name(group: str) -> str:
    """The name of a group's gate: the group; the tail of a long one is hashed, as in a stored key.

    The name of a gate maps to itself, so a gate is found by its group and by its listed name.
    """
    if "\0" not in group:
        return group if is_short_form(group) else bounded(group)
    # No text column takes a NUL: a name of full length, which no group without one has.
    digest = hashlib.sha256(group.encode()).hexdigest()
    plain = group.replace("\0", "").ljust(GATE_NAME_MAX, "-")
    return f"{plain[: GATE_NAME_MAX - 1 - len(digest)]}#{digest}"


def why(gate: Gate) -> str:
    """The reason why *gate* closed, without empty fields."""
    said = {"reason": gate.reason, "rule": gate.rule, "message": gate.message}
    return json.dumps({name: value for name, value in said.items() if value}, separators=(",", ":"))


def gate_from(
    group: str, trips: int, closed_for: float, text: str, probe: tuple[str, float] | None
) -> Gate:
    """A gate from what :func:`why` has written, its times in seconds; *probe* is a token and its
    slot's time.
    """
    try:
        said = json.loads(text)
    except ValueError:
        said = None
    if not isinstance(said, dict):
        said = {}
    token, probe_for = probe or (None, 0.0)
    reason, message = str(said.get("reason") or ""), str(said.get("message") or "")
    return Gate(
        group,
        trips,
        max(0.0, closed_for),
        reason,
        said.get("rule"),
        message,
        token,
        max(0.0, probe_for),
    )
