"""Saved progress: one JSON value of the body's own, and how far each of its loops has come.
Pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from celery_leases.errors import EffectMisused
from celery_leases.protocol.results import NO_LIMIT, encode


@dataclass(frozen=True, slots=True)
class Progress:
    """``value`` as JSON text, and how many items each loop has finished, by the loop's name."""

    value: str | None = None
    positions: Mapping[str, int] = field(default_factory=dict)


NONE: Final = Progress()


def load(text: str | None, generation: int) -> Progress:
    """The progress saved in *generation*; that of an earlier one does not count."""
    saved = json.loads(text) if text is not None else {}
    if saved.get("generation") != generation:
        return NONE
    return Progress(saved.get("value"), saved.get("positions") or {})


def dump(progress: Progress, generation: int) -> str:
    """As it is stored."""
    return json.dumps(
        {"generation": generation, "value": progress.value, "positions": dict(progress.positions)}
    )


def checked(value: Any, key: str, what: str = "save_progress()") -> str:
    """The JSON text of a value to be saved; raises :class:`EffectMisused` for one that has none."""
    text, missing = encode(value, NO_LIMIT)
    if text is None:
        raise EffectMisused(
            f"{key}: {what} takes a JSON value, not {type(value).__name__} ({missing})", key
        )
    return text
