"""Types of option values, and the options that select records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, TypeVar

import click

from celery_leases.cli.root import check_task
from celery_leases.client import LeaseClient, RecordFilter
from celery_leases.errors import LeaseConfigurationError
from celery_leases.record_filters import KNOWN_STATES
from celery_leases.text.cleaning import printable
from celery_leases.text.durations import moment, seconds

F = TypeVar("F", bound=Callable[..., Any])


class _Duration(click.ParamType[Any]):
    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            seconds(value, param.opts[0] if param is not None else "a duration")
        except LeaseConfigurationError as error:
            self.fail(printable(str(error), None), param, ctx)
        return value


class _Time(click.ParamType[Any]):
    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, datetime):
            return value
        try:
            return moment(value)
        except LeaseConfigurationError as error:
            self.fail(printable(str(error), None), param, ctx)


class _Name(click.ParamType[Any]):
    name = "name"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not value.strip():
            self.fail("it is blank", param, ctx)
        return value


DURATION: Final = _Duration()
"""A duration such as ``30s`` or ``1h30m``."""
TIME: Final = _Time()
"""A time in ISO 8601, local if it has no time zone; or a duration, which means that long ago."""
NAME: Final = _Name()
"""A key, or the name of a cooldown group."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The records that the options of a command select."""

    wanted: RecordFilter
    given: bool
    """Whether any of the options was given."""


_FILTERS: Final = (
    click.option(
        "--state",
        "states",
        multiple=True,
        type=click.Choice(KNOWN_STATES),
        help="Only keys in this state; may be repeated.",
    ),
    click.option("--task", help="Only keys of this task."),
    click.option(
        "--group",
        metavar="GROUP",
        help="Only keys whose last failure belongs to this cooldown group.",
    ),
    click.option("--key", "prefix", metavar="PREFIX", help="Only keys that start with this text."),
    click.option(
        "--since",
        type=TIME,
        help="Only keys whose latest attempt started at this time or later: 2026-04-01T03:00, "
        "or 12h for 12 hours ago.",
    ),
    click.option(
        "--until",
        type=TIME,
        help="Only keys whose latest attempt started before this time, written as for --since.",
    ),
    click.option(
        "--reason",
        help="Only keys with this reason, as `leases list` shows it: rate_limited, lease_ended.",
    ),
    click.option(
        "--crashed",
        is_flag=True,
        help="Only keys with crashes, known or suspected, in the latest attempts.",
    ),
)


def filtering(command: F) -> F:
    """Add to *command* the options that :func:`selected` reads."""
    for option in reversed(_FILTERS):
        command = option(command)
    return command


def selected(ctx: click.Context, client: LeaseClient, options: dict[str, Any]) -> Selection:
    """The records that the options of :func:`filtering` select; refuses an unknown task."""
    names = ("states", "task", "group", "prefix", "since", "until", "reason", "crashed")
    given = {name: options[name] for name in names}
    check_task(ctx, client, given["task"])
    since, until = options["since"], options["until"]
    if since is not None and until is not None and until <= since:
        raise click.BadParameter(
            "it is not after --since, so nothing can match", param_hint="--until"
        )
    return Selection(client.where(**given), any(given.values()))
