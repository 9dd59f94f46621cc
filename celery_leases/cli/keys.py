"""``celery leases list | watch | stats | show | resolve``: show records, and resolve one."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
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
from celery_leases.cli.parameters import DURATION, NAME, filtering, selected
from celery_leases.cli.root import app_of, client_of, leases, task_and_namespace
from celery_leases.client import Change, LeaseClient, RecordFilter
from celery_leases.errors import LeaseConfigurationError, StoreUnavailable
from celery_leases.operator_reports import next_step
from celery_leases.status import LeaseStatus, next_try
from celery_leases.text.durations import in_short, in_words, seconds
from celery_leases.worker.app_settings import settings_of
from celery_leases.worker.checks.servers import NO_WORKER, worker_answers

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
LARGEST_PAGE = 10_000
GROUPS_SHOWN = 5
ENDED = ("done", "failed", "uncertain", "unreadable")
"""States of keys for which no worker is needed."""
OPTIONAL = 4
"""So many of the last columns may be left out on a narrow terminal."""

of_task = click.option(
    "--task", help="The name of the task; needed if several tasks have this key."
)
in_namespace = click.option(
    "--namespace", help="The lease_namespace of the key; needed if the app does not know its task."
)
for_retention = click.option(
    "--retention",
    type=DURATION,
    help="Keep the record for this time from now, such as 7d; by default the task's lease_retention.",
)
slowest_first = click.option(
    "--slowest", is_flag=True, help="The longest run first, instead of the last started."
)


def row_of(status: LeaseStatus) -> Row:
    """A status as a row of ``leases list``."""
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
    """At most *limit* statuses, read page by page.

    After the iteration ``next`` is the start of the next page, or ``None``.
    """

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
        most = PAGE_SIZE
        while self._left > 0:
            size = min(self._left, most)
            page = self._client.page(self._wanted, order=self._order, limit=size, after=self.next)
            self.next = page.next
            yield from page.statuses
            self._left -= len(page.statuses)
            if page.next is None or len(page.statuses) < size:
                return
            most = min(LARGEST_PAGE, most * 4)  # each page reads every record


@leases.command(name="list", cls=CeleryCommand)
@filtering
@slowest_first
@click.option(
    "--limit", type=AT_MOST, default=100, show_default=True, help="List at most this many."
)
@click.option(
    "--page", "after", metavar="PAGE", help="Start at this page; each page names the next one."
)
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
    """List the keys that have a record, the last started first."""
    client = client_of(ctx)
    wanted = selected(ctx, client, options).wanted
    listing = _Listing(client, wanted, slowest=slowest, limit=limit, after=after)
    try:
        if as_json:
            for status in listing:
                echo_json(status.as_json())
        else:
            echo_table(_rows(listing), optional=OPTIONAL)
    except LeaseConfigurationError as error:
        raise click.BadParameter(str(error), param_hint="--page") from None
    if listing.next is not None:
        echo_line(f"next page, if there is one: --page {listing.next}", err=True)


def _rows(listing: _Listing) -> Iterator[Row]:
    statuses = iter(listing)
    first = next(statuses, None)  # so that an error is printed before the head
    yield HEAD
    if first is not None:
        yield row_of(first)
        yield from map(row_of, statuses)


@leases.command(cls=CeleryCommand)
@filtering
@slowest_first
@click.option(
    "--every",
    type=DURATION,
    default="2s",
    show_default=True,
    help="How often to refresh the list.",
)
@click.option("--times", type=AT_MOST, help="Stop after this many refreshes; by default at Ctrl-C.")
@click.pass_context
@handle_preload_options
def watch(
    ctx: click.Context, *, slowest: bool, every: str, times: int | None, **options: Any
) -> None:
    """Show the part of the list that fits on the screen, and refresh it until Ctrl-C."""
    client = client_of(ctx)
    wanted, refreshes = selected(ctx, client, options).wanted, 0
    try:
        while True:
            answered = _refresh(client, wanted, slowest=slowest)
            refreshes += 1
            if refreshes == times:
                ctx.exit(0 if answered else 1)
            time.sleep(seconds(every, "--every"))
    except KeyboardInterrupt:
        return


def _refresh(client: LeaseClient, wanted: RecordFilter, *, slowest: bool) -> bool:
    """Show the list once. Returns whether the database answered."""
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
    echo_table(rows, optional=OPTIONAL)
    if trouble is not None:
        echo_line(trouble, err=True)
    return trouble is None


@leases.command(cls=CeleryCommand)
@as_json
@click.pass_context
@handle_preload_options
def stats(ctx: click.Context, *, as_json: bool, **_: Any) -> None:
    """Count records by task and state, failures by rule, and saved runs. Reads every record."""
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
        click.echo("No run was saved so far.")
    if not settings_of(app_of(ctx)).metrics:
        click.echo(
            "Saved runs are not counted: that needs leases_metrics = True in the app's settings."
        )
    if found.trouble is not None:
        echo_line(found.trouble, err=True)
        ctx.exit(1)


@leases.command(cls=CeleryCommand)
@click.argument("key", type=NAME)
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
    """Show the status of KEY: its attempts, why its task did not run, and what happens next.

    Exits with 1 if the key has no record.
    """
    client = client_of(ctx)
    status = client.status(key, **task_and_namespace(ctx, task, namespace), waiting=True)
    echo_status(status, as_json=as_json)
    if not as_json and status.state not in ENDED and worker_answers(app_of(ctx)) is False:
        echo_line(f"  workers          {NO_WORKER}")
    if status.state == "absent":
        if not as_json:
            _echo_closed_groups(client)
        ctx.exit(1)


def _echo_closed_groups(client: LeaseClient) -> None:
    """A call that meets the closed gate of its group leaves no record."""
    with suppress(StoreUnavailable):
        names = [status.group for status in client.groups()]
        more = f" and {len(names) - GROUPS_SHOWN} more" if len(names) > GROUPS_SHOWN else ""
        if names:
            echo_line(
                f"  groups           calls of {', '.join(names[:GROUPS_SHOWN])}{more} wait, and may "
                "have no record yet: `leases group list`"
            )


@leases.command(cls=CeleryCommand)
@click.argument("key", type=NAME)
@of_task
@in_namespace
@click.option("--done", is_flag=True, help="The work is done: the task does not run again.")
@click.option(
    "--retry",
    "again",
    is_flag=True,
    help="The uncertain effect did not happen: the task may run again.",
)
@click.option("--result", help="With --done: the result for later callers, as JSON.")
@click.option(
    "--force",
    is_flag=True,
    help="Also if the key is running; the outcome of that run is then refused.",
)
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
    """Record whether the work of KEY was done, after you have checked the other system.

    This is for a key that is uncertain: an effect was sent and its outcome is unknown.
    """
    if done == again:
        raise click.UsageError("give one of --done and --retry")
    if result is not None and not done:
        raise click.UsageError("--result needs --done")
    try:
        value = json.loads(result) if result is not None else None
    except ValueError as error:
        raise click.BadParameter(
            f"{result!r} is not JSON ({error})", param_hint="--result"
        ) from None
    outcome: Literal["done", "retry"] = "done" if done else "retry"
    given: dict[str, Any] = {
        **task_and_namespace(ctx, task, namespace),
        "result": value,
        "force": force,
        "retention": retention,
    }
    status = client_of(ctx).resolve(key, outcome, **given)
    echo_status(status, as_json=as_json)
    if again:
        echo_line(f"{next_step('retry', Change(status, True))}", err=True)
