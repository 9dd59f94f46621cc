"""The command group ``celery leases``, and functions that its commands share."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, Final

import click
from celery.bin.base import CeleryCommand, handle_preload_options

from celery_leases.client import LeaseClient
from celery_leases.errors import LeasesError
from celery_leases.record_filters import Order, RecordFilter
from celery_leases.text.cleaning import printable
from celery_leases.worker.app_settings import leased_tasks
from celery_leases.worker.processes import process_of

DEFAULT_APP: Final = "default"
"""The name of the app that Celery makes if none was given."""


@cache
def _import_commands() -> None:
    for package in ("celery_leases.cli", "celery_leases.ops.commands"):
        for module in iter_modules(import_module(package).__path__):
            import_module(f"{package}.{module.name}")


class _Group(click.Group):
    """Prints an error of celery_leases as one message and exits with 1, without a traceback."""

    def list_commands(self, ctx: click.Context | None) -> list[str]:
        """The names of all commands."""
        _import_commands()
        return sorted(self.commands)

    def get_command(self, ctx: click.Context | None, cmd_name: str) -> click.Command | None:
        """The command of this name."""
        _import_commands()
        return self.commands.get(cmd_name)

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        """List the whole first sentence of a command's help, which click would cut."""
        cmd.short_help = " ".join((cmd.help or "").split()).partition(". ")[0].removesuffix(".")
        super().add_command(cmd, name)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except LeasesError as error:
            raise click.ClickException(printable(str(error), None, keep="\n")) from None
        except OSError as error:
            if error.errno == errno.EPIPE:  # a closed pipe: click exits without a message
                raise
            raise click.ClickException(printable(str(error), None)) from None


@click.group(
    cls=_Group, help="Show and change the leases and records of tasks, and check the set-up."
)
def leases() -> None:
    """The group that the subcommands are added to."""


def command(name: str | None = None, group: click.Group = leases, **more: Any) -> Any:
    """A decorator that adds a function as a command of *group*, with the options of Celery's own
    commands.
    """

    def decorate(function: Any) -> click.Command:
        called = click.pass_context(handle_preload_options(function))
        return group.command(name=name, cls=CeleryCommand, **more)(called)

    return decorate


def client_of(ctx: click.Context) -> LeaseClient:
    """A client for the stores in the app's settings, even if the app runs its tasks eagerly."""
    return LeaseClient.from_app(app_of(ctx), eager=False)


def check_task(ctx: click.Context, task: str | None) -> None:
    """Refuse a ``--task`` that is not a leased task of the app and has no record.

    The command would find nothing, without a hint that the name is wrong.
    """
    app = app_of(ctx)
    known = leased_tasks(app)
    if task is None or task in known:
        return
    records = process_of(app, eager=False).records
    if not records.find(RecordFilter(task=task), order=Order.LATEST, limit=1):
        raise unknown_task(task, known)


def unknown_task(task: str, known: Iterable[str]) -> click.BadParameter:
    """The error for a ``--task`` that is not one of the app's leased tasks."""
    names = ", ".join(sorted(known)) or "none"
    return click.BadParameter(
        f"{task} is not a leased task of this app; its leased tasks are {names}",
        param_hint="--task",
    )


def app_of(ctx: click.Context) -> Any:
    """The app of ``celery -A``, with all its tasks imported.

    Without ``-A`` Celery uses an app of its own, with the settings of a ``celeryconfig`` module if
    there is one. It is refused if it has no leased task, because its stores are not those of the
    workers.
    """
    app = ctx.obj.app
    app.loader.import_default_modules()
    app.finalize()
    if app.main == DEFAULT_APP and not leased_tasks(app):
        raise click.UsageError(
            f"no app was given: write celery -A yourapp leases {ctx.info_name}, with the module of "
            "your Celery app"
        )
    return app
