"""Files with one JSON object per line, each of them whole or not there at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def append(path: Path, value: Any) -> None:
    """Append *value* in one write: a process that is killed leaves a whole line or none."""
    line = json.dumps(value, default=str).encode() + b"\n"
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, line)
    finally:
        os.close(file)


def read(path: Path) -> list[Any]:
    """The values in a file, which need not exist yet."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
