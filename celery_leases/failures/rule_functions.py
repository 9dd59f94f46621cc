"""Calls a rule function of the user; its errors do not stop the classification."""

from __future__ import annotations

from datetime import timedelta

from celery_leases.errors import LeaseConfigurationError
from celery_leases.failures.actions import Action, permanent, retry, retry_exactly
from celery_leases.failures.error_facts import ErrorFacts
from celery_leases.failures.rule import RuleFunction
from celery_leases.text.notices import logger


def action_by(
    rule_function: RuleFunction, error: BaseException, facts: ErrorFacts
) -> Action | None:
    """The action that the hook returns for *error*; ``None`` if it returns ``None``, or returns
    another value or raises, which is logged.
    """
    try:
        returned = rule_function.hook(error, facts)
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001 - the function may raise anything, and must not hide the failure
        logger.exception(
            "the failure rule %r raised; the next rule decides",
            rule_function.name,
            code="rule-function-wrong",
        )
        return None
    if returned is None or isinstance(returned, Action):
        return returned
    if isinstance(returned, bool):
        return retry() if returned else permanent()
    if isinstance(returned, int | float | str | timedelta):
        try:
            return retry_exactly(returned)
        except LeaseConfigurationError:
            pass
    kind = type(returned).__name__  # the value itself may be secret
    logger.error(
        "the failure rule %r returned a %s, which is no action; the next rule decides",
        rule_function.name,
        kind,
        code="rule-function-wrong",
    )
    return None
