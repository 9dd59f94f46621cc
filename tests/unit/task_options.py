"""The options of a task that is registered in a test."""

from __future__ import annotations

from typing import Any

import pytest

from celery_leases.errors import LeaseConfigurationError
from celery_leases.options import LeaseOptions, gather

PARAMETERS = ("customer_id", "month")


def gathered_options(
    *,
    defaults: dict[str, Any] | None = None,
    parameters: tuple[str, ...] | None = PARAMETERS,
    **given: Any,
) -> LeaseOptions:
    """The options of a task with these attributes."""
    return gather("billing.send", given, defaults or {}, parameters)


def refused(
    *,
    defaults: dict[str, Any] | None = None,
    parameters: tuple[str, ...] | None = PARAMETERS,
    **given: Any,
) -> str:
    """The message of the error for these attributes."""
    with pytest.raises(LeaseConfigurationError) as caught:
        gathered_options(defaults=defaults, parameters=parameters, **given)
    return str(caught.value)
