"""``celery leases list | watch | stats``: show many records."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from itertools import chain, islice
from typing import Any, Final, Literal, TypeVar

import click

from celery_leases.cli.output import AT_MOST, Row, as_json, echo_json, echo_line, echo_table
from celery_leases.cli.parameters import DURATION, option
from celery_leases.cli.root import app_of, check_task, command
from celery_leases.errors import LeaseConfigurationError, StoreUnavailable
from celery_leases.ops.client import OperatorClient
from celery_leases.ops.filters import CONDITIONS, NAMES
from celery_leases.ops.reports import Page
from celery_leases.record_filters import KNOWN_STATES, RecordFilter
from celery_leases.status import LeaseStatus, next_try
from celery_leases.text.cleaning import printable
from celery_leases.text.durations import in_short, in_words, seconds
from celery_leases.worker.processes import METRICS_DIRECTORY

F = TypeVar("F", bound=Callable[..., Any])
HEAD: Final[Row] = (
    *("STATE", "KEY", "TASK", "AGE", "RUNTIME", "NEXT TRY"),
    *("REASON", "ATTEMPT", "CRASHES", "FAILURES", "HOLDER"),
)
PAGE_SIZE: Final = 500
LARGEST_PAGE: Final = 10_000
OPTIONAL: Final = 4
"""So many of the last columns may be left out on a narrow terminal."""
slowest_first = option(
    "--slowest",
    "order",
    flag_value="slowest",
    help="The longest run first, instead of the last started.",
)


def operator_of(ctx: click.Context) -> OperatorClient:
    """A client for the stores in the app's settings, even if the app runs its tasks eagerly."""
    return OperatorClient.from_app(app_of(ctx), eager=False)


def filtering(command: F) -> F:
    """Add to *command* the options that :func:`selected` reads."""
    how: dict[str, Any] = {
        "flag": {"is_flag": True},
        "states": {"multiple": True, "type": click.Choice(KNOWN_STATES)},
    }
    for name, kind, dashed, text in reversed(CONDITIONS):
        command = option(dashed, name, help=text, **how.get(kind, {}))(command)
    return command


def selected(ctx: click.Context, options: dict[str, Any]) -> RecordFilter:
    """The records that the options of :func:`filtering` select; refuses an unknown task."""
    check_task(ctx, options["task"])
    try:
        wanted = operator_of(ctx).where(**{name: options[name] for name in NAMES})
    except LeaseConfigurationError as error:
        raise click.BadParameter(printable(str(error), None)) from None
    if wanted.since is not None and wanted.until is not None and wanted.until <= wanted.since:
        raise click.BadParameter(
            "it is not after --since, so nothing can match", param_hint="--until"
        )
    return wanted


def row_of(status: LeaseStatus) -> Row:
    """A status as a row of ``leases list``."""
    spans = [in_short(span) if span is not None else "" for span in (status.age, status.runtime)]
    return (
        *(status.state, status.key, status.task or "", *spans, next_try(status)),
        *(status.reason or "", str(status.attempt), str(status.crashes), str(status.failures)),
        status.holder or "",
    )


def echo_statuses(statuses: Iterable[LeaseStatus]) -> None:
    """Print statuses as a table. The first is read before the head is printed, because that may
    raise an error.
    """
    found = iter(statuses)
    first = [*islice(found, 1)]
    echo_table(chain([HEAD], map(row_of, chain(first, found))), optional=OPTIONAL)


def pages(
    client: OperatorClient,
    wanted: RecordFilter,
    order: Literal["latest", "slowest"],
    limit: int,
    after: str | None = None,
) -> Iterator[Page]:
    """Pages with at most *limit* statuses. Each of them reads every record, so they grow."""
    most = PAGE_SIZE
    while limit > 0:
        size = min(limit, most)
        page = client.page(wanted, order=order, limit=size, after=after)
        yield page
        if page.next is None or len(page.statuses) < size:
            return
        limit, after, most = limit - size, page.next, min(LARGEST_PAGE, most * 4)


@command("list")
@filtering
@slowest_first
@option("--limit", type=AT_MOST, default=100, help="List at most this many.")
@option("--page", "after", metavar="PAGE", help="Start at this page; each page names the next one.")
@as_json
def list_keys(
    ctx: click.Context,
    order: Literal["slowest"] | None,
    limit: int,
    after: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """List the keys that have a record, the last started first."""
    wanted, last = selected(ctx, options), Page([], None)

    def statuses() -> Iterator[LeaseStatus]:
        nonlocal last
        for last in pages(operator_of(ctx), wanted, order or "latest", limit, after):
            yield from last.statuses

    try:
        if as_json:
            for status in statuses():
                echo_json(status.as_json())
        else:
            echo_statuses(statuses())
    except LeaseConfigurationError as error:
        raise click.BadParameter(str(error), param_hint="--page") from None
    if last.next is not None:
        echo_line(f"next page, if there is one: --page {last.next}", err=True)


@command()
@filtering
@slowest_first
@option("--every", type=DURATION, default="2s", help="How often to refresh the list.")
@option("--times", type=AT_MOST, help="Stop after this many refreshes; by default at Ctrl-C.")
def watch(
    ctx: click.Context,
    order: Literal["slowest"] | None,
    every: str,
    times: int | None,
    **options: Any,
) -> None:
    """Show the part of the list that fits on the screen, and refresh it until Ctrl-C."""
    wanted, refreshes = selected(ctx, options), 0
    try:
        while True:
            answered = _refresh(operator_of(ctx), wanted, order or "latest")
            refreshes += 1
            if refreshes == times:
                ctx.exit(0 if answered else 1)
            time.sleep(seconds(every, "--every"))
    except KeyboardInterrupt:
        return


def _refresh(
    client: OperatorClient, wanted: RecordFilter, order: Literal["latest", "slowest"]
) -> bool:
    """Show the list once. Returns whether the database answered."""
    terminal = sys.stdout.isatty()
    lines = max(5, shutil.get_terminal_size().lines - 3) if terminal else PAGE_SIZE
    trouble, statuses = None, []
    try:
        statuses = [each for page in pages(client, wanted, order, lines) for each in page.statuses]
    except StoreUnavailable as error:  # it may come back
        trouble = str(error)
    if terminal:
        click.clear()
    click.echo(f"{datetime.now(UTC).astimezone():%Y-%m-%d %H:%M:%S}")
    if trouble is not None:
        echo_line(trouble, err=True)
        return False
    echo_statuses(statuses)
    return True


@command()
@as_json
def stats(ctx: click.Context, *, as_json: bool, **_: Any) -> None:
    """Count records by task and state, failures by rule, and saved runs. Reads every record."""
    found = operator_of(ctx).stats()
    if as_json:
        echo_json(found.as_json())
        return
    now = datetime.now(UTC)
    counts = [
        (*(each.task, each.state, str(each.count)), in_short((now - each.oldest).total_seconds()))
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
            (
                closed_group.group,
                closed_group.state,
                in_words(closed_group.retry_after) if closed_group.retry_after else "",
            )
            for closed_group in found.groups
        ]
        echo_table([("GROUP", "STATE", "OPENS IN"), *waits])
    click.echo()
    if found.saved_runs:
        runs = [
            (each.task, *map(str, (each.count, each.replayed, each.dropped)))
            for each in found.saved_runs
        ]
        echo_table([("TASK", "RUNS SAVED", "REPLAYED", "DROPPED"), *runs])
    elif found.saved_runs is not None:
        click.echo("No run was saved so far.")
    else:
        click.echo(f"Saved runs are not counted: {METRICS_DIRECTORY} is not set.")
    if found.trouble is not None:
        echo_line(found.trouble, err=True)
        ctx.exit(1)
