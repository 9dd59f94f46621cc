"""The cases, by the kind of fault; importing this package registers them."""

from benchmarks.peers.cases import callers, canvas, copies, ends
from benchmarks.peers.observations import CASES, Case

__all__ = ["ALL", "callers", "canvas", "copies", "ends"]

_ORDER = sorted(CASES, key=lambda row: (row[0] != "M", int(row[1:])))
ALL: list[Case] = [CASES[row] for row in _ORDER]
"""M1 to M14, then C1 to C6."""
