"""The README's first command installs only the dependency group ``demo``."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROBE = """
import importlib, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
importlib.import_module({module!r})
"""
ABSENT = (
    *("psycopg", "psycopg2", "asyncpg", "pymysql", "MySQLdb", "pytest", "hypothesis", "fakeredis"),
    *("alembic", "django", "fastapi", "starlette", "uvicorn", "matplotlib", "prometheus_client"),
    *("gevent", "eventlet", "selenium", "httpx"),
)
"""What the other groups install."""


@pytest.mark.parametrize(
    "module",
    [
        "example_project.demo.__main__",
        "example_project.demo.cooldown",
        "example_project.play.__main__",
        "benchmarks.peers.__main__",
    ],
)
def test_a_demo_imports_only_what_its_group_installs(module: str) -> None:
    probe = PROBE.format(absent=ABSENT, module=module)
    done = subprocess.run(
        [sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
