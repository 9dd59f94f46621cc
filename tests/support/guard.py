"""A process that starts a command, adopts all its descendants, and ends them when its owner dies.

It is run as a script, and uses only the standard library: ``python -I -S guard.py '{"argv":
[...]}'``. PR_SET_PDEATHSIG is not enough: it watches a *thread* of the parent and is not inherited
by grandchildren. Sessions are not enough: PostgreSQL's backends and Erlang's ``epmd`` leave the
session of their parent. A child subreaper becomes the parent of all orphaned descendants.
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
    """Set an attribute of this process on Linux. On other systems only the pipe shows that the
    owner has died.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def process_table() -> dict[int, tuple[int, str]]:
    """All process ids of this machine, with the parent's id and the letter of the state (T:
    stopped, Z: zombie).
    """
    if not Path("/proc/self/stat").exists():
        table = subprocess.run(
            ["ps", "-axo", "pid=,ppid=,stat="], capture_output=True, text=True, check=True
        )
        rows = [line.split() for line in table.stdout.splitlines()]
        return {int(pid): (int(ppid), state[0]) for pid, ppid, state in rows}
    found = {}
    for entry in os.listdir("/proc"):  # noqa: PTH208 - it is called often, and needs only the names
        if entry.isdigit():
            with contextlib.suppress(OSError):
                # The command name is in parentheses, and may contain spaces and parentheses.
                state, ppid = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[:2]
                found[int(entry)] = (int(ppid), state)
    return found


def parents() -> dict[int, int]:
    """All living process ids with the parent's id. Zombies are left out."""
    return {pid: parent for pid, (parent, state) in process_table().items() if state != "Z"}


def stopped(pids: Iterable[int]) -> bool:
    """Whether all of these processes are stopped or have ended. SIGSTOP takes effect shortly after
    kill().
    """
    table = process_table()
    return all(table[pid][1] in "TtZ" for pid in pids if pid in table)


def descendants(root: int) -> list[int]:
    """The living descendants of ``root``, parents before children."""
    if Path(f"/proc/self/task/{os.getpid()}/children").exists():
        of = children
    else:
        table: dict[int, list[int]] = {}
        for pid, parent in parents().items():
            table.setdefault(parent, []).append(pid)
        of = lambda pid: table.get(pid, [])  # noqa: E731
    found = sorted(of(root))
    for pid in found:
        found.extend(sorted(of(pid)))
    return found


def children(pid: int) -> list[int]:
    """The living children of a process, by a list that Linux keeps for each of its threads."""
    found = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 - as above
            found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return [each for each in found if _lives(each)]


def _lives(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return not Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].startswith(" Z")
    return False


def signal_tree(root: int, number: int) -> None:
    """Send a signal to ``root`` and its descendants, until no new process appears."""
    reached: set[int] = set()
    while new := [pid for pid in (root, *descendants(root)) if pid not in reached]:
        for pid in new:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        reached.update(new)


def end_descendants() -> None:
    """SIGKILL and reap all descendants of this process."""
    while True:
        for pid in descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def prepare_command() -> None:
    """Let this process die with its parent, the guard, and accept SIGINT, which a shell ignores
    for what it starts in the background. Call it in the child, after its user was set.
    """
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def spawn(task: dict[str, Any]) -> int:
    """Start the command as the user of the task, with its output in the log file, and its errors
    in a file of their own if the task names one; returns its process id.
    """
    user: dict[str, Any] = {}
    if task.get("user"):
        user = {"user": task["user"], "group": task["group"], "extra_groups": []}
    with Path(task["log"]).open("ab") as log, Path(task["errors"] or task["log"]).open("ab") as err:
        child = subprocess.Popen(
            task["argv"],
            cwd=task.get("cwd"),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=err,
            start_new_session=True,
            preexec_fn=prepare_command,  # noqa: PLW1509 - this process has one thread
            **user,
        )
    child.returncode = 0  # reap() waits for it; this prevents a ResourceWarning of Popen
    return child.pid


def report(word: str, number: int) -> None:
    """Write a line to the owner, which may have died."""
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.write(f"{word} {number}\n")
        sys.stdout.flush()


def reap(main: int) -> None:
    """Reap dead children without waiting, and report the exit code of the command to the owner."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        if pid == main:
            report("exit", os.waitstatus_to_exitcode(status))


def guard(task: dict[str, Any], start: Callable[[dict[str, Any]], int] = spawn) -> None:
    """Start the command, and wait until the owner writes ``end``, closes the pipe, or dies.

    *start* starts the command of a task. ``task["parent"]`` is the parent of this process, if that
    is not the owner.
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
        # A process forked from the owner may have a copy of the pipe; a pidfd has no such problem.
        with contextlib.suppress(OSError):
            owner = os.pidfd_open(task["owner"])
            poll.register(owner, select.POLLIN)
    main = start(task)
    report("pid", main)
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
    report("ended", 0)


if __name__ == "__main__":
    guard(json.loads(sys.argv[1]))
