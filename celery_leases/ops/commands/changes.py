"""``celery leases retry | release | forget | resolve | purge``: change the given keys, or all that
options select.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Literal

import click

from celery_leases.cli.output import as_json as printing_json
from celery_leases.cli.output import echo_json, echo_line, echo_status
from celery_leases.cli.parameters import DURATION, NAME, of_task, option
from celery_leases.cli.root import check_task, command
from celery_leases.client import Write
from celery_leases.ops.actions import ACTIONS, counted, entered_result, next_step, why_unchanged
from celery_leases.ops.client import OperatorClient
from celery_leases.ops.commands.records import echo_statuses, filtering, operator_of, selected
from celery_leases.ops.filters import NAMES
from celery_leases.ops.reports import Change
from celery_leases.record import State
from celery_leases.record_filters import RecordFilter
from celery_leases.status import LeaseStatus

REASONS_SHOWN: Final = 20
STEPS_SHOWN: Final = 10

_dry_run = option("--dry-run", is_flag=True, help="Show what would be done, and change nothing.")
_yes = option("--yes", is_flag=True, help="Do not ask for confirmation.")
_every = option(
    "--all", "everything", is_flag=True, help="Select without any of the options above."
)
_force = option(
    "--force",
    is_flag=True,
    help="Also keys that are running; the outcome of those runs is then refused.",
)
_for_retention = option(
    "--retention",
    type=DURATION,
    help="Keep the record for this time from now, such as 7d; by default the task's lease_retention.",
)


def _command(what: Write, text: str, *more: Callable[..., Any]) -> Any:
    """A command that changes the given KEYs, or those that its options select."""

    def change(ctx: click.Context, **options: Any) -> None:
        _change(ctx, what, **options)

    function: Any = change
    for decorate in (
        *more,
        printing_json,
        _every,
        _yes,
        _dry_run,
        _for_retention,
        filtering,
        click.argument("keys", nargs=-1, type=NAME, metavar="[KEY]..."),
    ):
        function = decorate(function)
    return command(what, help=text)(function)


retry = _command(
    "retry",
    """Let keys run again now: end their cooldown or countdown, and clear a permanent failure.

    Failures and crashes are set to zero. A stored message is published. Changes each KEY, or all
    pending, cooling and failed keys that the options select.
    """,
    _force,
)
release = _command(
    "release",
    """Take keys away from their holders; the outcome of a holder is then refused.

    Changes each KEY, or all running and abandoned keys that the options select.
    """,
)
forget = _command(
    "forget",
    """Delete the result, the failures and the counts of keys: the next call runs the task again.

    Changes each KEY, or all keys that the options select and that are not running.
    """,
    _force,
)


def _change(
    ctx: click.Context,
    what: Write,
    *,
    keys: tuple[str, ...],
    everything: bool,
    dry_run: bool,
    yes: bool,
    retention: str | None,
    as_json: bool,
    force: bool = False,
    **options: Any,
) -> None:
    client, unchanged = operator_of(ctx), 0
    narrowing = [name for name in NAMES if options[name]]
    if keys:
        if everything or narrowing not in ([], ["task"]):
            raise click.UsageError("give keys, or options that select them, not both")
        check_task(ctx, options["task"])
        where = {"task": options["task"]}
        if len(keys) == 1 and not dry_run:
            _change_one(
                ctx, what, keys[0], where, retention=retention, as_json=as_json, force=force
            )
            return
        known = _known(client, keys, where)
        found: Iterable[LeaseStatus] = known
        total, unchanged = len(known), len(keys) - len(known)
    else:
        if not narrowing and not everything:
            raise click.UsageError("give keys, options that select them, or --all")
        wanted = _selected(ctx, what, options)
        found, total = client.matching(wanted), 0 if dry_run else client.how_many(wanted)
        if not dry_run:
            if not total:
                click.echo(f"no key was found to {what}", err=True)
                return
            if not yes:
                click.confirm(f"{what} {counted(total)}?", abort=True, err=True)
    if dry_run:
        unchanged = _echo_dry_run(what, found, unchanged, force=force, as_json=as_json)
    else:
        publish = what == "retry"
        changes = client.change(what, found, force=force, retention=retention, publish=publish)
        unchanged = _echo_changes(what, changes, total, unchanged, as_json=as_json)
    if unchanged:
        ctx.exit(1)


def _known(
    client: OperatorClient, keys: tuple[str, ...], where: dict[str, Any]
) -> list[LeaseStatus]:
    """The status of those of the keys that have a record; the others are named."""
    known = []
    for status in (client.status(key, **where) for key in keys):
        if status.stored_key is not None:
            known.append(status)
        else:
            echo_line(f"{status.key}: this key has neither a lease nor a record", err=True)
    return known


def _selected(ctx: click.Context, what: Write, options: dict[str, Any]) -> RecordFilter:
    """The keys to change, as of now; refuses states in which a key is never changed."""
    states = options["states"] or ACTIONS[what].states
    asked = [LeaseStatus("", None, state) for state in states]
    if all(why_unchanged(what, status, force=True) for status in asked):
        raise click.BadParameter(
            f"{what} does nothing with keys that are {' or '.join(states)}", param_hint="--state"
        )
    return operator_of(ctx).as_of_now(selected(ctx, options | {"states": states}))


def _change_one(
    ctx: click.Context,
    what: Write,
    key: str,
    where: dict[str, Any],
    *,
    retention: str | None,
    as_json: bool,
    force: bool,
) -> None:
    client = operator_of(ctx)
    how: dict[str, Any] = {**where, "retention": retention}
    if what == "release":
        status = client.status(key, **where)
        if status.stored_key is not None and why_unchanged(what, status) is not None:
            echo_status(status, as_json=as_json)
            echo_line(
                f"no attempt holds the key, so nothing was released. {status.what_next()}", err=True
            )
            ctx.exit(1)
        status = client.release(key, **how)
    else:
        act = client.retry if what == "retry" else client.forget
        status = act(key, **how, force=force)
    published = None
    if what == "retry" and status.stored_key is not None:
        published = client.publish(status.stored_key)
    echo_status(status, as_json=as_json)
    if what == "retry" and status.scope == "group":
        echo_line(
            f"its group {status.group} is still closed; `leases group open {status.group}` opens it",
            err=True,
        )
    said = next_step(what, status, published)
    echo_line(f"{said}" if what == "retry" else f"{ACTIONS[what].past}; {said}", err=True)
    if published is False:
        ctx.exit(1)


def _echo_dry_run(
    what: Write, found: Iterable[LeaseStatus], unchanged: int, *, force: bool, as_json: bool
) -> int:
    """List the keys that would be changed; returns how many would not."""
    count = 0

    def would_change() -> Iterator[LeaseStatus]:
        nonlocal count, unchanged
        for status in found:
            why = why_unchanged(what, status, force=force)
            if why is None:
                count += 1
                yield status
            else:
                unchanged += 1
                _echo_change(Change(status, False, why), unchanged, as_json=False)

    if as_json:
        for status in would_change():
            echo_json(status.as_json())
    else:
        echo_statuses(would_change())
    more = f", {unchanged} unchanged" if unchanged else ""
    click.echo(f"{counted(count)} would be {ACTIONS[what].past}{more}", err=True)
    return unchanged


def _echo_changes(
    what: Write, changes: Iterable[Change], total: int, unchanged: int, *, as_json: bool
) -> int:
    """Make the *changes* and print what was done; returns for how many keys that was not all."""
    done = 0
    published: Counter[bool | None] = Counter()
    next_steps: Counter[str | None] = Counter()
    try:
        with _progress(total, what) as advance:
            for change in changes:
                advance(1)
                done, unchanged = done + change.done, unchanged + (not change.done)
                published[change.published] += 1
                next_steps[change.next_step] += 1
                _echo_change(change, unchanged, as_json=as_json)
    finally:
        del next_steps[None]
        for said, number in next_steps.most_common(STEPS_SHOWN):
            echo_line(f"{counted(number)}: {said}", err=True)
        more = f", {published[True]} published" if published[True] else ""
        more += f", {published[False]} not accepted by the broker" if published[False] else ""
        click.echo(f"{done} {ACTIONS[what].past}{more}, {unchanged} unchanged", err=True)
    return unchanged + published[False]


def _echo_change(change: Change, unchanged: int, *, as_json: bool) -> None:
    if as_json:
        echo_json(change.as_json())
    elif change.why is not None and unchanged <= REASONS_SHOWN:
        echo_line(change.why_of_key, err=True)
    elif change.why is not None and unchanged == REASONS_SHOWN + 1:
        click.echo("… and so on; --json shows them all", err=True)


@contextmanager
def _progress(count: int, label: str) -> Iterator[Callable[[int], None]]:
    """A progress bar of *count* steps on stderr, if that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    with click.progressbar(length=count, label=label, file=sys.stderr) as bar:
        yield bar.update


@command()
@click.argument("key", type=NAME)
@of_task
@option("--done", is_flag=True, help="The work is done: the task does not run again.")
@option(
    "--retry",
    "again",
    is_flag=True,
    help="The uncertain effect did not happen: the task may run again.",
)
@option("--result", help="With --done: the result for later callers, as JSON.")
@option(
    "--force",
    is_flag=True,
    help="Also if the key is running; the outcome of that run is then refused.",
)
@_for_retention
@printing_json
def resolve(
    ctx: click.Context,
    key: str,
    task: str | None,
    done: bool,
    again: bool,
    result: str | None,
    as_json: bool,
    **how: Any,
) -> None:
    """Record whether the work of KEY was done, after you have checked the other system.

    This is for a key that is uncertain: an effect was sent and its outcome is unknown.
    """
    if done == again:
        raise click.UsageError("give one of --done and --retry")
    if result is not None and not done:
        raise click.UsageError("--result needs --done")
    problem, value = entered_result(result or "")
    if problem is not None:
        raise click.BadParameter(problem, param_hint="--result")
    outcome: Literal["done", "retry"] = "done" if done else "retry"
    check_task(ctx, task)
    status = operator_of(ctx).resolve(
        key, outcome, task=task, result=value, force=how["force"], retention=how["retention"]
    )
    echo_status(status, as_json=as_json)
    if again:
        echo_line(f"{next_step('resolve_retry', status)}", err=True)


@command()
@option(
    "--older",
    type=DURATION,
    help="Delete records that have not changed for this time, such as 30d, even before the end of "
    "their retention.",
)
@option(
    "--state",
    "states",
    multiple=True,
    type=click.Choice([state.value for state in State if state is not State.RUNNING]),
    help="With --older: only records in this state; may be repeated; by default all but uncertain.",
)
@option("--task", help="With --older: only records of this task.")
@option(
    "--key", "prefix", metavar="PREFIX", help="With --older: only keys that start with this text."
)
@_dry_run
@_yes
def purge(ctx: click.Context, older: str | None, dry_run: bool, yes: bool, **options: Any) -> None:
    """Delete records whose retention is over, or with --older those that have not changed for long.

    If a copy of a call arrives after its record was deleted, the task runs again. Records of
    running keys, and records whose message must still be published, are never deleted.
    """
    conditions = {name: options[name] for name in ("states", "task", "prefix")}
    if older is None and any(conditions.values()):
        raise click.UsageError("--state, --task and --key need --older")
    client = operator_of(ctx)
    doomed = client.purgeable(client.where(**conditions), older)
    count = client.how_many(doomed)
    if dry_run:
        click.echo(f"{counted(count, 'record')} would be deleted")
        return
    if older is not None and count and not yes:
        click.confirm(f"delete {counted(count, 'record')}?", abort=True, err=True)
    deleted = 0
    try:
        with _progress(count, "purge") as advance:
            for batch in client.purge(doomed):
                deleted += batch
                advance(batch)
    finally:
        click.echo(f"{counted(deleted, 'record')} deleted")
