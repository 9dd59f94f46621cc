"""Expected classifications: one constant per row of the rule table, and cases that expect it."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Self

from tests.clients.servers import Server, nobody


@dataclass(frozen=True)
class Expected:
    """The part of a classification that a task meets; the names of the rules are not part of it."""

    reason: str
    kind: str
    scope: str = "key"
    ambiguous: bool = False
    operator: bool = False
    delay: float | None = None
    #: The name of the error's class, where any mistake of the case itself would be judged alike.
    raised: str = ""
    #: The answer named a moment, and time has passed since.
    slack: float = 0.0
    #: What follows after the last quick retry, if the rule defines that.
    then: str | None = None

    def after(self, seconds: float) -> Self:
        """The same, with a delay in seconds from the response."""
        return replace(self, delay=seconds)

    def of(self, name: str) -> Self:
        """The same, of an error of this class."""
        return replace(self, raised=name)

    def about(self, seconds: float) -> Self:
        """The same, with a time from the response until which to wait."""
        return replace(self, delay=seconds, slack=2.0)


TOLD_TO_STOP = Expected("outcome_unknown", "cooldown", ambiguous=True, operator=True)
OUT_OF_QUOTA = Expected("out_of_quota", "cooldown", "group", operator=True)
DECLINED = Expected("declined", "permanent")
UNAUTHORIZED = Expected("unauthorized", "cooldown", "group", operator=True)
RATE_LIMITED = Expected("rate_limited", "cooldown", "group")
CONFLICT = Expected("conflict", "retry")
INFRASTRUCTURE = Expected("infrastructure", "retry")
UNREACHABLE = Expected("unreachable", "retry", then="cooldown of the group")
OUTCOME_UNKNOWN = Expected("outcome_unknown", "retry", ambiguous=True)
REFUSED = Expected("refused", "permanent")
LIMIT_HIT = Expected("limit_hit", "cooldown", ambiguous=True)
ERROR = Expected("error", "cooldown")
NOT_THERE_YET = Expected("not_found", "retry", then="cooldown of the key")


def judged(error: BaseException) -> dict[str, Any]:
    """Classify *error* by the default rules, as JSON values. A warning is an error here."""
    from celery_leases.failures.classifier import Rules

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        matched = Rules.default().classify(error, time.time())
    action = matched.action
    then = f"{action.then.kind} of the {action.then.scope}" if action.then else None
    found = Expected(
        reason=str(matched.reason),
        kind=action.kind,
        scope=action.scope,
        ambiguous=action.ambiguous,
        operator=action.operator,
        delay=matched.delay,
        then=then,
        raised=type(error).__name__,
    )
    return asdict(found)


@dataclass(frozen=True)
class Places:
    """Where the real servers are that take longer to start than one call."""

    postgres: str = ""
    redis: str = ""


@dataclass(frozen=True)
class Case:
    """One real error: *call* makes the library raise it, given the URL of *server*."""

    name: str
    call: Callable[..., Any]
    server: Server
    expected: Expected
    needs: Literal["postgres", "redis"] | None = None

    def raised(self, places: Places) -> Exception:
        """Let the library raise. Raises AssertionError when it does not."""
        try:
            with self.server() as url:
                self.call(url or places)
        except Exception as error:  # noqa: BLE001 - which one is the question
            return error
        raise AssertionError(f"{self.name}: nothing was raised")

    def check(self, found: Mapping[str, Any]) -> None:
        """Assert that a classification is the expected one."""
        wanted = asdict(self.expected)
        slack = wanted["slack"]
        near: dict[str, Any] = {"slack": slack}
        if slack and found["delay"] is not None and abs(found["delay"] - wanted["delay"]) <= slack:
            near["delay"] = wanted["delay"]
        if not wanted["raised"]:
            near["raised"] = ""
        seen = {**found, **near}
        assert seen == wanted, "\n".join(
            f"{self.name}: {name} is {seen[name]!r}, and not {wanted[name]!r}"
            for name in wanted
            if seen[name] != wanted[name]
        )


def cases(
    library: str, call: Callable[..., Any], table: Mapping[str, tuple[Server, Expected]]
) -> list[Case]:
    """One call of a library, met by one server after the other."""
    return [
        Case(f"{library} {name}", call, server, expected)
        for name, (server, expected) in table.items()
    ]


def raising(
    library: str,
    table: Mapping[str, tuple[Callable[[Places], Any], Expected]],
    needs: Literal["postgres", "redis"] | None = None,
) -> list[Case]:
    """Errors that need no misbehaving server, and maybe a real one."""
    return [
        Case(f"{library} {name}", call, nobody, expected, needs)
        for name, (call, expected) in table.items()
    ]
