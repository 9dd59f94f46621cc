"""``celery leases group list | show | open | close``: cooldown groups."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

import click

from celery_leases.cli.output import as_json as printing_json
from celery_leases.cli.output import echo_json, echo_line, echo_table
from celery_leases.cli.parameters import DURATION, NAME, option
from celery_leases.cli.root import command, leases
from celery_leases.client import GroupStatus
from celery_leases.ops.actions import DEFAULT_DURATION
from celery_leases.ops.client import OperatorClient
from celery_leases.ops.commands.records import operator_of
from celery_leases.text.durations import in_short, in_words

_SPAN: Final = re.compile(r"(\d+(\.\d+)?[a-z]+)+")


@leases.group()
def group() -> None:
    """Show cooldown groups, and open or close them."""


@command("list", group)
@option(
    "--all",
    "opened",
    is_flag=True,
    help="Also list open groups that have running bodies, or were closed in the last 30 days.",
)
@printing_json
def list_groups(ctx: click.Context, *, opened: bool, as_json: bool, **_: Any) -> None:
    """List the groups that are not open, and those that are full."""
    _list(operator_of(ctx), as_json=as_json, opened=opened)


@command("show", group)
@click.argument("name", type=NAME, metavar="GROUP")
@printing_json
def show_group(ctx: click.Context, name: str, *, as_json: bool, **_: Any) -> None:
    """Show GROUP and the last twenty times it was closed."""
    status = operator_of(ctx).group(name)
    if as_json:
        echo_json(status.as_json())
        return
    _echo([status])
    if not status.closings:
        click.echo("not closed in the last 30 days")
        return
    click.echo()
    rows = [("CLOSED AT", "FOR", "IN A ROW", "RULE", "REASON", "OPENED")]
    for each in status.closings:
        took = (each.opened_at - each.closed_at).total_seconds() if each.opened_at else None
        rows.append(
            (
                f"{each.closed_at.astimezone():%Y-%m-%d %H:%M:%S}",
                in_short(each.seconds),
                str(each.in_a_row),
                each.rule or "",
                each.reason,
                f"after {in_short(max(0.0, took))}" if took is not None else "",
            )
        )
    echo_table(rows)


@command("open", group)
@click.argument("groups", nargs=-1, required=True, type=NAME, metavar="GROUP...")
@printing_json
def open_groups(ctx: click.Context, groups: tuple[str, ...], *, as_json: bool, **_: Any) -> None:
    """Open each GROUP.

    Its count of closings is set to zero. Keys that wait for the group can run at once. Exits with
    1 if a group was already open, as that of a name that no group has.
    """
    client = operator_of(ctx)
    was_open = [name for name in groups if not client.open_group(name)]
    _list(client, as_json=as_json)
    for name in was_open:
        echo_line(f"the group {name} was already open, so it was not changed", err=True)
    if was_open:
        ctx.exit(1)


@command("close", group)
@click.argument("groups", nargs=-1, required=True, type=NAME, metavar="GROUP...")
@option(
    "--for",
    "span",
    type=DURATION,
    default=DEFAULT_DURATION,
    help="How long the group stays closed: 30s, 5m, 1h30m.",
)
@option("--why", default="", help="The reason, shown to operators but not to callers.")
@printing_json
def close_groups(
    ctx: click.Context, groups: tuple[str, ...], span: str, why: str, *, as_json: bool, **_: Any
) -> None:
    """Close each GROUP for some time.

    Until then no task of the group starts. The first one afterwards is a probe.
    """
    for name in groups[1:]:
        if _SPAN.fullmatch(name):
            raise click.UsageError(f"{name} is a time and not a group: write --for {name}")
    client = operator_of(ctx)
    for name in groups:
        client.close_group(name, span, why)
    _list(client, as_json=as_json)


def _list(client: OperatorClient, *, as_json: bool, opened: bool = False) -> None:
    found = client.groups(opened=opened)
    if as_json:
        for status in found:
            echo_json(status.as_json())
        return
    if not found:
        click.echo("all groups are open")
        return
    _echo(found)


def _echo(found: Sequence[GroupStatus]) -> None:
    rows = [("STATE", "GROUP", "IN A ROW", "OPENS IN", "CLOSINGS", "RULE", "WHY")]
    for status in found:
        wait = in_words(status.retry_after) if status.retry_after else "after a probe"
        shut = status.state not in ("open", "full")
        rows.append(
            (
                *(status.state, status.group, str(status.in_a_row)),
                wait if shut else "",
                _closings(status),
                *(status.rule or "", status.error),
            )
        )
    echo_table(rows)


def _closings(status: GroupStatus) -> str:
    """How many closings are remembered, and how long ago the first of them was."""
    if not status.closings:
        return ""
    span = (datetime.now(UTC) - status.closings[-1].closed_at).total_seconds()
    return f"{len(status.closings)} in {in_short(max(0.0, span))}"
