"""``celery leases relay | rescue``: publish what a crash left behind."""

from __future__ import annotations

from typing import Any

import click
from celery.bin.base import CeleryCommand, handle_preload_options

from celery_leases.cli.group import app_of, leases
from celery_leases.cli.output import echo_table
from celery_leases.core.durations import seconds
from celery_leases.seam import outgoing


@leases.command(cls=CeleryCommand)
@click.option("--limit", default=outgoing.RELAY_AT_ONCE, show_default=True, help="At most so many messages.")
@click.pass_context
@handle_preload_options
def relay(ctx: click.Context, limit: int, **_: Any) -> None:
    """Publish enqueued messages whose own process died after its commit."""
    click.echo(f"{outgoing.relay(app_of(ctx), limit)} published")


@leases.command(cls=CeleryCommand)
@click.option("--older", default="15m", show_default=True, help="Only records without a change for so long.")
@click.option("--limit", default=outgoing.RELAY_AT_ONCE, show_default=True, help="At most so many records.")
@click.option("--dry-run", is_flag=True, help="Only tell which.")
@click.pass_context
@handle_preload_options
def rescue(ctx: click.Context, older: str, limit: int, dry_run: bool, **_: Any) -> None:
    """Publish the kept messages of records that are with nobody: abandoned, pending, or cooling that is over."""
    span = seconds(older, "--older")
    found = outgoing.rescue(app_of(ctx), older=span, limit=limit, dry_run=dry_run)
    if found:
        rows = [(record.state.value, record.key, record.task, record.call_id) for record in found]
        echo_table([("STATE", "KEY", "TASK", "CALL"), *rows])
    click.echo(f"{len(found)} {'would be published' if dry_run else 'published'}")
