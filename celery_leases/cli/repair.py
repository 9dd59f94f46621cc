"""``celery leases retry | release | forget | purge``: change the given keys, or all that options
select.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Literal

import click
from celery.bin.base import CeleryCommand, handle_preload_options

from celery_leases.cli.keys import HEAD, OPTIONAL, for_retention, in_namespace, row_of
from celery_leases.cli.output import as_json as printing_json
from celery_leases.cli.output import echo_json, echo_line, echo_status, echo_table
from celery_leases.cli.parameters import DURATION, NAME, filtering, selected
from celery_leases.cli.root import client_of, leases, task_and_namespace
from celery_leases.client import Change, LeaseClient, LeaseStatus
from celery_leases.operator_actions import ACTIONS
from celery_leases.operator_reports import next_step, why_unchanged
from celery_leases.record import State
from celery_leases.record_filters import KNOWN_STATES

Operation = Literal["retry", "release", "forget"]
Advance = Callable[[int], None]
PAST_TENSE: Final = {"retry": "retried", "release": "released", "forget": "forgotten"}
NEVER: Final = {
    "retry": frozenset({State.DONE.value}),
    "release": frozenset(KNOWN_STATES).difference(ACTIONS["release"].states),
    "forget": frozenset[str](),
}
"""The states of keys that a command never changes."""
REASONS_SHOWN: Final = 20
STEPS_SHOWN: Final = 10

_dry_run = click.option(
    "--dry-run", is_flag=True, help="Show what would be done, and change nothing."
)
_yes = click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
_every = click.option(
    "--all", "everything", is_flag=True, help="Select without any of the options above."
)
_force = click.option(
    "--force",
    is_flag=True,
    help="Also keys that are running; the outcome of those runs is then refused.",
)


def _command(function: Callable[..., None]) -> Any:
    """A command that changes the given KEYs, or those that its options select."""
    for decorate in (
        handle_preload_options,
        click.pass_context,
        printing_json,
        _every,
        _yes,
        _dry_run,
        for_retention,
        filtering,
        in_namespace,
        click.argument("keys", nargs=-1, type=NAME, metavar="[KEY]..."),
    ):
        function = decorate(function)
    return leases.command(cls=CeleryCommand)(function)


@_force
def _retry(ctx: click.Context, **options: Any) -> None:
    """Let keys run again now: end their cooldown or countdown, and clear a permanent failure.

    Failures and crashes are set to zero. A stored message is published. Changes each KEY, or all
    pending, cooling and failed keys that the options select.
    """
    _change(ctx, "retry", **options)


def _release(ctx: click.Context, **options: Any) -> None:
    """Take keys away from their holders; the outcome of a holder is then refused.

    Changes each KEY, or all running and abandoned keys that the options select.
    """
    _change(ctx, "release", force=False, **options)


@_force
def _forget(ctx: click.Context, **options: Any) -> None:
    """Delete the result, the failures and the counts of keys: the next call runs the task again.

    Changes each KEY, or all keys that the options select and that are not running.
    """
    _change(ctx, "forget", **options)


for _function in (_retry, _release, _forget):
    _function.__name__ = _function.__name__.removeprefix("_")
retry, release, forget = _command(_retry), _command(_release), _command(_forget)


def _change(ctx: click.Context, what: Operation, *, keys: tuple[str, ...], **options: Any) -> None:
    if not keys:
        _change_selected(ctx, what, **options)
        return
    narrowing = [
        name
        for name in ("states", "group", "prefix", "since", "until", "reason", "crashed")
        if options[name]
    ]
    if narrowing or options["everything"]:
        raise click.UsageError("give keys, or options that select them, not both")
    if len(keys) > 1 or options["dry_run"]:
        _change_keys(ctx, what, keys, **options)
    else:
        _change_one(ctx, what, keys[0], **options)


def _change_one(ctx: click.Context, what: Operation, key: str, **options: Any) -> None:
    client, given = client_of(ctx), task_and_namespace(ctx, options["task"], options["namespace"])
    spans = {"retention": options["retention"]}
    if what == "release":
        status = client.status(key, **given)
        if status.stored_key is not None and status.state not in ACTIONS["release"].states:
            echo_status(status, as_json=options["as_json"])
            echo_line(
                f"no attempt holds the key, so nothing was released. {status.what_next()}", err=True
            )
            ctx.exit(1)
        status = client.release(key, **given, **spans)
    else:
        act = client.retry if what == "retry" else client.forget
        status = act(key, **given, force=options["force"], **spans)
    published = (
        client.publish(status.stored_key)
        if what == "retry" and status.stored_key is not None
        else None
    )
    echo_status(status, as_json=options["as_json"])
    _echo_next_step(what, status, published)
    if published is False:
        ctx.exit(1)


def _echo_next_step(what: Operation, status: LeaseStatus, published: bool | None) -> None:
    """Print what happens next to the one key that was changed."""
    if what == "retry" and status.scope == "group":
        echo_line(
            f"its group {status.group} is still closed; `leases group open {status.group}` opens it",
            err=True,
        )
    said = next_step(what, Change(status, True, published=published))
    echo_line(f"{said}" if what == "retry" else f"{PAST_TENSE[what]}; {said}", err=True)


def _change_keys(
    ctx: click.Context, what: Operation, keys: tuple[str, ...], **options: Any
) -> None:
    client, given = client_of(ctx), task_and_namespace(ctx, options["task"], options["namespace"])
    found = [client.status(key, **given) for key in keys]
    absent = [status for status in found if status.stored_key is None]
    for status in absent:
        echo_line(f"{status.key}: this key has neither a lease nor a record", err=True)
    present = [status for status in found if status.stored_key is not None]
    if options["dry_run"]:
        _echo_dry_run(ctx, what, present, unchanged=len(absent), **options)
        return
    _apply(ctx, client, what, present, len(present), unchanged=len(absent), **options)


def _change_selected(ctx: click.Context, what: Operation, **options: Any) -> None:
    client = client_of(ctx)
    selection = selected(ctx, client, options)
    if not selection.given and not options["everything"]:
        raise click.UsageError("give keys, options that select them, or --all")
    if options["states"] and NEVER[what].issuperset(options["states"]):
        raise click.BadParameter(
            f"{what} does nothing with keys that are {' or '.join(options['states'])}",
            param_hint="--state",
        )
    options["states"] = options["states"] or ACTIONS[what].states
    wanted = client.as_of_now(selected(ctx, client, options).wanted)
    if options["dry_run"]:
        _echo_dry_run(ctx, what, client.matching(wanted), **options)
        return
    count = client.how_many(wanted)
    if not count:
        click.echo(f"no key was found to {what}", err=True)
        return
    if not options["yes"]:
        click.confirm(f"{what} {_keys(count)}?", abort=True, err=True)
    _apply(ctx, client, what, client.matching(wanted), count, **options)


def _echo_dry_run(
    ctx: click.Context,
    what: Operation,
    found: Iterable[LeaseStatus],
    *,
    unchanged: int = 0,
    force: bool,
    as_json: bool,
    **_: Any,
) -> None:
    """List the keys that would be changed; exit with 1 if others would not."""
    count = 0

    def would_change() -> Iterator[LeaseStatus]:
        nonlocal count, unchanged
        for status in found:
            why = why_unchanged(what, status, force=force)
            count, unchanged = count + (why is None), unchanged + (why is not None)
            if why is None:
                yield status
            else:
                _echo_change(Change(status, False, why), unchanged, as_json=False)

    if as_json:
        for status in would_change():
            echo_json(status.as_json())
    else:
        echo_table(_rows(would_change()), optional=OPTIONAL)
    more = f", {unchanged} unchanged" if unchanged else ""
    click.echo(f"{_keys(count)} would be {PAST_TENSE[what]}{more}", err=True)
    if unchanged:
        ctx.exit(1)


def _rows(found: Iterable[LeaseStatus]) -> Iterator[tuple[str, ...]]:
    yield HEAD
    yield from map(row_of, found)


def _apply(
    ctx: click.Context,
    client: LeaseClient,
    what: Operation,
    found: Iterable[LeaseStatus],
    count: int,
    *,
    unchanged: int = 0,
    force: bool,
    retention: str | None,
    as_json: bool,
    **_: Any,
) -> None:
    done, published, refused = 0, 0, 0
    next_steps: Counter[str] = Counter()
    try:
        with _progress(count, what) as advance:
            changes = client.change(
                what, found, force=force, retention=retention, publish=what == "retry"
            )
            for change in changes:
                advance(1)
                done, unchanged = done + change.done, unchanged + (not change.done)
                published, refused = (
                    published + (change.published is True),
                    refused + (change.published is False),
                )
                _echo_change(change, unchanged, as_json=as_json)
                if (said := next_step(what, change)) is not None:
                    next_steps[said] += 1
    finally:
        for said, number in next_steps.most_common(STEPS_SHOWN):
            echo_line(f"{_keys(number)}: {said}", err=True)
        more = f", {published} published" if published else ""
        more += f", {refused} not accepted by the broker" if refused else ""
        click.echo(f"{done} {PAST_TENSE[what]}{more}, {unchanged} unchanged", err=True)
    if unchanged or refused:
        ctx.exit(1)


def _echo_change(change: Change, unchanged: int, *, as_json: bool) -> None:
    if as_json:
        echo_json(change.as_json())
    elif change.why is not None and unchanged <= REASONS_SHOWN:
        echo_line(
            change.why if change.status.key in change.why else f"{change.status.key}: {change.why}",
            err=True,
        )
    elif change.why is not None and unchanged == REASONS_SHOWN + 1:
        click.echo("… and so on; --json shows them all", err=True)


@contextmanager
def _progress(count: int, label: str) -> Iterator[Advance]:
    """A progress bar of *count* steps on stderr, if that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    with click.progressbar(length=count, label=label, file=sys.stderr) as bar:
        yield bar.update


@leases.command(cls=CeleryCommand)
@click.option(
    "--older",
    type=DURATION,
    help="Delete records that have not changed for this time, such as 30d, even before the end of "
    "their retention.",
)
@click.option(
    "--state",
    "states",
    multiple=True,
    type=click.Choice([state.value for state in State if state is not State.RUNNING]),
    help="With --older: only records in this state; may be repeated; by default all but uncertain.",
)
@click.option("--task", help="With --older: only records of this task.")
@click.option(
    "--key", "prefix", metavar="PREFIX", help="With --older: only keys that start with this text."
)
@_dry_run
@_yes
@click.pass_context
@handle_preload_options
def purge(
    ctx: click.Context,
    *,
    older: str | None,
    states: tuple[str, ...],
    task: str | None,
    prefix: str | None,
    **options: Any,
) -> None:
    """Delete records whose retention is over, or with --older those that have not changed for long.

    If a copy of a call arrives after its record was deleted, the task runs again. Records of
    running keys, and records whose message must still be published, are never deleted.
    """
    if older is None and (states or task or prefix):
        raise click.UsageError("--state, --task and --key need --older")
    client = client_of(ctx)
    wanted = client.where(states=states, task=task, prefix=prefix)
    unchanged_since = client.so_long_ago(older) if older is not None else None
    count = client.how_many(client.purgeable(wanted, unchanged_since))
    if options["dry_run"]:
        click.echo(f"{_records(count)} would be deleted")
        return
    if older is not None and count and not options["yes"]:
        click.confirm(f"delete {_records(count)}?", abort=True, err=True)
    deleted = 0
    try:
        with _progress(count, "purge") as advance:
            for batch in client.purge(wanted, older=unchanged_since):
                deleted += batch
                advance(batch)
    finally:
        click.echo(f"{_records(deleted)} deleted")


def _keys(count: int) -> str:
    return f"{count} key{'' if count == 1 else 's'}"


def _records(count: int) -> str:
    return f"{count} record{'' if count == 1 else 's'}"
