"""Values of columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Row = Mapping[Any, Any]
"""A row of a result: values by column name."""
MICROSECONDS = 1e6


def microseconds(seconds: float) -> int:
    """The stored form of a span of *seconds*."""
    return round(seconds * MICROSECONDS)
