"""``celery -A proj leases …``: look at keys, repair them, and make the tables."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import click
from celery.bin.base import CeleryCommand, handle_preload_options

from celery_leases import apps
from celery_leases.client import ABANDONED, LeaseClient, LeaseStatus
from celery_leases.core.errors import LeasesError
from celery_leases.core.records import State
from celery_leases.wiring import open_records

STATES = [state.value for state in State] + [ABANDONED]

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
of_task = click.option("--task", help="The task's name; needed when several tasks have this key.")


class _Group(click.Group):
    """Errors of celery_leases end a command with their message and exit code 1."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except LeasesError as error:
            raise click.ClickException(str(error)) from None


@click.group(cls=_Group, help="Leases and records of tasks that are safe to run twice.")
def leases() -> None:
    """Hold the subcommands."""


@leases.command(name="list", cls=CeleryCommand)
@click.option("--state", "states", multiple=True, type=click.Choice(STATES), help="Only these states.")
@click.option("--task", help="Only this task.")
@click.option("--limit", default=100, show_default=True, help="At most so many, the latest started first.")
@as_json
@click.pass_context
@handle_preload_options
def list_keys(
    ctx: click.Context, states: tuple[str, ...], task: str | None, limit: int, as_json: bool, **_: Any
) -> None:
    """List the keys that have a record, the latest started first."""
    found = _client(ctx).list(states=states, task=task, limit=limit)
    if as_json:
        _echo_json([status.as_json() for status in found])
        return
    rows = [("STATE", "KEY", "TASK", "ATTEMPT", "CRASHES", "FAILURES", "HOLDER", "")]
    for status in found:
        counts = (str(status.attempt), str(status.crashes), str(status.failures))
        rows.append((status.state, status.key, status.task or "", *counts, status.holder or "", status.message()))
    _echo_table(tuple(_printable(cell) for cell in row) for row in rows)


@leases.command(cls=CeleryCommand)
@click.argument("key")
@of_task
@as_json
@click.pass_context
@handle_preload_options
def show(ctx: click.Context, key: str, task: str | None, as_json: bool, **_: Any) -> None:
    """Show where KEY stands: why its task did not run, and when it will. Exits with 1 for a key nobody knows."""
    status = _client(ctx).status(key, task=task)
    _echo_status(status, as_json=as_json)
    if status.state == "absent":
        ctx.exit(1)


@leases.command(cls=CeleryCommand)
@click.argument("key")
@of_task
@as_json
@click.pass_context
@handle_preload_options
def release(ctx: click.Context, key: str, task: str | None, as_json: bool, **_: Any) -> None:
    """Take KEY away from whoever holds it; what the holder still says about the outcome is refused."""
    status = _client(ctx).release(key, task=task)
    _echo_status(status, as_json=as_json)
    if status.state == State.FAILED:
        click.echo("nothing held it; `leases forget` lets a failed key run again", err=True)
    else:
        click.echo("released; nothing is queued by this: call the task again, or wait for its message", err=True)


@leases.command(cls=CeleryCommand)
@click.argument("key")
@of_task
@click.option("--force", is_flag=True, help="Even if it is running: its outcome is refused then.")
@as_json
@click.pass_context
@handle_preload_options
def forget(ctx: click.Context, key: str, task: str | None, force: bool, as_json: bool, **_: Any) -> None:
    """Make KEY as good as new: result, failures and counts are gone."""
    _echo_status(_client(ctx).forget(key, task=task, force=force), as_json=as_json)
    click.echo("forgotten; nothing is queued: call the task again", err=True)


@leases.command(cls=CeleryCommand)
@click.option("--sql", is_flag=True, help="Print the SQL and change nothing.")
@click.pass_context
@handle_preload_options
def migrate(ctx: click.Context, sql: bool, **_: Any) -> None:
    """Create the tables in the records database. Running it again is harmless."""
    records = open_records(apps.settings_of(ctx.obj.app))
    if sql:
        click.echo(records.tables.ddl(records.database.engine), nl=False)
        return
    records.migrate()
    click.echo(f"the tables are there: {records.database.engine.url!r}")


def _client(ctx: click.Context) -> LeaseClient:
    app = ctx.obj.app
    app.loader.import_default_modules()
    app.finalize()
    return apps.parts_of(app).client


def _echo_status(status: LeaseStatus, *, as_json: bool) -> None:
    values = status.as_json()
    if as_json:
        _echo_json(values)
        return
    click.echo(status.message())
    for name, value in values.items():
        if value not in (None, [], {}):
            click.echo(
                f"  {name.replace('_', ' '):16} {json.dumps(value) if isinstance(value, dict | list) else value}"
            )


def _echo_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2, default=str))


def _printable(cell: str) -> str:
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in cell)


def _echo_table(rows: Iterable[tuple[str, ...]]) -> None:
    rows = list(rows)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
