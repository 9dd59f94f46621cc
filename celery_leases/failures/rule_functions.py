"""Calls a rule function of the user; classification continues whatever the function does."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Final

from celery_leases.errors import LeaseConfigurationError
from celery_leases.failures.actions import Ruling, permanent, retry, retry_exactly
from celery_leases.failures.facts import ErrorFacts
from celery_leases.failures.rule import RuleFunction

_log: Final = logging.getLogger("celery_leases")


def ruling_by(
    rule_function: RuleFunction, error: BaseException, facts: ErrorFacts
) -> Ruling | None:
    """The action that the hook returns for *error*; ``None``: nothing, an unusable value, or an
    exception (logged).
    """
    try:
        said = rule_function.hook(error, facts)
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001 - it is the user's, and there is a failure to deal with already
        _log.exception("the failure rule %r raised; the next rule decides", rule_function.name)
        return None
    if said is None or isinstance(said, Ruling):
        return said
    if isinstance(said, bool):
        return retry() if said else permanent()
    if isinstance(said, int | float | str | timedelta):
        try:
            return retry_exactly(said)
        except LeaseConfigurationError:
            pass
    kind = type(said).__name__  # its arguments may be secret
    _log.error(
        "the failure rule %r returned a %s, which is no action; the next rule decides",
        rule_function.name,
        kind,
    )
    return None
