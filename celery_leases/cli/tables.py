"""``celery leases migrate``: make the tables."""

from __future__ import annotations

from typing import Any

import click
from celery.bin.base import CeleryCommand, handle_preload_options

from celery_leases.cli.group import leases
from celery_leases.seam import apps
from celery_leases.wiring import open_records


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
