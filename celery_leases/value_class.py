"""Values that are made for each task: frozen for the type checker, plain dataclasses at run time.

Python sets each field of a frozen dataclass by a call of ``object.__setattr__``, which takes about
twenty times as long as an assignment. A task makes some 150 of these fields.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dataclasses import dataclass as value_class
else:
    from dataclasses import dataclass

    def value_class(*, frozen, slots):  # noqa: ARG001 - for the type checker
        """``dataclass(frozen=True, slots=True)``, whose instances nothing guards at run time."""
        return dataclass(slots=slots, unsafe_hash=True)


__all__ = ["value_class"]
