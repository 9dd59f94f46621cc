"""Runs commands of Python to their end, without the imports that each of them would repeat."""

import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.preloaded import preloaded
from tests.support.process import GuardedProcess


def run_command(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: Path | None = None,
    timeout: float = 60.0,
    modules: tuple[str, ...] = (),
) -> subprocess.CompletedProcess[str]:
    """How *argv* ended: exit code, output and errors, as ``subprocess.run`` gives them.

    ``python -m module …`` and ``python script.py …`` run in a fork of a process that has imported
    Celery, this package, and *modules*; see ``preloaded.py`` for when they are executed instead.
    Raises TimeoutError after *timeout* seconds.
    """
    argv = list(argv)
    with tempfile.TemporaryDirectory() as directory:
        out, errors = Path(directory, "out"), Path(directory, "errors")
        process = GuardedProcess(
            argv,
            log=out,
            errors=errors,
            env=env,
            cwd=cwd or Path.cwd(),
            forked=preloaded.can_run_command(argv, env),
            modules=modules,
        )
        try:
            code = process.wait(timeout)
        finally:
            process.end()
        return subprocess.CompletedProcess(argv, code, out.read_text(), errors.read_text())
