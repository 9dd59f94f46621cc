"""The output of a module of :mod:`tests.apps` that is run as a program."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def reported(module: str, *what: str) -> dict[str, Any]:
    """The JSON on the last line of ``python -m <module> <what>``."""
    run = subprocess.run(
        [sys.executable, "-m", module, *what],
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
        cwd=ROOT,
    )
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found
