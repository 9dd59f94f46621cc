"""The group ``celery leases``, and what all its commands need."""

from __future__ import annotations

from typing import Any

import click

from celery_leases.client import LeaseClient
from celery_leases.core.errors import LeasesError
from celery_leases.seam import apps


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


def client_of(ctx: click.Context) -> LeaseClient:
    """A client on the stores of the app the command was given."""
    return apps.parts_of(app_of(ctx)).client


def app_of(ctx: click.Context) -> Any:
    """The app the command was given, with all its tasks."""
    app = ctx.obj.app
    app.loader.import_default_modules()
    app.finalize()
    return app
