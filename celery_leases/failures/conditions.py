"""Conditions of rules: they compare facts of an error, and say in words what they compare and what
they found.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from celery_leases.failures.error_facts import ErrorFacts


class Condition(Protocol):
    """One condition. ``str()`` of it is for people, such as ``status=429``."""

    def match(self, facts: ErrorFacts) -> str | None:
        """What matched in the facts of one error, in words; ``None``: nothing."""
        ...


@dataclass(frozen=True, slots=True)
class StatusIn:
    """The HTTP status is one of ``statuses``."""

    statuses: frozenset[int]

    def match(self, facts: ErrorFacts) -> str | None:
        """See :class:`Condition`."""
        return f"status {facts.status}" if facts.status in self.statuses else None

    def __str__(self) -> str:
        return f"status={_runs(self.statuses)}"


@dataclass(frozen=True, slots=True)
class CodeIn:
    """An error code is one of ``codes``, in which a star at the end matches any ending."""

    codes: frozenset[str]

    def match(self, facts: ErrorFacts) -> str | None:
        """See :class:`Condition`."""
        for code in facts.codes:
            if code in self.codes or any(code.startswith(start) for start in _starts(self.codes)):
                return f"code {code}"
        return None

    def __str__(self) -> str:
        return f"code={_joined(self.codes)}"


@dataclass(frozen=True, slots=True)
class NamedAs:
    """The class of the error, or a superclass, has one of ``names``.

    A bare name matches a class of any module. A dotted name may leave out inner modules:
    ``stripe.CardError`` matches ``stripe._error.CardError``. ``builtins.TimeoutError`` matches
    Python's own class only. ``itself``: superclasses do not count.
    """

    names: frozenset[str]
    itself: bool = False

    def match(self, facts: ErrorFacts) -> str | None:
        """See :class:`Condition`."""
        names = facts.names[:1] if self.itself else facts.names
        return "" if not self.names.isdisjoint(_spellings(names)) else None

    def __str__(self) -> str:
        return f"exc={_joined(self.names)}{' itself' if self.itself else ''}"


@dataclass(frozen=True, slots=True)
class SqlStateStarts:
    """The SQLSTATE begins with one of ``prefixes``."""

    prefixes: tuple[str, ...]

    def match(self, facts: ErrorFacts) -> str | None:
        """See :class:`Condition`."""
        return (
            f"SQLSTATE {facts.sqlstate}"
            if facts.sqlstate and facts.sqlstate.startswith(self.prefixes)
            else None
        )

    def __str__(self) -> str:
        return f"sqlstate={_joined(self.prefixes)}"


@dataclass(frozen=True, slots=True)
class ErrnoIn:
    """The number of an OSError or of a MySQL error is one of ``numbers``."""

    numbers: frozenset[int]

    def match(self, facts: ErrorFacts) -> str | None:
        """See :class:`Condition`."""
        return f"error number {facts.errno}" if facts.errno in self.numbers else None

    def __str__(self) -> str:
        return f"errno={_runs(self.numbers)}"


@dataclass(frozen=True, slots=True)
class GrpcIn:
    """The gRPC status code is one of ``names``."""

    names: frozenset[str]

    def match(self, facts: ErrorFacts) -> str | None:
        """See :class:`Condition`."""
        return f"gRPC {facts.grpc}" if facts.grpc in self.names else None

    def __str__(self) -> str:
        return f"grpc={_joined(self.names)}"


@dataclass(frozen=True, slots=True)
class SmtpIn:
    """The reply code of the mail server is one of ``replies``."""

    replies: frozenset[int]

    def match(self, facts: ErrorFacts) -> str | None:
        """See :class:`Condition`."""
        return f"SMTP reply {facts.smtp}" if facts.smtp in self.replies else None

    def __str__(self) -> str:
        return f"smtp={_runs(self.replies)}"


@dataclass(frozen=True, slots=True)
class HasHeader:
    """The response has the header ``name``, with ``value`` if that is given."""

    name: str
    value: str | None = None

    def match(self, facts: ErrorFacts) -> str | None:
        """See :class:`Condition`."""
        found = facts.headers.get(self.name)
        met = found is not None and (self.value is None or found.lower() == self.value)
        return f"header {self.name}: {found}" if met else None

    def __str__(self) -> str:
        return f"header={self.name}" if self.value is None else f"header={self.name}: {self.value}"


@dataclass(frozen=True, slots=True)
class MessageHas:
    """The message of the error, cut and without secrets, contains ``pattern``."""

    pattern: re.Pattern[str]

    def match(self, facts: ErrorFacts) -> str | None:
        """See :class:`Condition`."""
        found = self.pattern.search(facts.message)
        return f"the text {found[0][:80]!r}" if found else None

    def __str__(self) -> str:
        return f"message={self.pattern.pattern}"


@dataclass(frozen=True, slots=True)
class FactIs:
    """A boolean fact (``retryable``, ``invalidated`` or ``arguments``) has this ``value``."""

    fact: str
    value: bool

    def match(self, facts: ErrorFacts) -> str | None:
        """See :class:`Condition`."""
        return str(self) if getattr(facts, self.fact) is self.value else None

    def __str__(self) -> str:
        return f"{self.fact}={self.value}"


@lru_cache(maxsize=512)
def _spellings(names: tuple[str, ...]) -> frozenset[str]:
    """All spellings of *names* that :class:`NamedAs` accepts."""
    found: set[str] = set()
    for name in names:
        modules, _, bare = name.rpartition(".")
        found |= {name, bare}
        packages = modules.split(".") if modules else []
        found |= {".".join([*packages[:length], bare]) for length in range(1, len(packages))}
        if not packages:
            found.add(f"builtins.{name}")
    return frozenset(found)


@lru_cache(maxsize=128)
def _starts(codes: frozenset[str]) -> tuple[str, ...]:
    return tuple(code[:-1] for code in codes if code.endswith("*"))


def _joined(words: Iterable[str]) -> str:
    return ",".join(sorted(words))


def _runs(numbers: Iterable[int]) -> str:
    """The numbers in order, three and more consecutive ones as ``500-504``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs]
    return ",".join(parts)
