"""``celery leases migrate``: create the tables, or bring them to the version of this release."""

from __future__ import annotations

from typing import Any

import click

from celery_leases.attempt.process import open_records
from celery_leases.cli.parameters import option
from celery_leases.cli.root import command
from celery_leases.stores.sql.migrations import Migrated
from celery_leases.stores.urls import display_database_url
from celery_leases.worker.app_settings import settings_of


@command()
@option("--sql", is_flag=True, help="Print the SQL that creates the tables, and change nothing.")
def migrate(ctx: click.Context, sql: bool, **_: Any) -> None:
    """Create the tables in the records database, or bring them to the version of this release.

    Workers may run meanwhile. The command can be repeated.
    """
    records = open_records(settings_of(ctx.obj.app))
    if sql:
        click.echo(records.tables.ddl(records.database.engine), nl=False)
        return
    done = records.migrate()
    click.echo(f"{_described(done)}: {display_database_url(records.database.engine.url)}")


def _described(done: Migrated) -> str:
    if done.before is None:
        return f"the tables were created in version {done.after}"
    if done.before == done.after:
        return f"the tables already have version {done.after}"
    return f"the tables were migrated from version {done.before} to {done.after}"
