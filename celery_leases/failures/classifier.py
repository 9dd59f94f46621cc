"""``Rules``: an ordered, immutable list of rules, which classifies errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from celery_leases.errors import Cooldown, LeaseConfigurationError, RetryLater, Snooze
from celery_leases.failures import rule_syntax
from celery_leases.failures.actions import Reason, RuleMatch, exact_delay, reason_of
from celery_leases.failures.conditions import HasHeader
from celery_leases.failures.default_rules import (
    ANYTHING_ELSE,
    ASKED_COOLDOWN,
    ASKED_RETRY,
    ASKED_SNOOZE,
    CONTROL_FLOW,
    DEFAULTS,
    LIMITS,
)
from celery_leases.failures.delays import server_delay
from celery_leases.failures.error_facts import MESSAGE_MAX, ErrorFacts, facts_from
from celery_leases.failures.exception_chain import error_chain
from celery_leases.failures.rule import Hook, Phase, Rule, RuleFunction, matching
from celery_leases.failures.rule_functions import action_by
from celery_leases.failures.safe_attribute_reader import Reader
from celery_leases.text.notices import logger
from celery_leases.text.redaction import message_of

__all__ = ["Hook", "Rule", "RuleFunction", "Rules"]


@dataclass(frozen=True, slots=True)
class Rules:
    """What to do after failures; the first rule that matches decides. Immutable: ``on`` and ``use``
    return new objects.

    The order: exceptions of celery_leases that the body has raised (``Cooldown``, ``RetryLater``,
    ``PermanentFailure``), the user's rules as they are written, the default rules (with
    ``Rules.default()``), and last a rule that cools the key down.
    """

    #: The rules of the user, in the order in which they are written.
    written: tuple[Rule | RuleFunction, ...] = ()
    #: Whether the default rules follow.
    defaults: bool = False

    @classmethod
    def default(cls) -> Rules:
        """The default rules. Rules that are added apply before them."""
        return cls(defaults=True)

    def on(
        self,
        *,
        status: rule_syntax.Statuses | None = None,
        code: rule_syntax.Words | None = None,
        exc: rule_syntax.Kinds | None = None,
        sqlstate: rule_syntax.Words | None = None,
        grpc: rule_syntax.Words | None = None,
        header: str | None = None,
        message: str | None = None,
        name: str | None = None,
        to: rule_syntax.To,
    ) -> Rules:
        """These rules and one more: if all conditions hold for the error or an error that it wraps,
        the action is *to*.

        *to* is :func:`~celery_leases.failures.actions.retry`, ``cooldown`` or ``permanent``, or one
        of these words, or a duration: retry after exactly that. *header* must be present, *message*
        is a regular expression, *exc* also matches subclasses. A wrong value raises
        :class:`LeaseConfigurationError`.
        """
        case = rule_syntax.conditions(
            status=status,
            code=code,
            exc=exc,
            sqlstate=sqlstate,
            grpc=grpc,
            header=header,
            message=message,
        )
        action = rule_syntax.action(to)
        rule = Rule(
            _named(name, f"user: {' '.join(map(str, case))}"), (case,), action, reason_of(action)
        )
        return replace(self, written=(*self.written, rule))

    def use(self, hook: Hook, *, name: str | None = None) -> Rules:
        """These rules and one more, which calls ``hook(exception, facts)``.

        The hook returns an action, a duration (retry after exactly that), ``True`` (retry),
        ``False`` (permanent), or ``None`` (apply the next rule). Another value, or an exception, is
        logged and counts as ``None``.
        """
        if not callable(hook):
            raise LeaseConfigurationError(
                f"Rules.use: {hook!r} is not usable; write a function of (exception, facts)"
            )
        called = getattr(hook, "__qualname__", type(hook).__qualname__)
        rule_function = RuleFunction(_named(name, f"user: {called}"), hook)
        return replace(self, written=(*self.written, rule_function))

    def rows(self) -> tuple[Rule | RuleFunction, ...]:
        """All rules in the order in which they apply; see :class:`Phase`."""
        defaults = (
            [rule for phase in Phase for rule in DEFAULTS if rule.phase is phase]
            if self.defaults
            else []
        )
        return (*CONTROL_FLOW, *self.written, LIMITS, *defaults, ANYTHING_ELSE)

    def classify(
        self, error: BaseException, now: float, clock: Callable[[], float] | None = None
    ) -> RuleMatch:
        """The classification of *error*; *now* is the wall clock in seconds since the epoch.

        Never raises, except for a KeyboardInterrupt in a hook. *clock* returns seconds, for the
        time limit of :class:`~celery_leases.failures.safe_attribute_reader.Reader`. Celery's own
        control flow and ``LeaseLost`` are not failures and must not be passed. ``Snooze``, which is
        no failure either, gives a retry after its delay.
        """
        try:
            read = Reader(clock)
            errors = error_chain(error, read)
            for one in errors:
                if isinstance(one, Cooldown | RetryLater | Snooze):
                    return _asked(one, now)
            return self._classified(facts_from(errors, read, _headers(self.written)), now, error)
        except Exception:  # noqa: BLE001 - an error here must not hide the failure
            logger.exception(
                "could not classify %s; it is handled as an unknown error",
                type(error),
                code="not-classified",
            )
            return _unknown("it could not be classified")

    def classify_facts(self, facts: ErrorFacts, now: float) -> RuleMatch:
        """The classification of an error from its facts alone; hooks are not called. Never
        raises.
        """
        try:
            return self._classified(facts, now, None)
        except Exception:  # noqa: BLE001 - as above
            logger.exception(
                "could not classify %r; it is handled as an unknown error",
                facts,
                code="not-classified",
            )
            return _unknown("it could not be classified")

    def _classified(self, facts: ErrorFacts, now: float, error: BaseException | None) -> RuleMatch:
        found = self._found(facts, error)
        delay = server_delay(facts, now)
        if (exact := exact_delay(found.action)) is not None:
            return replace(found, delay=exact, source="rule")
        if found.action.kind == "permanent" or delay is None:
            return found
        return replace(found, delay=delay.seconds, source=delay.source, clamped=delay.clamped)

    def _found(self, facts: ErrorFacts, error: BaseException | None) -> RuleMatch:
        chain = facts.chain or (facts,)
        for rule in (*CONTROL_FLOW, *self.written):
            if isinstance(rule, Rule):
                if (why := rule.match(chain)) is not None:
                    return RuleMatch(rule.name, rule.action, rule.reason, why=why)
            elif error is not None and (action := action_by(rule, error, facts)) is not None:
                return RuleMatch(
                    rule.name, action, reason_of(action), why="the rule function decided"
                )
        matched = matching((LIMITS, *DEFAULTS) if self.defaults else (LIMITS,), chain)
        if matched is not None:
            rule, why = matched
            return RuleMatch(rule.name, rule.action, rule.reason, why=why)
        name = f" {facts.names[0]}" if facts.names else ""
        return _unknown(f"no rule knows{name}")


def _asked(error: Cooldown | RetryLater | Snooze, now: float) -> RuleMatch:
    """The classification of an exception by which the body asks for a delay, which may be longer
    than that of a response.
    """
    name, action, delay = "asked-snooze", ASKED_SNOOZE, error.delay
    if isinstance(error, RetryLater):
        name, action = "asked-retry", ASKED_RETRY
    elif isinstance(error, Cooldown):
        name, action = "asked-cooldown", replace(ASKED_COOLDOWN, scope=error.scope)
        if error.until is not None:
            delay = max(0.0, error.until - now)
    source = None if delay is None else "exception"
    return RuleMatch(name, action, Reason.ASKED, delay, source, why=message_of(error, MESSAGE_MAX))


def _unknown(why: str) -> RuleMatch:
    return RuleMatch(ANYTHING_ELSE.name, ANYTHING_ELSE.action, ANYTHING_ELSE.reason, why=why)


def _headers(rules: Sequence[Rule | RuleFunction]) -> frozenset[str]:
    """The headers that conditions of the user's rules read."""
    cases = (case for rule in rules if isinstance(rule, Rule) for case in rule.cases)
    return frozenset(part.name for case in cases for part in case if isinstance(part, HasHeader))


def _named(name: object, otherwise: str) -> str:
    if name is None:
        return otherwise
    if not isinstance(name, str) or not name.strip():
        raise LeaseConfigurationError(
            f"Rules: name={name!r} is not usable; write a few words for operators"
        )
    return name
