"""One rule: a name for operators, its conditions, and its action."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from celery_leases.failures.actions import Action, Reason
from celery_leases.failures.conditions import Condition
from celery_leases.failures.error_facts import ErrorFacts
from celery_leases.text.durations import Duration

Hook = Callable[[BaseException, ErrorFacts], Action | Duration | bool | None]
"""The functions that ``Rules.use`` accepts."""


class Phase(StrEnum):
    """When a rule is applied to an error and the errors that it wraps."""

    #: Before the other rules, to all errors at once.
    FIRST = "first"
    #: To one error after the other, the outermost first: all these rules in order for each.
    EACH = "each"
    #: After the other rules, to all errors at once: for wrappers, whose cause is more precise.
    LAST = "last"


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule: it matches if all conditions of one of its ``cases`` match."""

    name: str
    cases: tuple[tuple[Condition, ...], ...]
    action: Action
    reason: Reason
    phase: Phase = Phase.EACH

    def match(self, errors: Sequence[ErrorFacts]) -> str | None:
        """What matched, in a few words; ``None``: the rule does not match.

        The conditions of a case may match different errors.
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
    """A rule that calls a function of the user. It applies to exceptions, not to facts alone."""

    name: str
    hook: Hook

    def __str__(self) -> str:
        return "calls the function"


def _sentence(found: Sequence[tuple[str, ErrorFacts]]) -> str:
    """For example ``status 503 and header retry-after: 7 of openai.InternalServerError``."""
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
    """The errors of *chain*. An error with the status of an error that it wraps has the same
    response, so it gets the codes, headers and gRPC code of that error if it has none.
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
