"""``celery leases workers``: the workers on a Redis broker, and the messages that they hold."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click
from celery.bin.base import CeleryCommand, handle_preload_options

from celery_leases.cli.output import as_json as printing_json
from celery_leases.cli.output import echo_json, echo_table
from celery_leases.cli.root import app_of, leases
from celery_leases.ops.worker_leases import workers_of


@leases.command(cls=CeleryCommand)
@printing_json
@click.pass_context
@handle_preload_options
def workers(ctx: click.Context, *, as_json: bool, **_: Any) -> None:
    """List the workers on a Redis broker: their leases, and how many leased messages each holds.

    When the lease of a worker has ended, another worker returns its messages to their queues.
    """
    found = workers_of(app_of(ctx))
    if as_json:
        for state in found:
            echo_json(asdict(state))
        return
    rows = [(state.worker, str(state.pid), str(state.messages), state.lease) for state in found]
    echo_table([("WORKER", "PID", "MESSAGES", "LEASE"), *rows])
