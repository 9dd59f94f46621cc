"""``celery leases drill``: kill workers on purpose, and measure how soon their work goes on."""

from __future__ import annotations

from typing import Any, Final

import click
from celery.bin.base import CeleryCommand, handle_preload_options

from celery_leases.cli.output import as_json as printing_json
from celery_leases.cli.output import echo_json, echo_line
from celery_leases.cli.parameters import SPAN
from celery_leases.cli.root import app_of, leases, unknown_task
from celery_leases.common.durations import in_short, seconds
from celery_leases.drill import steps
from celery_leases.drill.report import STEPS, Bounds, StepName, StepReport, Takeover, Who
from celery_leases.drill.run import WORKERS, Drill
from celery_leases.protocol.options import DATABASE, DEFAULT_TTL, MINIMUM_TTL
from celery_leases.worker.app_settings import leased_tasks, settings_of
from celery_leases.worker.setting_checks import redelivery_of

_TAKERS: Final[dict[StepName, tuple[Who, ...]]] = {
    "child": ("its own call",),
    "double": (),
    "pause": ("another call",),
    "worker": ("another call", "its own call"),
}


@leases.command(cls=CeleryCommand)
@click.option(
    "--takeover-slo",
    type=SPAN,
    default="30s",
    show_default=True,
    help="How soon after a kill the key must be free, and its own call run again.",
)
@click.option("--task", help="With the lease_ttl of this task.")
@click.option(
    "--ttl", type=SPAN, help="With this lease_ttl; by default the longest one of the app's tasks."
)
@click.option(
    "--step",
    "names",
    multiple=True,
    type=click.Choice([*STEPS]),
    help="Only this step; may be repeated.",
)
@click.option("--dry-run", is_flag=True, help="Only tell what would be done; asks no server.")
@click.option("--yes", is_flag=True, help="Do not ask before anything is started.")
@printing_json
@click.pass_context
@handle_preload_options
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
    """Kill worker processes in the middle of a harmless task, on this app's own broker and stores,
    and measure how soon the work goes on.

    The command starts the worker processes itself and kills no others. It uses queues and keys of
    its own, and deletes them at the end. Exit code 1: a takeover came later than the SLO.
    """
    app = app_of(ctx)
    slo = seconds(takeover_slo, "--takeover-slo")
    bounds = Bounds(
        _ttl(app, task, ttl),
        slo,
        redelivery_of(app, settings_of(app).leases_url == DATABASE),
    )
    wanted = [name for name in STEPS if not names or name in names]
    if dry_run:
        for name in wanted:
            _tell_plan(name, bounds, as_json=as_json)
        return
    word = _word_of(ctx)
    if not yes:
        click.confirm(
            f"start {WORKERS} workers of this app on this machine, and kill them?",
            abort=True,
            err=True,
        )
    missed = []
    with Drill(app, word, bounds) as running:
        for report in steps.run(running, wanted):
            if as_json:
                echo_json(report.as_json())
            else:
                _tell(report)
            if not report.met:
                missed.append(report.step)
    if missed:
        echo_line(f"missed: {', '.join(missed)}", err=True)
        ctx.exit(1)


def _word_of(ctx: click.Context) -> str:
    """The word behind ``celery -A``, which the workers are started with."""
    word = ctx.find_root().params.get("app")
    if not isinstance(word, str):
        raise click.UsageError("name the app for the workers: celery -A <app> leases drill")
    return word


def _ttl(app: Any, task: str | None, ttl: str | None) -> float:
    """The ttl of the drill's leases, in seconds."""
    if task is not None and ttl is not None:
        raise click.UsageError("give --task or --ttl, not both")
    known = leased_tasks(app)
    if ttl is not None:
        span = seconds(ttl, "--ttl")
        if span < MINIMUM_TTL:
            raise click.BadParameter(f"{ttl}: at least {MINIMUM_TTL:g} s", param_hint="--ttl")
        return span
    if task is None:
        return max((each.lease_options.ttl for each in known.values()), default=DEFAULT_TTL)
    if task not in known:
        raise unknown_task(task, known)
    found: float = known[task].lease_options.ttl
    return found


def _tell_plan(name: StepName, bounds: Bounds, *, as_json: bool) -> None:
    takers = {who: bounds.of(name, who) for who in _TAKERS[name]}
    if as_json:
        echo_json(
            {
                "step": name,
                "would": STEPS[name],
                "takeover_slo": bounds.slo,
                "ttl": bounds.ttl,
                "bounds": takers,
            }
        )
        return
    echo_line(f"{name:7} {STEPS[name]}")
    for who, bound in takers.items():
        said = f"within {in_short(bound)}" if bound is not None else "at once"
        echo_line(f"{'':7} {who}: {said}, by the settings with a ttl of {bounds.ttl:g} s")


def _tell(report: StepReport) -> None:
    echo_line(f"{report.step:7} {'met' if report.met else 'MISSED'}")
    for takeover in report.takeovers:
        echo_line(f"{'':7} {_said(takeover, report.slo)}")
        if takeover.why is not None:
            echo_line(f"{'':7} because of {takeover.why}")
    for wrong in report.wrong:
        echo_line(f"{'':7} {wrong}")
    for at, what in report.seen:
        echo_line(f"{'':7} {at:7.2f} s  {what}")


def _said(takeover: Takeover, slo: float) -> str:
    who = f"{takeover.who} ran after"
    if takeover.took is None:
        return f"{takeover.who} did not run within {takeover.waited:g} s; allowed are {slo:g} s"
    bound = f", by the settings {takeover.bound:.0f} s at most" if takeover.bound else ""
    return f"{who} {takeover.took:.1f} s; allowed are {slo:g} s{bound}"
