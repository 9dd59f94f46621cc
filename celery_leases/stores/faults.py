"""The errors of Python that a call of a store may end with, for example without file descriptors
or memory.
"""

from __future__ import annotations

from typing import Final

FAULTS: Final = (
    *(OSError, MemoryError, ImportError, RuntimeError, ValueError, TypeError, LookupError),
    *(AttributeError, ArithmeticError, AssertionError, BufferError, EOFError),
)
"""Not every exception: a soft time limit that is raised during a call belongs to the task."""
