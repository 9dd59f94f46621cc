"""The small process that starts one command, adopts all its descendants, and ends them when its
owner dies.

Run as a script, by path and with nothing but the standard library: ``python -I -S guard.py
'{"argv": [...]}'``. PR_SET_PDEATHSIG alone would not do: it watches a *thread* of the parent, is
not inherited by grandchildren, and PostgreSQL's backends and Erlang's ``epmd`` leave the session of
their parent. A child subreaper sees them all.
"""

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process on Linux; elsewhere the pipe alone tells that the owner is
    gone.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def process_table() -> dict[int, tuple[int, str]]:
    """Every process id of this machine with its parent's id and one letter of state (T: stopped, Z:
    dead).
    """
    if not Path("/proc/self/stat").exists():
        table = subprocess.run(
            ["ps", "-axo", "pid=,ppid=,stat="], capture_output=True, text=True, check=True
        )
        rows = [line.split() for line in table.stdout.splitlines()]
        return {int(pid): (int(ppid), state[0]) for pid, ppid, state in rows}
    found = {}
    for entry in os.listdir("/proc"):  # noqa: PTH208 - this runs at every poll, names are all it needs
        if entry.isdigit():
            with contextlib.suppress(OSError):
                # The command name stands in parentheses and may itself hold spaces and parentheses.
                state, ppid = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[:2]
                found[int(entry)] = (int(ppid), state)
    return found


def parents() -> dict[int, int]:
    """Every living process id with its parent's id; zombies count as dead."""
    return {pid: parent for pid, (parent, state) in process_table().items() if state != "Z"}


def stopped(pids: Iterable[int]) -> bool:
    """Whether all of these processes that still live are stopped: SIGSTOP takes effect a little
    after kill().
    """
    table = process_table()
    return all(table[pid][1] in "TtZ" for pid in pids if pid in table)


def descendants(root: int) -> list[int]:
    """The living processes below ``root``, parents before children, without ``root`` itself."""
    children: dict[int, list[int]] = {}
    for pid, parent in parents().items():
        children.setdefault(parent, []).append(pid)
    found = sorted(children.get(root, []))
    for pid in found:
        found.extend(sorted(children.get(pid, [])))
    return found


def signal_tree(root: int, number: int) -> None:
    """Send a signal to ``root`` and everything below it, until no new process turns up."""
    reached: set[int] = set()
    while new := [pid for pid in (root, *descendants(root)) if pid not in reached]:
        for pid in new:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        reached.update(new)


def end_descendants() -> None:
    """SIGKILL everything below this process and reap it; returns when nothing is left."""
    while True:
        for pid in descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def die_with_guard() -> None:
    """In the child, after its user was set: follow the guard, should the guard itself be killed."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def spawn(task: dict[str, Any]) -> int:
    """Start the command as the wanted user, its output in the log file; its process id."""
    user: dict[str, Any] = {}
    if task.get("user"):
        user = {"user": task["user"], "group": task["group"], "extra_groups": []}
    with Path(task["log"]).open("ab") as log:
        child = subprocess.Popen(
            task["argv"],
            cwd=task.get("cwd"),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_guard,  # noqa: PLW1509 - this process has one thread
            **user,
        )
    child.returncode = 0  # reaped below; this keeps Popen from complaining about it
    return child.pid


def tell(word: str, number: int) -> None:
    """Write one line to the owner, who may be gone."""
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.write(f"{word} {number}\n")
        sys.stdout.flush()


def reap(main: int) -> None:
    """Collect dead children without waiting, and tell the owner when the command itself has
    ended.
    """
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        if pid == main:
            tell("exit", os.waitstatus_to_exitcode(status))


def guard(task: dict[str, Any], start: Callable[[dict[str, Any]], int] = spawn) -> None:
    """Start the command and stay until the owner says ``end``, closes the pipe, or dies.

    *start* starts the command of a task; ``task["parent"]`` is the parent of this process where
    that is not the owner.
    """
    parent = task.get("parent", task["owner"])
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    wake, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    poll = select.poll()
    poll.register(wake, select.POLLIN)
    poll.register(sys.stdin.fileno(), select.POLLIN)
    owner = None
    if hasattr(os, "pidfd_open"):
        # A process forked from the owner may hold a copy of the pipe open; the pidfd is not fooled.
        with contextlib.suppress(OSError):
            owner = os.pidfd_open(task["owner"])
            poll.register(owner, select.POLLIN)
    main = start(task)
    tell("pid", main)
    orderly = False
    while os.getppid() == parent:
        ready = {fd for fd, _ in poll.poll()}
        if wake in ready:
            os.read(wake, 4096)
            reap(main)
        if sys.stdin.fileno() in ready:
            orderly = os.read(sys.stdin.fileno(), 64).startswith(b"end")
            break
        if owner in ready:
            break
    end_descendants()
    if not orderly:
        for home in task["homes"]:
            shutil.rmtree(home, ignore_errors=True)
    tell("ended", 0)


if __name__ == "__main__":
    guard(json.loads(sys.argv[1]))
