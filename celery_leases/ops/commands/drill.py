"""``celery leases drill``: kill workers on purpose, and measure how soon others take over."""

from __future__ import annotations

from typing import Any, Final

import click

from celery_leases.cli.output import as_json as printing_json
from celery_leases.cli.output import echo_json, echo_line
from celery_leases.cli.parameters import DURATION, option
from celery_leases.cli.root import app_of, command, unknown_task
from celery_leases.ops.drill import steps
from celery_leases.ops.drill.report import STEPS, Bounds, StepName, StepReport, Takeover, Taker
from celery_leases.ops.drill.run import WORKERS, Drill
from celery_leases.ops.tuning import Delivery
from celery_leases.options import DEFAULT_TTL, MINIMUM_TTL
from celery_leases.text.durations import in_short, seconds
from celery_leases.worker.app_settings import leased_tasks

_TAKEOVERS_BY: Final[dict[StepName, tuple[Taker, ...]]] = {
    "child": ("its own call",),
    "double": (),
    "pause": ("another call",),
    "worker": ("another call", "its own call"),
}


@command()
@option(
    "--takeover-slo",
    type=DURATION,
    default="30s",
    help="The time after a kill within which the key must be free and the call must run again.",
)
@option("--task", help="Use the lease_ttl of this task.")
@option(
    "--ttl",
    type=DURATION,
    help="Use this lease_ttl; by default the longest one of the app's tasks.",
)
@option(
    "--step",
    "names",
    multiple=True,
    type=click.Choice([*STEPS]),
    help="Run only this step; may be repeated.",
)
@option("--dry-run", is_flag=True, help="Show what would be done, and connect to no server.")
@option("--yes", is_flag=True, help="Start without asking for confirmation.")
@printing_json
def drill(
    ctx: click.Context,
    *,
    takeover_slo: str,
    task: str | None,
    ttl: str | None,
    names: tuple[StepName, ...],
    dry_run: bool,
    yes: bool,
    as_json: bool,
    **_: Any,
) -> None:
    """Kill workers in the middle of a harmless task, and measure how soon the work is taken over.

    The command uses this app's broker and stores. It starts the workers itself and kills no others.
    It uses its own queues and keys, and deletes them at the end. Exits with 1 if a takeover was
    later than --takeover-slo.
    """
    app = app_of(ctx)
    slo = seconds(takeover_slo, "--takeover-slo")
    bounds = Bounds(_ttl(app, task, ttl), slo, Delivery.of(app))
    wanted = [name for name in STEPS if not names or name in names]
    if dry_run:
        for name in wanted:
            _echo_plan(name, bounds, as_json=as_json)
        return
    app_name = _app_argument(ctx)
    if not yes:
        click.confirm(
            f"start {WORKERS} workers of this app on this machine, and kill them?",
            abort=True,
            err=True,
        )
    missed = []
    with Drill(app, app_name, bounds) as running:
        for report in steps.run(running, wanted):
            if as_json:
                echo_json(report.as_json())
            else:
                _echo(report)
            if not report.met:
                missed.append(report.step)
    if missed:
        echo_line(f"missed: {', '.join(missed)}", err=True)
        ctx.exit(1)


def _app_argument(ctx: click.Context) -> str:
    """The value of ``celery -A``; the workers are started with it too."""
    name = ctx.find_root().params.get("app")
    if not isinstance(name, str):
        raise click.UsageError("name the app for the workers: celery -A <app> leases drill")
    return name


def _ttl(app: Any, task: str | None, ttl: str | None) -> float:
    """The ttl of the drill's leases, in seconds."""
    if task is not None and ttl is not None:
        raise click.UsageError("give --task or --ttl, not both")
    known = leased_tasks(app)
    if ttl is not None:
        span = seconds(ttl, "--ttl")
        if span < MINIMUM_TTL:
            raise click.BadParameter(f"{ttl}: write at least {MINIMUM_TTL:g}s", param_hint="--ttl")
        return span
    if task is None:
        return max((each.lease_options.ttl for each in known.values()), default=DEFAULT_TTL)
    if task not in known:
        raise unknown_task(task, known)
    found: float = known[task].lease_options.ttl
    return found


def _echo_plan(name: StepName, bounds: Bounds, *, as_json: bool) -> None:
    bound_of = {who: bounds.of(name, who) for who in _TAKEOVERS_BY[name]}
    if as_json:
        echo_json(
            {
                "step": name,
                "would": STEPS[name],
                "takeover_slo": bounds.slo,
                "ttl": bounds.ttl,
                "bounds": bound_of,
            }
        )
        return
    echo_line(f"{name:7} {STEPS[name]}")
    for who, bound in bound_of.items():
        within = f"within {in_short(bound)}" if bound is not None else "at once"
        echo_line(
            f"{'':7} {who} should run {within}, with these settings and a ttl of {bounds.ttl:g} s"
        )


def _echo(report: StepReport) -> None:
    echo_line(f"{report.step:7} {'met' if report.met else 'MISSED'}")
    for takeover in report.takeovers:
        echo_line(f"{'':7} {_described(takeover, report.slo)}")
        if takeover.why is not None:
            echo_line(f"{'':7} because of {takeover.why}")
    for wrong in report.wrong:
        echo_line(f"{'':7} {wrong}")
    for at, what in report.seen:
        echo_line(f"{'':7} {at:7.2f} s  {what}")


def _described(takeover: Takeover, slo: float) -> str:
    who = f"{takeover.who} ran after"
    if takeover.took is None:
        return f"{takeover.who} did not run within {takeover.waited:g} s; allowed are {slo:g} s"
    bound = f", by the settings {takeover.bound:.0f} s at most" if takeover.bound else ""
    return f"{who} {takeover.took:.1f} s; allowed are {slo:g} s{bound}"
