"""Asking a function of the user's what is to be done about a failure; whatever it does, classification goes on."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Final

from celery_leases.core.classifier.errorfacts import ErrorFacts
from celery_leases.core.classifier.rule import Asking
from celery_leases.core.errors import LeaseConfigurationError
from celery_leases.core.rulings import Ruling, exactly, permanent, retry

_log: Final = logging.getLogger("celery_leases")


def answer(asking: Asking, error: BaseException, facts: ErrorFacts) -> Ruling | None:
    """What the hook says of *error*; ``None``: nothing, or something that means nothing, or it raised (logged)."""
    try:
        said = asking.hook(error, facts)
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001 - it is the user's, and there is a failure to deal with already
        _log.exception("the failure rule %r raised; the next rule decides", asking.name)
        return None
    if said is None or isinstance(said, Ruling):
        return said
    if isinstance(said, bool):
        return retry() if said else permanent()
    if isinstance(said, int | float | str | timedelta):
        try:
            return exactly(said)
        except LeaseConfigurationError:
            pass
    kind = type(said).__name__  # what it is made of may be secret
    _log.error("the failure rule %r returned a %s, which is no ruling; the next rule decides", asking.name, kind)
    return None
