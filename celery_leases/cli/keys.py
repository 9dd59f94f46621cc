"""``celery leases list | watch | stats | show | resolve``: look at records, and say what became of
one.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Literal

import click
from celery.bin.base import CeleryCommand, handle_preload_options

from celery_leases.cli.output import (
    AT_MOST,
    Row,
    as_json,
    echo_json,
    echo_line,
    echo_status,
    echo_table,
)
from celery_leases.cli.parameters import SPAN, filtering, selected
from celery_leases.cli.root import app_of, client_of, leases, whose
from celery_leases.client import LeaseClient, RecordFilter
from celery_leases.common.durations import in_short, in_words, seconds
from celery_leases.errors import LeaseConfigurationError, StoreUnavailable
from celery_leases.protocol.status import LeaseStatus, next_try
from celery_leases.worker.app_settings import settings_of

HEAD: Row = (
    *(
        "STATE",
        "KEY",
        "TASK",
        "AGE",
        "RUNTIME",
        "NEXT TRY",
        "REASON",
        "ATTEMPT",
        "CRASHES",
        "FAILURES",
        "HOLDER",
    ),
)
PAGE_SIZE = 500

of_task = click.option("--task", help="The task's name; needed when several tasks have this key.")
in_namespace = click.option(
    "--namespace", help="Its lease_namespace; needed where the app does not know the task."
)
for_retention = click.option(
    "--retention",
    type=SPAN,
    help="How long the record counts from now, as 7d; by default the task's.",
)
slowest_first = click.option(
    "--slowest", is_flag=True, help="The longest run first, instead of the latest started."
)


def row_of(status: LeaseStatus) -> Row:
    """A status as a row of the list."""
    spans = [in_short(span) if span is not None else "" for span in (status.age, status.runtime)]
    counts = (str(status.attempt), str(status.crashes), str(status.failures))
    known = (
        status.state,
        status.key,
        status.task or "",
        *spans,
        next_try(status),
        status.reason or "",
    )
    return (*known, *counts, status.holder or "")


class _Listing:
    """At most *limit* statuses, read in pages; ``next`` is where to go on once all were given."""

    def __init__(
        self,
        client: LeaseClient,
        wanted: RecordFilter,
        *,
        slowest: bool,
        limit: int,
        after: str | None,
    ) -> None:
        self._client, self._wanted, self._left = client, wanted, limit
        self._order: Literal["latest", "slowest"] = "slowest" if slowest else "latest"
        self.next = after

    def __iter__(self) -> Iterator[LeaseStatus]:
        while self._left > 0:
            size = min(self._left, PAGE_SIZE)
            page = self._client.page(self._wanted, order=self._order, limit=size, after=self.next)
            self.next = page.next
            yield from page.statuses
            self._left -= len(page.statuses)
            if page.next is None or len(page.statuses) < size:
                return


@leases.command(name="list", cls=CeleryCommand)
@filtering
@slowest_first
@click.option("--limit", type=AT_MOST, default=100, show_default=True, help="At most so many.")
@click.option("--page", "after", metavar="PAGE", help="Go on there; the page before says where.")
@as_json
@click.pass_context
@handle_preload_options
def list_keys(
    ctx: click.Context,
    *,
    slowest: bool,
    limit: int,
    after: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """List the keys that have a record, the latest started first."""
    client = client_of(ctx)
    wanted = selected(ctx, client, options).wanted
    listing = _Listing(client, wanted, slowest=slowest, limit=limit, after=after)
    try:
        if as_json:
            for status in listing:
                echo_json(status.as_json())
        else:
            echo_table(_rows(listing))
    except LeaseConfigurationError as error:
        raise click.BadParameter(str(error), param_hint="--page") from None
    if listing.next is not None:
        echo_line(f"there may be more: --page {listing.next}", err=True)


def _rows(listing: _Listing) -> Iterator[Row]:
    statuses = iter(listing)
    first = next(statuses, None)  # an error comes before the head
    yield HEAD
    if first is not None:
        yield row_of(first)
        yield from map(row_of, statuses)


@leases.command(cls=CeleryCommand)
@filtering
@slowest_first
@click.option(
    "--every",
    type=SPAN,
    default="2s",
    show_default=True,
    help="How long to wait between two looks.",
)
@click.option("--times", type=AT_MOST, help="End after so many looks; without it, with Ctrl-C.")
@click.pass_context
@handle_preload_options
def watch(
    ctx: click.Context, *, slowest: bool, every: str, times: int | None, **options: Any
) -> None:
    """Show the list again and again, as much of it as fits on the screen."""
    client = client_of(ctx)
    wanted, looked = selected(ctx, client, options).wanted, 0
    try:
        while True:
            _look(client, wanted, slowest=slowest)
            looked += 1
            if looked == times:
                return
            time.sleep(seconds(every, "--every"))
    except KeyboardInterrupt:
        return


def _look(client: LeaseClient, wanted: RecordFilter, *, slowest: bool) -> None:
    terminal = sys.stdout.isatty()
    lines = max(5, shutil.get_terminal_size().lines - 3) if terminal else PAGE_SIZE
    try:
        rows = [*_rows(_Listing(client, wanted, slowest=slowest, limit=lines, after=None))]
        trouble = None
    except StoreUnavailable as error:  # it may come back
        rows, trouble = [], str(error)
    if terminal:
        click.clear()
    click.echo(f"{datetime.now(UTC).astimezone():%Y-%m-%d %H:%M:%S}")
    echo_table(rows)
    if trouble is not None:
        echo_line(trouble, err=True)


@leases.command(cls=CeleryCommand)
@as_json
@click.pass_context
@handle_preload_options
def stats(ctx: click.Context, *, as_json: bool, **_: Any) -> None:
    """Count the records by task and state, their last failures by rule, and the runs saved. Reads
    every record.
    """
    found = client_of(ctx).stats()
    if as_json:
        echo_json(found.as_json())
        return
    now = datetime.now(UTC)
    counts = [
        (
            each.task,
            each.state,
            str(each.count),
            in_short(max(0.0, (now - each.oldest).total_seconds())),
        )
        for each in found.states
    ]
    echo_table([("TASK", "STATE", "COUNT", "OLDEST"), *counts])
    if found.rules:
        click.echo()
        rules = [(each.rule, each.reason, str(each.count)) for each in found.rules]
        echo_table([("RULE OF THE LAST FAILURE", "REASON", "COUNT"), *rules])
    if found.groups:
        click.echo()
        waits = [
            (gate.group, gate.state, in_words(gate.retry_after) if gate.retry_after else "")
            for gate in found.groups
        ]
        echo_table([("GROUP", "STATE", "OPENS IN"), *waits])
    click.echo()
    if found.saved:
        runs = [
            (each.task, *map(str, (each.count, each.replayed, each.dropped)))
            for each in found.saved
        ]
        echo_table([("TASK", "RUNS SAVED", "REPLAYED", "DROPPED"), *runs])
    elif found.saved is not None:
        click.echo("No run was saved yet.")
    if not settings_of(app_of(ctx)).metrics:
        click.echo("Metrics are off: leases_metrics = True counts the runs saved.")
    if found.trouble is not None:
        echo_line(found.trouble, err=True)
        ctx.exit(1)


@leases.command(cls=CeleryCommand)
@click.argument("key")
@of_task
@in_namespace
@as_json
@click.pass_context
@handle_preload_options
def show(
    ctx: click.Context,
    key: str,
    task: str | None,
    namespace: str | None,
    *,
    as_json: bool,
    **_: Any,
) -> None:
    """Show where KEY stands: its attempts, why its task did not run, and when it will.

    Exits with 1 for a key without a record.
    """
    status = client_of(ctx).status(key, **whose(ctx, task, namespace))
    echo_status(status, as_json=as_json)
    if status.state == "absent":
        ctx.exit(1)


@leases.command(cls=CeleryCommand)
@click.argument("key")
@of_task
@in_namespace
@click.option("--done", is_flag=True, help="The work is done: it is not run again.")
@click.option(
    "--retry", "again", is_flag=True, help="What is in doubt has not happened: it may run again."
)
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
    """Say what became of KEY, after a look at the other side: above all of one that is
    uncertain.
    """
    if done == again:
        raise click.UsageError("say one of --done and --retry")
    if result is not None and not done:
        raise click.UsageError("--result goes with --done")
    try:
        value = json.loads(result) if result is not None else None
    except ValueError as error:
        raise click.BadParameter(
            f"{result!r} is no JSON ({error})", param_hint="--result"
        ) from None
    outcome: Literal["done", "retry"] = "done" if done else "retry"
    given: dict[str, Any] = {
        **whose(ctx, task, namespace),
        "result": value,
        "force": force,
        "retention": retention,
    }
    echo_status(client_of(ctx).resolve(key, outcome, **given), as_json=as_json)
    if again:
        click.echo("nothing is queued by this: call the task again", err=True)
