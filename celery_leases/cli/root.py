"""The group ``celery leases``, and what all its commands need."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import click

from celery_leases.client import LeaseClient
from celery_leases.common.texts import printable
from celery_leases.errors import LeasesError
from celery_leases.worker.app_settings import leased_tasks


class _Group(click.Group):
    """Errors of celery_leases end a command with their message and exit code 1."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except LeasesError as error:
            raise click.ClickException(printable(str(error), None, keep="\n")) from None


@click.group(cls=_Group, help="Leases and records of tasks that are safe to run twice.")
def leases() -> None:
    """Hold the subcommands."""


def client_of(ctx: click.Context) -> LeaseClient:
    """A client on the stores that the settings of the app name, also where its calls are eager."""
    return LeaseClient.from_app(app_of(ctx), eager=False)


def check_task(ctx: click.Context, client: LeaseClient, task: str | None) -> None:
    """Refuse a ``--task`` that is neither a leased task of the app nor has a record: its answers
    would all be empty.
    """
    known = leased_tasks(app_of(ctx))
    if task is None or task in known or client.list(task=task, limit=1):
        return
    raise unknown_task(task, known)


def unknown_task(task: str, known: Iterable[str]) -> click.BadParameter:
    """The error for a ``--task`` that names none of the app's leased tasks."""
    names = ", ".join(sorted(known)) or "none"
    return click.BadParameter(
        f"{task} is no leased task of this app; known are {names}", param_hint="--task"
    )


def whose(ctx: click.Context, task: str | None, namespace: str | None) -> dict[str, str | None]:
    """The task and the namespace of a key; the app is asked for the namespace of a task that it
    knows.

    Refuses an unknown *task* as :func:`check_task` does, unless the *namespace* is given.
    """
    if namespace is None:
        check_task(ctx, client_of(ctx), task)
        known = leased_tasks(app_of(ctx))
        namespace = known[task].lease_options.namespace if task in known else None
    return {"task": task, "namespace": namespace}


def app_of(ctx: click.Context) -> Any:
    """The app the command was given, with all its tasks."""
    app = ctx.obj.app
    app.loader.import_default_modules()
    app.finalize()
    return app
