"""Named steps at which a process of the tests dies.

FAILPOINT is the step for a whole worker, FAILPOINT_TIMES how often it kills, and a file
FAILPOINT_FILE plus a number records each time. :func:`reach_for` kills once for one name, if the
test has created a file for it in the directory FAILPOINTS.
"""

import os
import signal
from pathlib import Path

STEP = os.environ.get("FAILPOINT", "")


def strikes() -> bool:
    """Whether the failpoint must act once more."""
    for number in range(int(os.environ.get("FAILPOINT_TIMES", "1"))):
        try:
            Path(f"{os.environ['FAILPOINT_FILE']}.{number}").touch(exist_ok=False)
        except FileExistsError:
            continue
        return True
    return False


def reach(step: str, *, whole_worker: bool = False) -> None:
    if step == STEP and strikes():
        _note(step=step)
        if whole_worker:
            os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


def armed(directory: Path | str, step: str, name: str) -> Path:
    """The file that makes a process die at *step* of *name*."""
    return Path(directory) / f"{step.replace(' ', '-')}.{name}"


def reach_for(step: str, name: str) -> None:
    """Die here if the test has armed this step for this name."""
    if "FAILPOINTS" not in os.environ:
        return
    try:
        armed(os.environ["FAILPOINTS"], step, name).unlink()
    except FileNotFoundError:
        return
    _note(step=step, name=name)
    os.kill(os.getpid(), signal.SIGKILL)


def _note(**more: str) -> None:
    from tests.apps.leased import note  # one armed step must not kill further tasks of the test

    note("failpoint", **more)
