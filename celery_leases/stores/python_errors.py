"""Exceptions of Python itself that a store converts, such as those for missing memory or file
descriptors.
"""

from __future__ import annotations

from typing import Final

PYTHON_ERRORS: Final = (
    OSError,
    MemoryError,
    ImportError,
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    BufferError,
    EOFError,
)
"""``Exception`` would be too wide: Celery raises ``SoftTimeLimitExceeded`` inside a call of a
store, and that error belongs to the task.
"""
