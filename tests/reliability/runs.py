"""The recorded runs: a JSON file for each command, beside this module."""

from __future__ import annotations

import json
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def record(name: str, found: dict[str, Any]) -> Path:
    """Write what a run has shown, with the versions it ran with; returns the file."""
    file = HERE / f"{name}.json"
    file.write_text(
        json.dumps(found | {"versions": versions()}, indent=1, ensure_ascii=False) + "\n"
    )
    return file


def recorded(name: str) -> dict[str, Any]:
    """What the recorded run of a command has shown; empty if there was none."""
    file = HERE / f"{name}.json"
    return dict(json.loads(file.read_text())) if file.exists() else {}


def versions() -> dict[str, str]:
    """Python, and the packages that the runs depend on."""
    packages = ("celery", "kombu", "redis", "sqlalchemy", "psycopg")
    return {"python": platform.python_version()} | {
        package: metadata.version(package) for package in packages
    }
