"""Runs ``celery`` commands without importing Celery for each: every command is a fork.

``python -m tests.integration.terminal APP`` reads one JSON list of words per line, runs ``celery``
with them in a fork, and answers with one JSON list: exit code, output, errors.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib import import_module
from typing import Any, NamedTuple, Self


class Done(NamedTuple):
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


class Terminal:
    """Runs ``celery -A app leases`` commands under *env*; a context manager."""

    def __init__(self, app: str, env: Mapping[str, str]) -> None:
        self._app = app
        command = [sys.executable, "-m", __name__, app]
        pipe = subprocess.PIPE
        self._shell = subprocess.Popen(
            command, env={**os.environ, **env}, stdin=pipe, stdout=pipe, text=True
        )

    def types(self, *words: str) -> Done:
        """Run one command."""
        assert self._shell.stdin is not None
        assert self._shell.stdout is not None
        print(json.dumps(["-A", self._app, "leases", *words]), file=self._shell.stdin, flush=True)
        return Done(*json.loads(self._shell.stdout.readline()))

    def sees(self, *words: str) -> str:
        """The output of a command that must succeed."""
        done = self.types(*words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def reads(self, *words: str) -> Any:
        """The JSON output of a command that must succeed."""
        return json.loads(self.sees(*words, "--json"))

    def reads_lines(self, *words: str) -> list[Any]:
        """The JSON lines of a command that must succeed."""
        return [json.loads(line) for line in self.sees(*words, "--json").splitlines()]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._shell.communicate()


def _run(words: list[str]) -> Done:
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        child = os.fork()
        if child == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(errors.fileno(), 2)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            sys.argv = ["celery", *words]
            sys.exit(main())
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        out.seek(0)
        errors.seek(0)
        return Done(code, out.read(), errors.read())


if __name__ == "__main__":
    import_module("celery.bin.celery")
    import_module(sys.argv[1])
    main = import_module("celery.__main__").main
    for line in sys.stdin:
        print(json.dumps(_run(json.loads(line))), flush=True)
