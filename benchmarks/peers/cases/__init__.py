"""The cases, by the kind of fault; importing this package registers them."""

from benchmarks.peers.cases import callers, canvas, copies, ends, runs
from benchmarks.peers.observations import CASES, Case

__all__ = ["ALL", "callers", "canvas", "copies", "ends", "runs"]

_ORDER = sorted(CASES, key=lambda row: ("MCR".index(row[0]), int(row[1:])))
ALL: list[Case] = [CASES[row] for row in _ORDER]
"""M1 to M14, C1 to C6, then R1 to R5."""
