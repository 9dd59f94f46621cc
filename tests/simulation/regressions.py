"""Runs that once broke a promise: each is a seed, and the calls and accidents to leave out."""

from __future__ import annotations

from typing import Final

REGRESSIONS: Final[tuple[tuple[int, tuple[str, ...]], ...]] = (
    (18, ()),
    (57, ()),
    (166, ()),
    (203, ()),
    (561, ()),
    (1173, ()),
    (1441, ()),
    (1451, ()),
    (1828, ("call 2", "call 5")),
    (2404, ()),
    (2990, ("accident 10", "call 3")),
    (3059, ()),
    (3234, ()),
    (3527, ()),
    (4238, ()),
    (4279, ()),
    (5141, ()),
    (9198, ()),
    (13376, ()),
    (14131, ()),
    (21104, ()),
    (52879, ()),
    (61328, ()),
    (63257, ()),
    (63960, ()),
    (200337, ()),
    (500200, ()),
)
