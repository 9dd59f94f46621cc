"""``celery leases list | show | retry | release | forget``: look at keys, and repair them."""

from __future__ import annotations

import json
from typing import Any, Literal

import click
from celery.bin.base import CeleryCommand, handle_preload_options

from celery_leases.cli.group import check_task, client_of, leases, whose
from celery_leases.cli.output import AT_MOST, as_json, echo_json, echo_line, echo_status, echo_table
from celery_leases.core.records import State
from celery_leases.core.status import ABANDONED, UNREADABLE, LeaseStatus

STATES = [state.value for state in State] + [ABANDONED, UNREADABLE]

of_task = click.option("--task", help="The task's name; needed when several tasks have this key.")
in_namespace = click.option("--namespace", help="Its lease_namespace; needed where the app does not know the task.")
for_retention = click.option("--retention", help="How long the record counts from now, as 7d; by default the task's.")


def _queued(status: LeaseStatus) -> str:
    if status.resumes:
        return "a copy of the call waits at the broker; it comes with its next hop, within 10 minutes"
    return "nothing is queued by this: call the task again"


@leases.command(name="list", cls=CeleryCommand)
@click.option("--state", "states", multiple=True, type=click.Choice(STATES), help="Only these states.")
@click.option("--task", help="Only this task.")
@click.option(
    "--limit", type=AT_MOST, default=100, show_default=True, help="At most so many, the latest started first."
)
@as_json
@click.pass_context
@handle_preload_options
def list_keys(
    ctx: click.Context, states: tuple[str, ...], task: str | None, limit: int, as_json: bool, **_: Any
) -> None:
    """List the keys that have a record, the latest started first."""
    client = client_of(ctx)
    check_task(ctx, client, task)
    found = client.list(states=states, task=task, limit=limit)
    if as_json:
        echo_json([status.as_json() for status in found])
        return
    rows = [("STATE", "KEY", "TASK", "ATTEMPT", "CRASHES", "FAILURES", "HOLDER", "")]
    for status in found:
        counts = (str(status.attempt), str(status.crashes), str(status.failures))
        rows.append((status.state, status.key, status.task or "", *counts, status.holder or "", status.message()))
    echo_table(rows)


@leases.command(cls=CeleryCommand)
@click.argument("key")
@of_task
@in_namespace
@as_json
@click.pass_context
@handle_preload_options
def show(ctx: click.Context, key: str, task: str | None, namespace: str | None, as_json: bool, **_: Any) -> None:
    """Show where KEY stands: why its task did not run, and when it will. Exits with 1 for a key nobody knows."""
    status = client_of(ctx).status(key, **whose(ctx, task, namespace))
    echo_status(status, as_json=as_json)
    if status.state == "absent":
        ctx.exit(1)


@leases.command(cls=CeleryCommand)
@click.argument("key")
@of_task
@in_namespace
@click.option("--force", is_flag=True, help="Even if it is running: its outcome is refused then.")
@for_retention
@as_json
@click.pass_context
@handle_preload_options
def retry(
    ctx: click.Context,
    key: str,
    task: str | None,
    namespace: str | None,
    force: bool,
    retention: str | None,
    as_json: bool,
    **_: Any,
) -> None:
    """End KEY's cooldown or countdown, or revive it if it has failed for good; its failures are forgiven."""
    status = client_of(ctx).retry(key, **whose(ctx, task, namespace), force=force, retention=retention)
    echo_status(status, as_json=as_json)
    if status.scope == "group":
        echo_line(f"its group {status.group} is still shut; `leases groups --open {status.group}` opens it", err=True)
    click.echo(_queued(status), err=True)


@leases.command(cls=CeleryCommand)
@click.argument("key")
@of_task
@in_namespace
@click.option("--done", is_flag=True, help="The work is done: nobody runs it again.")
@click.option("--retry", "again", is_flag=True, help="What is in doubt has not happened: it may run again.")
@click.option("--result", help="With --done: what later callers get, as JSON.")
@click.option("--force", is_flag=True, help="Even if it is running: its outcome is refused then.")
@for_retention
@as_json
@click.pass_context
@handle_preload_options
def resolve(
    ctx: click.Context,
    key: str,
    task: str | None,
    namespace: str | None,
    done: bool,
    again: bool,
    result: str | None,
    force: bool,
    retention: str | None,
    as_json: bool,
    **_: Any,
) -> None:
    """Say what became of KEY, after a look at the other side: above all of one that is uncertain."""
    if done == again:
        raise click.UsageError("say one of --done and --retry")
    if result is not None and not done:
        raise click.UsageError("--result goes with --done")
    try:
        value = json.loads(result) if result is not None else None
    except ValueError as error:
        raise click.BadParameter(f"{result!r} is no JSON ({error})", param_hint="--result") from None
    outcome: Literal["done", "retry"] = "done" if done else "retry"
    given: dict[str, Any] = {**whose(ctx, task, namespace), "result": value, "force": force, "retention": retention}
    echo_status(client_of(ctx).resolve(key, outcome, **given), as_json=as_json)
    if again:
        click.echo("nothing is queued by this: call the task again", err=True)


@leases.command(cls=CeleryCommand)
@click.argument("key")
@of_task
@in_namespace
@for_retention
@as_json
@click.pass_context
@handle_preload_options
def release(
    ctx: click.Context,
    key: str,
    task: str | None,
    namespace: str | None,
    retention: str | None,
    as_json: bool,
    **_: Any,
) -> None:
    """Take KEY away from whoever holds it; what the holder still says about the outcome is refused."""
    status = client_of(ctx).release(key, **whose(ctx, task, namespace), retention=retention)
    echo_status(status, as_json=as_json)
    if status.state == State.FAILED:
        click.echo("nothing held it; `leases retry` lets a failed key run again", err=True)
    elif status.state == State.COOLING:
        click.echo("nothing held it; `leases retry` ends its cooldown", err=True)
    else:
        click.echo("released; nothing is queued by this: call the task again, or wait for its message", err=True)


@leases.command(cls=CeleryCommand)
@click.argument("key")
@of_task
@in_namespace
@click.option("--force", is_flag=True, help="Even if it is running: its outcome is refused then.")
@for_retention
@as_json
@click.pass_context
@handle_preload_options
def forget(
    ctx: click.Context,
    key: str,
    task: str | None,
    namespace: str | None,
    force: bool,
    retention: str | None,
    as_json: bool,
    **_: Any,
) -> None:
    """Make KEY as good as new: result, failures and counts are gone."""
    status = client_of(ctx).forget(key, **whose(ctx, task, namespace), force=force, retention=retention)
    echo_status(status, as_json=as_json)
    click.echo(f"forgotten; {_queued(status)}", err=True)
