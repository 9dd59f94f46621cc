"""What is known of an error, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ErrorFacts:
    """What is known of one error and of those it wraps."""

    #: Dotted names of the class and its superclasses, most specific first; builtins without their module.
    names: tuple[str, ...] = ()
    status: int | None = None
    codes: tuple[str, ...] = ()
    sqlstate: str | None = None
    errno: int | None = None
    grpc: str | None = None
    smtp: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    retryable: bool | None = None
    retry_after: float | None = None
    invalidated: bool = False
    message: str = ""
    chain: tuple[ErrorFacts, ...] = ()

    @property
    def code(self) -> str | None:
        """The first of the codes."""
        return self.codes[0] if self.codes else None


def facts_of(error: BaseException) -> ErrorFacts:
    """The facts of *error* and of those it wraps. Never raises."""
    return ErrorFacts((f"{type(error).__module__}.{type(error).__qualname__}",))
