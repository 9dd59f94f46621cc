"""The traceback of an exception as its record stores it: the frames of the body, shortened and
without secrets.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Final

from celery_leases.text.cleaning import storable, text_of
from celery_leases.text.redaction import shortened

TRACEBACK_MAX: Final = 1000
"""The longest stored traceback, in characters."""
FRAMES: Final = 8
"""The most stored frames: the first one of the body, and those next to the raise."""
LINE_MAX: Final = 100
CAUSES: Final = 3
_IN_SOURCE: Final = re.compile(
    r"""
    (?P<member> (?<=[\w)\]]) \[ \s* (?:'\w{1,30}'|"\w{1,30}") \s* \] )
    | (?P<quote> \"{3} | \'{3} | ["'] ) (?: \\. | (?!(?P=quote)). )* (?P<end> (?P=quote) | $ )
    | \# .*
    """,
    re.VERBOSE,
)
_OURS: Final = f"{Path(__file__).parents[1]}/"


def traceback_of(error: BaseException) -> str | None:
    """The frames of *error*, ending with the one that raised it, and the exceptions it was raised
    from.

    Frames of this package before the body are left out. It has no local variables, and of the
    source neither comments nor the content of strings, which may be secrets. ``None`` for an
    exception that was never raised. Never raises.
    """
    try:
        return _traceback(error)
    except BaseException:  # noqa: BLE001 - a broken loader or exception must not hide the failure
        return None


def _traceback(error: BaseException) -> str | None:
    frames = [*traceback.walk_tb(error.__traceback__)]
    while frames and _is_ours(frames[0][0]):
        del frames[0]
    if not frames:
        return None
    left_out = len(frames) - FRAMES
    parts = [*_lines(frames, {0, len(frames) - 1})] if left_out <= 0 else []
    if left_out > 0:
        said = f"  … {left_out} frame{'s' if left_out > 1 else ''} left out"
        parts = [*_lines(frames[:1], {0}), said, *_lines(frames[1 - FRAMES :], {FRAMES - 2})]
    parts += _causes(error)
    while len(parts) > 1 and sum(map(len, parts)) + len(parts) > TRACEBACK_MAX:
        del parts[0]  # the frames next to the raise are the most useful
    return storable(shortened("\n".join(parts), TRACEBACK_MAX))


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_OURS)


def _lines(frames: list[tuple[FrameType, int]], sources: set[int]) -> Iterator[str]:
    """One line for each frame, and the line of source of those frames whose numbers are in
    *sources*.
    """
    for number, frame in enumerate(traceback.StackSummary.extract(iter(frames))):
        yield f"  {frame.filename[-LINE_MAX:]}:{frame.lineno} in {frame.name[:LINE_MAX]}"
        if number in sources and frame.line:
            yield f"    {_without_strings(frame.line)[:LINE_MAX]}"


def _without_strings(line: str) -> str:
    """A line of source with ``…`` for the content of its strings, and without its comment.

    Names of members stay (``order["id"]``). The line may begin or end within a string.
    """
    if line.count('"""') % 2 or line.count("'''") % 2:
        return "…"
    return _IN_SOURCE.sub(_shown, line).rstrip()


def _shown(found: re.Match[str]) -> str:
    if found["quote"] is None:
        return found[0] if found["member"] else ""
    return f"{found['quote']}…{found['end']}"


def _causes(error: BaseException) -> Iterator[str]:
    """One line for each exception that *error* was raised from, or that was being handled then."""
    seen = {id(error)}
    for _ in range(CAUSES):
        cause = error.__cause__
        said = "raised from"
        if cause is None and not error.__suppress_context__:
            cause, said = error.__context__, "raised while handling"
        if cause is None or id(cause) in seen:
            return
        seen.add(id(cause))
        text = " ".join(text_of(cause).split())
        yield f"  {said} {type(cause).__qualname__}: {text}"[: 2 * LINE_MAX]
        error = cause
