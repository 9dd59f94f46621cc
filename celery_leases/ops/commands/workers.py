"""``celery leases workers``: the workers on a Redis broker, and the messages that they hold."""

from __future__ import annotations

from typing import Any

import click
from celery.bin.base import CeleryCommand, handle_preload_options

from celery_leases.cli.output import as_json as printing_json
from celery_leases.cli.output import echo_json, echo_table
from celery_leases.cli.root import app_of, leases
from celery_leases.stores.redis.workers import WorkerState
from celery_leases.text.durations import in_short
from celery_leases.worker.takeover import workers_of


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
            name, pid = _name_and_pid(state)
            echo_json(
                {
                    "worker": name,
                    "pid": pid,
                    "messages": state.messages,
                    "lease_ends_in": state.remaining,
                }
            )
        return
    rows = [
        (*map(str, _name_and_pid(state)), str(state.messages), _lease(state)) for state in found
    ]
    echo_table([("WORKER", "PID", "MESSAGES", "LEASE"), *rows])


def _name_and_pid(state: WorkerState) -> tuple[str, int]:
    name, pid, _ = state.name.rsplit("/", 2)
    return name, int(pid)


def _lease(state: WorkerState) -> str:
    if state.remaining is None:
        return "ended, its messages are being returned"
    if state.remaining > 0:
        return f"ends in {in_short(state.remaining)}"
    return f"ended {in_short(-state.remaining)} ago"
