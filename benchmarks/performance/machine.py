"""CPU and memory of processes, from /proc."""

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from tests.support import guard

TICKS = os.sysconf("SC_CLK_TCK")

CpuByPid = Mapping[int, float]
"""The CPU seconds that each process has used so far."""


def tree(root: int) -> list[int]:
    """A process and all its descendants."""
    return [root, *guard.descendants(root)]


def cpu(pids: Iterable[int]) -> CpuByPid:
    """The CPU of all living threads of each process, to the nanosecond; ended processes are left
    out.
    """
    found = {}
    for pid in pids:
        with suppress(OSError):
            threads = Path(f"/proc/{pid}/task").iterdir()
            found[pid] = (
                sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9
            )
    return found


def used(before: CpuByPid, after: CpuByPid) -> float:
    """Seconds of CPU between two readings."""
    return sum(seconds - before.get(pid, 0.0) for pid, seconds in after.items())


def busy() -> float:
    """Seconds for which the cores of this machine were not idle, including stolen time."""
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    idle, waiting = fields[3:5]
    return (sum(fields) - idle - waiting) / TICKS


def pss(pid: int) -> float:
    """MiB of memory; a page that *n* processes share counts as one *n*-th in each."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024
