"""One rule: a name for operators, its conditions, and its action."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from celery_leases.common.durations import Duration
from celery_leases.failures.actions import Reason, Ruling
from celery_leases.failures.conditions import Condition
from celery_leases.failures.facts import ErrorFacts

Hook = Callable[[BaseException, ErrorFacts], Ruling | Duration | bool | None]
"""What users may pass to ``Rules.use``."""


class Phase(StrEnum):
    """When a rule is applied to an error and those it wraps."""

    #: Of all of them, before any other rule.
    FIRST = "first"
    #: Of one after the other, the outermost first, each time all these rules in order.
    EACH = "each"
    #: Of all of them, after any other rule: what it knows is a mere wrapper, whose cause may say
    #: more.
    LAST = "last"


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of a rule table. It matches when all conditions of one of its ``cases`` are met."""

    name: str
    cases: tuple[tuple[Condition, ...], ...]
    ruling: Ruling
    reason: Reason
    phase: Phase = Phase.EACH

    def match(self, errors: Sequence[ErrorFacts]) -> str | None:
        """What matched, as a short sentence; ``None``: the rule does not match.

        Each condition of a case may hold for another of *errors*.
        """
        for case in self.cases:
            found = []
            for condition in case:
                met = next(
                    ((words, one) for one in errors if (words := condition.match(one)) is not None),
                    None,
                )
                if met is None:
                    break
                found.append(met)
            else:
                return _sentence(found)
        return None

    def __str__(self) -> str:
        return " | ".join(" ".join(map(str, case)) for case in self.cases) or "anything"


@dataclass(frozen=True, slots=True)
class RuleFunction:
    """A rule that is a function of the user. Applied only to live exceptions, never to
    facts alone.
    """

    name: str
    hook: Hook

    def __str__(self) -> str:
        return "asks the function"


def _sentence(found: Sequence[tuple[str, ErrorFacts]]) -> str:
    """Such as ``status 503 and header retry-after: 7 of openai.InternalServerError``."""
    parts = []
    for facts in {id(facts): facts for _, facts in found}.values():
        words = " and ".join(word for word, its in found if word and its is facts)
        name = facts.names[0] if facts.names else ""
        parts.append(f"{words} of {name}" if words and name else words or name)
    return " and ".join(parts)


def matching(rules: Sequence[Rule], chain: Sequence[ErrorFacts]) -> tuple[Rule, str] | None:
    """The first of *rules* that matches an error and those it wraps (outermost first), phase by
    phase, and why.
    """
    for phase in Phase:
        asked = [rule for rule in rules if rule.phase is phase]
        for errors in [(one,) for one in _completed(chain)] if phase is Phase.EACH else [chain]:
            for rule in asked:
                if (why := rule.match(errors)) is not None:
                    return rule, why
    return None


def _completed(chain: Sequence[ErrorFacts]) -> Iterator[ErrorFacts]:
    """Each of *chain*; one that repeats the status of what it wraps speaks of the same answer,
    codes and all.
    """
    for place, facts in enumerate(chain):
        same = [
            one
            for one in chain[place + 1 :]
            if facts.status is not None and one.status == facts.status
        ]
        yield (
            replace(
                facts,
                codes=next((one.codes for one in (facts, *same) if one.codes), ()),
                headers=next((one.headers for one in (facts, *same) if one.headers), {}),
                grpc=next((one.grpc for one in (facts, *same) if one.grpc), None),
            )
            if same
            else facts
        )
