"""Saved progress: one JSON value of the body, and the position of each of its loops. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from celery_leases.errors import EffectMisused
from celery_leases.results import NO_LIMIT, encode


@dataclass(frozen=True, slots=True)
class Progress:
    """``value`` as JSON text, and the number of finished items of each loop by the loop's name."""

    value: str | None = None
    positions: Mapping[str, int] = field(default_factory=dict)


NONE: Final = Progress()


def load(text: str | None, generation: int) -> Progress:
    """The progress in *text*, if it was saved in *generation*; otherwise :data:`NONE`."""
    saved = json.loads(text) if text is not None else {}
    if saved.get("generation") != generation:
        return NONE
    return Progress(saved.get("value"), saved.get("positions") or {})


def dump(progress: Progress, generation: int) -> str:
    """*progress* as it is stored, with the *generation* of the record."""
    return json.dumps(
        {"generation": generation, "value": progress.value, "positions": dict(progress.positions)}
    )


def checked(value: Any, key: str, what: str = "save_progress()") -> str:
    """The JSON text of *value*; raises :class:`EffectMisused` for a value that is not JSON."""
    text, missing = encode(value, NO_LIMIT)
    if text is None:
        raise EffectMisused(
            f"{key}: {what} takes a JSON value, not {type(value).__name__} ({missing})", key
        )
    return text
