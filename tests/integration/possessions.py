"""What a process has that it could leave behind: threads, timers of the kernel, sockets, pipes and
handles.
"""

import os
from collections import Counter
from pathlib import Path

from celery_leases.testing.waits import wait_until


def possessions(pid: int) -> Counter[str]:
    """How many of each kind; files are left out, as SQLite opens and closes them."""
    home = Path(f"/proc/{pid}")
    timers = sum(line.startswith("ID:") for line in (home / "timers").read_text().splitlines())
    found = Counter(threads=len(os.listdir(home / "task")), timers=timers)  # noqa: PTH208 - names are all it needs
    for descriptor in (home / "fd").iterdir():
        try:
            kind = str(descriptor.readlink())
        except FileNotFoundError:  # it was closed meanwhile
            continue
        if not kind.startswith("/"):
            found[kind.rpartition(":[")[0] if "anon_inode" not in kind else kind] += 1
    return found


def wait_until_none_is_left(pid: int, before: Counter[str], timeout: float = 15.0) -> None:
    """Return when the process has no more of anything than it had; raises TimeoutError, naming what
    is too many.
    """
    wait_until(
        lambda: not possessions(pid) - before,
        timeout,
        f"{pid} to let go: {possessions(pid) - before}",
    )
