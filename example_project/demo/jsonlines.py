"""Files with one JSON object per line; every line is complete."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def append(path: Path, value: Any) -> None:
    """Append *value* in one write, so a killed process leaves a complete line or none."""
    with path.open("ab", buffering=0) as file:
        file.write(json.dumps(value, default=str).encode() + b"\n")


def read(path: Path) -> list[Any]:
    """The values in a file; none if the file does not exist yet."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
