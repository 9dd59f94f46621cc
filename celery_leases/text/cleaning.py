"""Texts from outside: cut to a length, made storable for databases, and printable for logs and
terminals.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

LONGEST: Final = 4_000
"""Characters that are read of the text of an exception, which is more than is shown."""
SHOWN: Final = 300
"""Characters of a key or a name that are shown in a line."""
_DEPTH: Final = 5


def printable(text: str, limit: int | None = SHOWN, *, keep: str = "") -> str:
    """*text* in one line, cut to *limit* characters, with control characters escaped.

    Characters in *keep* are not escaped.
    """
    cut = text if limit is None or len(text) <= limit else f"{text[: limit - 1]}…"
    if cut.isprintable():
        return cut
    return "".join(one if one.isprintable() or one in keep else ascii(one)[1:-1] for one in cut)


def shown(value: object) -> str:
    """The beginning of ``repr(value)``, for an error message."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def storable(text: str, most: int | None = None) -> str:
    """*text* without NUL and lone surrogates, which databases cannot store, cut to *most*
    characters.
    """
    if not text.isascii() or "\x00" in text:
        text = text.replace("\x00", "").encode("utf-8", "replace").decode()
    return text if most is None else text[:most]


def text_of(error: BaseException) -> str:
    """``str(error)`` in storable form, cut to :data:`LONGEST` characters; ``""`` if it raises.

    The ``args`` of an exception without a ``__str__`` of its own are cut first, so that large
    arguments take no more time. The time of a ``__str__`` of its own is not limited.
    """
    try:
        text = _text(error)
    except BaseException:  # noqa: BLE001 - a broken __str__ must not hide the failure
        return ""
    return storable(text)


def _text(error: BaseException) -> str:
    held: tuple[Any, ...] = BaseException.args.__get__(error)  # type: ignore[attr-defined]
    written = type(error).__str__
    if written is BaseException.__str__ and len(held) == 1:
        return _whole(held[0]) if type(held[0]) is str else str(_cut(held[0]))[:LONGEST]
    if written is BaseException.__str__ or (written is KeyError.__str__ and len(held) == 1):
        return (
            repr(_cut(held if written is BaseException.__str__ else held[0]))[:LONGEST]
            if held
            else ""
        )
    return _whole(str(error))


def _whole(text: str) -> str:
    return str.__getitem__(text, slice(LONGEST))


def _cut(value: Any, depth: int = _DEPTH, left: Iterator[int] | None = None) -> Any:
    """*value*, or the part of a large one with which its text begins; *left*: an iterator with one
    item for each further member that may be read.
    """
    kind, left = type(value), left or iter(range(LONGEST))
    if kind is str or kind is bytes:
        return value[:LONGEST]
    if kind not in (list, tuple, dict, set, frozenset):
        return value
    if depth == 0:
        return kind()
    if kind is dict:
        members = zip(value.items(), left, strict=False)
        return {
            _cut(name, depth - 1, left): _cut(held, depth - 1, left) for (name, held), _ in members
        }
    return kind(_cut(member, depth - 1, left) for member, _ in zip(value, left, strict=False))
