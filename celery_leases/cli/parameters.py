"""What may be written behind the options of commands, and which records a command means by them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeVar

import click

from celery_leases.cli.root import check_task
from celery_leases.client import LeaseClient, RecordFilter
from celery_leases.common.durations import parsed, seconds
from celery_leases.common.texts import printable
from celery_leases.errors import LeaseConfigurationError
from celery_leases.protocol.filters import KNOWN_STATES

F = TypeVar("F", bound=Callable[..., Any])


class _Span(click.ParamType[Any]):
    name = "span"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            seconds(value, param.opts[0] if param is not None else "a span")
        except LeaseConfigurationError as error:
            self.fail(printable(str(error), None), param, ctx)
        return value


class _Moment(click.ParamType[Any]):
    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, datetime):
            return value
        if (span := parsed(value)) is not None:
            try:
                return datetime.now(UTC) - timedelta(seconds=span)
            except OverflowError:
                self.fail(f"{printable(value)!r} is too long ago", param, ctx)
        try:
            when = datetime.fromisoformat(value)
        except ValueError:
            said = f"{printable(value)!r} is no time: write one such as 2026-04-01T03:00, or a span before now: 12h"
            self.fail(said, param, ctx)
        return when if when.tzinfo else when.astimezone()


SPAN: Final = _Span()
"""A span of time such as ``30s`` or ``1h30m``."""
MOMENT: Final = _Moment()
"""A time in ISO 8601, by the local clock where it has no zone; or a span before now."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The records that options of a command mean."""

    wanted: RecordFilter
    given: bool
    """Whether one of the options was given."""


_FILTERS: Final = (
    click.option(
        "--state",
        "states",
        multiple=True,
        type=click.Choice(KNOWN_STATES),
        help="Only these states.",
    ),
    click.option("--task", help="Only this task."),
    click.option(
        "--group", metavar="GROUP", help="Only those whose last failure was of this cooldown group."
    ),
    click.option("--key", "prefix", metavar="PREFIX", help="Only keys that begin so."),
    click.option(
        "--since",
        type=MOMENT,
        help="Only those whose latest attempt began since then: 12h, 2026-04-01T03:00.",
    ),
    click.option("--until", type=MOMENT, help="Only those whose latest attempt began before then."),
    click.option(
        "--reason", help="Only with this reason, as list shows it: rate_limited, worker_lost."
    ),
    click.option(
        "--crashed", is_flag=True, help="Only those whose process died, in the latest attempts."
    ),
)


def filtering(command: F) -> F:
    """Give *command* the options that :func:`selected` reads."""
    for option in reversed(_FILTERS):
        command = option(command)
    return command


def selected(ctx: click.Context, client: LeaseClient, options: dict[str, Any]) -> Selection:
    """What the options of :func:`filtering` mean; refuses a task that is unknown."""
    names = ("states", "task", "group", "prefix", "since", "until", "reason", "crashed")
    given = {name: options[name] for name in names}
    check_task(ctx, client, given["task"])
    return Selection(client.where(**given), any(given.values()))
