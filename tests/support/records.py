"""What a test expects of a row, a status or an error."""

from collections.abc import Mapping
from typing import Any


def assert_has(found: Any, **expected: object) -> None:
    """Assert that a mapping has these values, or an object these attributes."""
    mapping = isinstance(found, Mapping)
    has = {name: found[name] if mapping else getattr(found, name) for name in expected}
    assert has == expected, f"has {has}, and not {expected}"
