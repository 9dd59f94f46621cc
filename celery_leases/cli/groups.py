"""``celery leases groups``: the gates of cooldown groups."""

from __future__ import annotations

from typing import Any

import click
from celery.bin.base import CeleryCommand, handle_preload_options

from celery_leases.cli.group import client_of, leases
from celery_leases.cli.output import as_json, echo_json, echo_line, echo_table
from celery_leases.core.durations import in_words


@leases.command(cls=CeleryCommand)
@click.option("--open", "opened", metavar="GROUP", help="Open the gate of this group, and forget its trips.")
@click.option("--close", "closed", metavar="GROUP", help="Close the gate of this group.")
@click.option("--for", "span", default="5m", show_default=True, help="For how long --close closes it: 30s, 5m, 1h30m.")
@click.option("--why", default="", help="What callers are told of it.")
@as_json
@click.pass_context
@handle_preload_options
def groups(
    ctx: click.Context, opened: str | None, closed: str | None, span: str, why: str, as_json: bool, **_: Any
) -> None:
    """List the cooldown groups whose gate is not open; open or close one first, if asked to."""
    client = client_of(ctx)
    if opened is not None and not client.open_group(opened):
        echo_line(f"the gate of {opened} was open already", err=True)
    if closed is not None:
        client.close_group(closed, span, why)
    found = client.groups()
    if as_json:
        echo_json([status.as_json() for status in found])
        return
    if not found:
        click.echo("all gates are open")
        return
    rows = [("STATE", "GROUP", "TRIPS", "OPENS IN", "RULE", "")]
    for status in found:
        wait = in_words(status.retry_after) if status.retry_after else "a probe's time"
        rows.append((status.state, status.group, str(status.trips), wait, status.rule or "", status.error))
    echo_table(rows)
