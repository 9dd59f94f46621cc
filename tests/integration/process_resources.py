"""The resources that a process could leak: threads, POSIX timers, sockets, pipes and handles."""

import os
from collections import Counter
from pathlib import Path

from celery_leases.testing.waits import wait_until


def resource_counts(pid: int) -> Counter[str]:
    """The number of each resource of a process, without files: SQLite opens and closes them."""
    home = Path(f"/proc/{pid}")
    timers = sum(line.startswith("ID:") for line in (home / "timers").read_text().splitlines())
    found = Counter(threads=len(os.listdir(home / "task")), timers=timers)  # noqa: PTH208 - names are all it needs
    for descriptor in (home / "fd").iterdir():
        try:
            kind = str(descriptor.readlink())
        except FileNotFoundError:  # closed meanwhile
            continue
        if not kind.startswith("/"):
            found[kind.rpartition(":[")[0] if "anon_inode" not in kind else kind] += 1
    return found


def wait_until_released(pid: int, before: Counter[str], timeout: float = 15.0) -> None:
    """Return when the process has at most the resources of *before*.

    Raises TimeoutError, which names those that it has in excess.
    """
    wait_until(
        lambda: not resource_counts(pid) - before,
        timeout,
        f"{pid} to let go: {resource_counts(pid) - before}",
    )
