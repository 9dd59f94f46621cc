"""``celery leases relay | rescue``: publish messages that a crashed process did not publish."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from celery_leases.cli.output import AT_MOST, echo_table
from celery_leases.cli.parameters import option
from celery_leases.cli.root import app_of, command
from celery_leases.outbox import calls as outbox
from celery_leases.record import Record
from celery_leases.text.durations import seconds


@command()
@option(
    "--limit",
    type=AT_MOST,
    default=outbox.RELAY_AT_ONCE,
    help="Publish at most this many messages.",
)
def relay(ctx: click.Context, limit: int, **_: Any) -> None:
    """Publish messages of delay_in() whose process died between its commit and the publication.

    Exits with 1 if a message could not be published.
    """
    _echo_result(ctx, outbox.relay(app_of(ctx), limit))


@command()
@option("--older", default="15m", help="Only records that have not changed for this time.")
@option(
    "--limit",
    type=AT_MOST,
    default=outbox.RELAY_AT_ONCE,
    help="Publish the messages of at most this many records.",
)
@option("--dry-run", is_flag=True, help="List the records, and publish nothing.")
def rescue(ctx: click.Context, older: str, limit: int, dry_run: bool, **_: Any) -> None:
    """Publish the stored messages of records whose work has stopped.

    These are abandoned, or pending, or cooling although the cooldown is over. Due messages of
    delay_in() are published too, as by `leases relay`. Exits with 1 if a message could not be
    published.
    """
    app, span = app_of(ctx), seconds(older, "--older")
    if dry_run:
        found = outbox.stranded(app, older=span, limit=limit)
        _list(found)
        click.echo(f"{len(found)} would be published")
        return
    done = outbox.rescue(app, older=span, limit=limit)
    _list(done.published)
    _echo_result(ctx, done)


def _list(records: Sequence[Record]) -> None:
    if records:
        rows = [(record.state.value, record.key, record.task, record.call_id) for record in records]
        echo_table([("STATE", "KEY", "TASK", "CALL"), *rows])


def _echo_result(ctx: click.Context, done: outbox.RelayResult) -> None:
    """Print how many were published, and exit with 1 if one could not be."""
    click.echo(f"{len(done.published)} published")
    if done.refused:
        click.echo(
            f"{len(done.refused)} could not be published; the next relay or rescue tries again",
            err=True,
        )
        ctx.exit(1)
