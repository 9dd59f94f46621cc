"""The classifier: an ordered, immutable list of rules, and what they say about an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from celery_leases.core.errorfacts import ErrorFacts, facts_of
from celery_leases.core.rulings import Judgement, Reason, Ruling, cooldown

Hook = Callable[[BaseException, ErrorFacts], Ruling | float | bool | None]


@dataclass(frozen=True, slots=True)
class Rules:
    """An ordered list of rules; the first that matches decides. Immutable."""

    @classmethod
    def default(cls) -> Rules:
        """The default rules."""
        return cls()

    def on(
        self,
        *,
        status: Any = None,
        code: Any = None,
        exc: Any = None,
        sqlstate: Any = None,
        grpc: Any = None,
        header: str | None = None,
        message: str | None = None,
        name: str | None = None,
        to: Ruling | float | str,
    ) -> Rules:
        """These rules with one more, before the default ones."""
        raise NotImplementedError

    def use(self, hook: Hook) -> Rules:
        """These rules with one more, which asks *hook*."""
        raise NotImplementedError

    def judge(self, error: BaseException, now: float) -> Judgement:
        """What is done about *error*; *now* is the wall clock in seconds since the epoch. Never raises."""
        return self.judge_facts(facts_of(error), now)

    def judge_facts(self, facts: ErrorFacts, now: float) -> Judgement:
        """What is done about an error of which only the facts are known. Never raises."""
        return Judgement("anything-else", cooldown(), Reason.ERROR)

    def rows(self) -> Iterator[Any]:
        """The rules in the order in which they are asked."""
        return iter(())
