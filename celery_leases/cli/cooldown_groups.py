"""``celery leases group list | open | close``: the gates of cooldown groups."""

from __future__ import annotations

from typing import Any

import click
from celery.bin.base import CeleryCommand, handle_preload_options

from celery_leases.cli.output import as_json as printing_json
from celery_leases.cli.output import echo_json, echo_line, echo_table
from celery_leases.cli.parameters import SPAN
from celery_leases.cli.root import client_of, leases
from celery_leases.client import LeaseClient
from celery_leases.common.durations import in_words


@leases.group()
def group() -> None:
    """Look at cooldown groups, open and close their gates."""


@group.command(name="list", cls=CeleryCommand)
@printing_json
@click.pass_context
@handle_preload_options
def list_groups(ctx: click.Context, *, as_json: bool, **_: Any) -> None:
    """List the cooldown groups whose gate is not open."""
    _list(client_of(ctx), as_json=as_json)


@group.command(name="open", cls=CeleryCommand)
@click.argument("groups", nargs=-1, required=True, metavar="GROUP...")
@printing_json
@click.pass_context
@handle_preload_options
def open_groups(ctx: click.Context, groups: tuple[str, ...], *, as_json: bool, **_: Any) -> None:
    """Open the gate of each GROUP, forget its trips, and end the waits of the keys that failed of
    it.
    """
    client = client_of(ctx)
    for name in groups:
        if not client.open_group(name):
            echo_line(f"the gate of {name} was open already", err=True)
    _list(client, as_json=as_json)


@group.command(name="close", cls=CeleryCommand)
@click.argument("groups", nargs=-1, required=True, metavar="GROUP...")
@click.option(
    "--for",
    "span",
    type=SPAN,
    default="5m",
    show_default=True,
    help="For how long: 30s, 5m, 1h30m.",
)
@click.option("--why", default="", help="What operators see of it.")
@printing_json
@click.pass_context
@handle_preload_options
def close_groups(
    ctx: click.Context, groups: tuple[str, ...], span: str, why: str, *, as_json: bool, **_: Any
) -> None:
    """Let no body of each GROUP start for a while; the first one after that is a probe."""
    client = client_of(ctx)
    for name in groups:
        client.close_group(name, span, why)
    _list(client, as_json=as_json)


def _list(client: LeaseClient, *, as_json: bool) -> None:
    found = client.groups()
    if as_json:
        for status in found:
            echo_json(status.as_json())
        return
    if not found:
        click.echo("all gates are open")
        return
    rows = [("STATE", "GROUP", "TRIPS", "OPENS IN", "RULE", "WHY")]
    for status in found:
        wait = in_words(status.retry_after) if status.retry_after else "a probe's time"
        rows.append(
            (status.state, status.group, str(status.trips), wait, status.rule or "", status.error)
        )
    echo_table(rows)
