"""``celery leases show``: show one key."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Final

import click

from celery_leases.cli.output import as_json as printing_json
from celery_leases.cli.output import echo_line, echo_status
from celery_leases.cli.parameters import NAME, of_task
from celery_leases.cli.root import app_of, check_task, client_of, command
from celery_leases.client import LeaseClient
from celery_leases.errors import StoreUnavailable
from celery_leases.worker.answering import NO_WORKER, worker_answers

GROUPS_SHOWN: Final = 5
ENDED: Final = ("done", "failed", "uncertain", "unreadable")
"""States of keys for which no worker is needed."""


@command()
@click.argument("key", type=NAME)
@of_task
@printing_json
def show(
    ctx: click.Context,
    key: str,
    task: str | None,
    *,
    as_json: bool,
    **_: Any,
) -> None:
    """Show the status of KEY: its attempts, why its task did not run, and what happens next.

    Exits with 1 if the key has no record.
    """
    check_task(ctx, task)
    client = client_of(ctx)
    status = client.status(key, task=task, waiting=True)
    echo_status(status, as_json=as_json)
    if not as_json and status.state not in ENDED and worker_answers(app_of(ctx)) is False:
        echo_line(f"  workers          {NO_WORKER}")
    if status.state == "absent":
        if not as_json:
            _echo_closed_groups(client)
        ctx.exit(1)


def _echo_closed_groups(client: LeaseClient) -> None:
    """A call that meets its closed group leaves no record."""
    with suppress(StoreUnavailable):
        names = [status.group for status in client.groups()]
        more = f" and {len(names) - GROUPS_SHOWN} more" if len(names) > GROUPS_SHOWN else ""
        if names:
            echo_line(
                f"  groups           calls of {', '.join(names[:GROUPS_SHOWN])}{more} wait, and may "
                "have no record yet: `leases group list`"
            )
