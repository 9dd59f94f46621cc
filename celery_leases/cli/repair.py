"""``celery leases retry | release | forget | purge``: change keys, one by one or all that a filter
finds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Literal

import click
from celery.bin.base import CeleryCommand, handle_preload_options

from celery_leases.cli.keys import HEAD, for_retention, in_namespace, row_of
from celery_leases.cli.output import as_json as printing_json
from celery_leases.cli.output import echo_json, echo_line, echo_status, echo_table
from celery_leases.cli.parameters import SPAN, filtering, selected
from celery_leases.cli.root import client_of, leases, whose
from celery_leases.client import Change, LeaseClient, LeaseStatus
from celery_leases.protocol.records import State
from celery_leases.protocol.status import ABANDONED

What = Literal["retry", "release", "forget"]
Tell = Callable[[int], None]
DONE: Final = {"retry": "retried", "release": "released", "forget": "forgotten"}
MEANT: Final[dict[str, tuple[str, ...]]] = {
    "retry": (State.PENDING, State.COOLING, State.FAILED),
    "release": (State.RUNNING, ABANDONED),
    "forget": (State.PENDING, State.DONE, State.COOLING, State.FAILED, State.UNCERTAIN),
}
"""The states of what a filter finds for a command, unless ``--state`` says otherwise."""
REASONS_TOLD: Final = 20

_dry_run = click.option("--dry-run", is_flag=True, help="Only tell what would be done.")
_yes = click.option("--yes", is_flag=True, help="Do not ask before anything is changed.")
_every = click.option(
    "--all", "everything", is_flag=True, help="Every record, where no other option narrows it."
)
_force = click.option(
    "--force", is_flag=True, help="Even if it is running: its outcome is refused then."
)


def _command(function: Callable[..., None]) -> Any:
    """A command that changes keys: the KEYs that are given, or what a filter finds."""
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
        click.argument("keys", nargs=-1, metavar="[KEY]..."),
    ):
        function = decorate(function)
    return leases.command(cls=CeleryCommand)(function)


@_force
def _retry(ctx: click.Context, **options: Any) -> None:
    """End cooldowns and countdowns, revive what has failed for good; failures are forgiven.
    Publishes kept messages.

    Of each KEY, or of all that the options find: those that are pending, cooling or failed.
    """
    _change(ctx, "retry", **options)


def _release(ctx: click.Context, **options: Any) -> None:
    """Take keys away from whoever holds them; what the holder still says about the outcome is
    refused.

    Each KEY, or all that the options find: those that are running or abandoned.
    """
    _change(ctx, "release", force=False, **options)


@_force
def _forget(ctx: click.Context, **options: Any) -> None:
    """Make keys as good as new: result, failures and counts are gone.

    Each KEY, or all that the options find and that do not run.
    """
    _change(ctx, "forget", **options)


for _function in (_retry, _release, _forget):
    _function.__name__ = _function.__name__.removeprefix("_")
retry, release, forget = _command(_retry), _command(_release), _command(_forget)


def _change(ctx: click.Context, what: What, *, keys: tuple[str, ...], **options: Any) -> None:
    if not keys:
        _change_found(ctx, what, **options)
        return
    narrowing = [
        name
        for name in ("states", "group", "prefix", "since", "until", "reason", "crashed")
        if options[name]
    ]
    if narrowing or options["everything"]:
        raise click.UsageError("give keys, or options that find them, not both")
    if len(keys) > 1 or options["dry_run"]:
        _change_keys(ctx, what, keys, **options)
    else:
        _change_one(ctx, what, keys[0], **options)


def _change_one(ctx: click.Context, what: What, key: str, **options: Any) -> None:
    client, given = client_of(ctx), whose(ctx, options["task"], options["namespace"])
    spans = {"retention": options["retention"]}
    if what == "release":
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
    _say(what, status, published)
    if published is False:
        ctx.exit(1)


def _say(what: What, status: LeaseStatus, published: bool | None) -> None:
    """What follows from the change of one key."""
    if what == "retry" and status.scope == "group":
        echo_line(
            f"its group {status.group} is still shut; `leases group open {status.group}` opens it",
            err=True,
        )
    if what == "release" and status.state in (State.FAILED, State.COOLING):
        done = (
            "lets a failed key run again" if status.state == State.FAILED else "ends its cooldown"
        )
        said = f"nothing held it; `leases retry` {done}"
    elif what == "release":
        said = "released; nothing is queued by this: call the task again, or wait for its message"
    elif published:
        said = "its kept message was published: it runs when a worker takes it"
    elif published is False:
        said = "the broker did not take its kept message; the next relay or rescue tries again"
    elif status.resumes:
        said = (
            "a copy of the call waits at the broker; it comes with its next hop, within 10 minutes"
        )
    else:
        said = "nothing is queued by this: call the task again"
    click.echo(f"forgotten; {said}" if what == "forget" else said, err=True)


def _change_keys(ctx: click.Context, what: What, keys: tuple[str, ...], **options: Any) -> None:
    client, given = client_of(ctx), whose(ctx, options["task"], options["namespace"])
    found = [client.status(key, **given) for key in keys]
    absent = [status for status in found if status.stored_key is None]
    for status in absent:
        echo_line(f"{status.key}: there is neither a lease nor a record for it", err=True)
    present = [status for status in found if status.stored_key is not None]
    if options["dry_run"]:
        _tell_what_would_be(what, present, len(present), as_json=options["as_json"])
        ctx.exit(1 if absent else 0)
    _carry_out(ctx, client, what, present, len(present), left=len(absent), **options)


def _change_found(ctx: click.Context, what: What, **options: Any) -> None:
    client = client_of(ctx)
    selection = selected(ctx, client, options)
    if not selection.given and not options["everything"]:
        raise click.UsageError("say which: give keys, options that find them, or --all")
    options["states"] = options["states"] or MEANT[what]
    wanted = client.as_of_now(selected(ctx, client, options).wanted)
    count = client.how_many(wanted)
    if options["dry_run"]:
        _tell_what_would_be(what, client.matching(wanted), count, as_json=options["as_json"])
        return
    if not count:
        click.echo("nothing was found that this is for", err=True)
        return
    if not options["yes"]:
        click.confirm(f"{what} {_keys(count)}?", abort=True, err=True)
    _carry_out(ctx, client, what, client.matching(wanted), count, **options)


def _tell_what_would_be(
    what: What, found: Iterable[LeaseStatus], count: int, *, as_json: bool
) -> None:
    if as_json:
        for status in found:
            echo_json(status.as_json())
    else:
        echo_table(_with_head(found))
    click.echo(f"{_keys(count)} would be {DONE[what]}", err=True)


def _with_head(found: Iterable[LeaseStatus]) -> Iterator[tuple[str, ...]]:
    yield HEAD
    yield from map(row_of, found)


def _carry_out(
    ctx: click.Context,
    client: LeaseClient,
    what: What,
    found: Iterable[LeaseStatus],
    count: int,
    *,
    left: int = 0,
    force: bool,
    retention: str | None,
    as_json: bool,
    **_: Any,
) -> None:
    done, published, refused = 0, 0, 0
    try:
        with _progress(count, what) as tell:
            changes = client.change(
                what, found, force=force, retention=retention, publish=what == "retry"
            )
            for change in changes:
                tell(1)
                done, left = done + change.done, left + (not change.done)
                published, refused = (
                    published + (change.published is True),
                    refused + (change.published is False),
                )
                _tell(change, left, as_json=as_json)
    finally:
        more = f", {published} published" if published else ""
        more += f", {refused} not taken by the broker" if refused else ""
        click.echo(f"{done} {DONE[what]}{more}, {left} left as they are", err=True)
    if left or refused:
        ctx.exit(1)


def _tell(change: Change, left: int, *, as_json: bool) -> None:
    if as_json:
        echo_json(change.as_json())
    elif change.why is not None and left <= REASONS_TOLD:
        echo_line(
            change.why if change.status.key in change.why else f"{change.status.key}: {change.why}",
            err=True,
        )
    elif change.why is not None and left == REASONS_TOLD + 1:
        click.echo("… and so on; --json tells of each", err=True)


@contextmanager
def _progress(count: int, label: str) -> Iterator[Tell]:
    """A progress bar for *count* steps, if the output is a terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    with click.progressbar(length=count, label=label, file=sys.stderr) as bar:
        yield bar.update


@leases.command(cls=CeleryCommand)
@click.option(
    "--older",
    type=SPAN,
    help="Those without a change for so long, as 30d, however long they would count.",
)
@click.option(
    "--state",
    "states",
    multiple=True,
    type=click.Choice([state.value for state in State if state is not State.RUNNING]),
    help="With --older: only these states; by default all but uncertain.",
)
@click.option("--task", help="With --older: only this task.")
@click.option("--key", "prefix", metavar="PREFIX", help="With --older: only keys that begin so.")
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
    """Delete records in batches: those whose retention is over, or with --older those that have not
    changed for long.

    A later copy of a call whose record is deleted runs its body again. Never deletes one that runs,
    or whose message is still to be published.
    """
    if older is None and (states or task or prefix):
        raise click.UsageError("--state, --task and --key go with --older")
    client = client_of(ctx)
    wanted = client.where(states=states, task=task, prefix=prefix)
    count = client.how_many(client.purgeable(wanted, older))
    if options["dry_run"]:
        click.echo(f"{_records(count)} would be deleted")
        return
    if older is not None and count and not options["yes"]:
        click.confirm(f"delete {_records(count)}?", abort=True, err=True)
    deleted = 0
    try:
        with _progress(count, "purge") as tell:
            for batch in client.purge(wanted, older=older):
                deleted += batch
                tell(batch)
    finally:
        click.echo(f"{_records(deleted)} deleted")


def _keys(count: int) -> str:
    return f"{count} key{'' if count == 1 else 's'}"


def _records(count: int) -> str:
    return f"{count} record{'' if count == 1 else 's'}"
