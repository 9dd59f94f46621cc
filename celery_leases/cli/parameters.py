"""Types and options that several commands have."""

from __future__ import annotations

from typing import Any, Final

import click

from celery_leases.errors import LeaseConfigurationError
from celery_leases.text.cleaning import printable
from celery_leases.text.durations import seconds


class _Duration(click.ParamType[Any]):
    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            seconds(value, param.opts[0] if param is not None else "a duration")
        except LeaseConfigurationError as error:
            self.fail(printable(str(error), None), param, ctx)
        return value


class _Name(click.ParamType[Any]):
    name = "name"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not value.strip():
            self.fail("it is blank", param, ctx)
        return value


def option(*names: str, **more: Any) -> Any:
    """An option whose default, if it has one, is shown in the help."""
    return click.option(*names, show_default="default" in more, **more)


DURATION: Final = _Duration()
"""A duration such as ``30s`` or ``1h30m``."""
NAME: Final = _Name()
"""A key, or the name of a cooldown group."""
of_task = option("--task", help="The name of the task; needed if several tasks have this key.")
