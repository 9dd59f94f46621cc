"""Tells a history: who did what, and when."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tests.simulation.history import Note
from tests.simulation.search import Failure
from tests.simulation.work import named

_UNSEEN = ("checked", "delivers", "tries")


def story(failure: Failure) -> str:
    """The shortest history of a failure, the promise that it breaks, and how to repeat it."""
    wrong = failure.violation
    key = wrong.note.details.get("key") if wrong.note is not None else None
    lines = list(told([note for note in failure.notes if _is_about(note, key)], wrong.note))
    return "\n".join([*lines, "", f"{wrong.promise}: {wrong.why}", f"again: {failure.command}"])


def told(notes: Sequence[Note], wrong: Note | None = None) -> Iterator[str]:
    """A line for each note; tokens and fences get short names in the order in which they come."""
    names: dict[Any, str] = {}

    def name(value: Any, of: str) -> str:
        key = (of, value)
        return names.setdefault(key, f"{of}{sum(each[0] == of for each in names) + 1}")

    for note in notes:
        if note.what in _UNSEEN or (note.what == "row" and _is_renewal(note)):
            continue
        marker = "!" if note is wrong else " "
        yield f"{marker}{note.at:9.3f}  {_sentence(note, name)}"


def _is_about(note: Note, key: str | None) -> bool:
    """Whether a note is about *key*, or about no key; ``None``: all notes."""
    given, event = note.details, note.what.startswith("event ")
    about = named(given.get("task", ""), given.get("key", "")) if event else given.get("key")
    return key is None or about is None or about == key


def _is_renewal(note: Note) -> bool:
    old, new = note.details["old"], note.details["new"]
    return old is not None and new is not None and str(old) == str(new)


def _sentence(note: Note, name: Any) -> str:
    given = dict(note.details)
    if note.what == "row":
        row = given["new"]
        if row is None:
            return f"the row of {given['key']} is deleted"
        until = f" until {row.retry_at:.3f}" if row.retry_at else ""
        owner = name(row.owner, "attempt ") if row.owner else "nobody"
        ended = f" ({row.ended})" if row.ended else ""
        return f"the row of {row.key} is {row.state}{until}{ended} for {row.call} by {owner}"
    if "token" in given:
        given["token"] = name(given["token"], "attempt ")
    if note.what == "final":
        given = {"rows": [str(row) for row in given["rows"]], "answers": given["answers"]}
    for field in ("fence", "task"):
        given.pop(field, None)
    details = ", ".join(f"{field} {value}" for field, value in given.items() if value is not None)
    return f"{note.what}: {details}"
