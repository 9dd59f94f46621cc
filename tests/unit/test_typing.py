"""A user's project under ``mypy --strict``, with the stubs that celery-types has for Celery."""

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

PROJECT = """
from typing import Any

from celery import Celery, Task
from celery_leases import LeasedMixin, LeasedTask

app = Celery("typed", broker="memory://")


class MyTask(LeasedMixin, Task[Any, Any]):
    abstract = True


@app.task(base=LeasedTask, bind=True, lease_key="invoice:{number}")
def send(self: LeasedTask, number: int) -> float:
    self.lease.check()
    return self.lease.remaining()


@app.task(base=MyTask, bind=True, lease_key="other:{number}")
def other(self: MyTask, number: int) -> bool:
    self.lease.check()
    return self.lease.held


send.delay(1)
other.apply_async((1,))
"""

FROZEN = """
from celery_leases.decide.answers import Acquired
from celery_leases.record import Record


def change(acquired: Acquired, record: Record) -> None:
    acquired.record = record
"""
"""An assignment to a value that only the type checker guards."""


@pytest.mark.timeout(300)
def test_a_project_with_celery_types_is_checked_without_errors(tmp_path: Path) -> None:
    for name in ("mypy", "celery-types"):
        try:
            version(name)
        except PackageNotFoundError:
            pytest.skip(f"{name} is not installed: it is in the dependency group lint")
    (tmp_path / "project.py").write_text(PROJECT)
    (tmp_path / "frozen.py").write_text(FROZEN)
    command = [
        sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"),
        "project.py", "frozen.py",
    ]  # fmt: skip
    checked = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    errors = [line for line in checked.stdout.splitlines() if ": error: " in line]
    assert len(errors) == 1, checked.stdout + checked.stderr
    assert errors[0].startswith("frozen.py:")
    assert "read-only" in errors[0]
