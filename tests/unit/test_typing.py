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


@pytest.mark.timeout(300)
def test_a_project_with_celery_types_is_checked_without_errors(tmp_path: Path) -> None:
    """Both ways to name the base, and the lease in the body."""
    for name in ("mypy", "celery-types"):
        try:
            version(name)
        except PackageNotFoundError:
            pytest.skip(f"{name} is not installed: it is in the dependency group lint")
    (tmp_path / "project.py").write_text(PROJECT)
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--cache-dir",
        str(tmp_path / "cache"),
        "project.py",
    ]
    checked = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert checked.stdout.startswith("Success"), checked.stdout + checked.stderr
