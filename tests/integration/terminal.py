"""An operator's terminal: runs ``celery`` commands on the stores of a test."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from tests.support.commands import run_command


class Terminal:
    """Runs ``celery -A app leases`` commands under *env*."""

    def __init__(self, app: str, env: Mapping[str, str]) -> None:
        self._app = app
        self._env = {**os.environ, **env}

    def types(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "celery", "-A", self._app, "leases", *words]
        return run_command(command, env=self._env)

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
