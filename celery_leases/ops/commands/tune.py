"""``celery leases tune``: recommend a ``lease_ttl`` from the run times in the records."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from celery_leases.cli.output import AT_MOST, Row, as_json, echo_json, echo_line, echo_table
from celery_leases.cli.parameters import DURATION, option
from celery_leases.cli.root import app_of, check_task, command
from celery_leases.ops.commands.records import operator_of
from celery_leases.ops.formatting import precise
from celery_leases.ops.tuning import ENOUGH_MEASUREMENTS, Delivery, Measured, advice_of
from celery_leases.text.durations import in_short, seconds
from celery_leases.worker.app_settings import leased_tasks
from celery_leases.worker.processes import METRICS_DIRECTORY

HEAD: Row = ("TASK", "RUNS", "P50", "P95", "P99", "LONGEST", "TTL NOW", "TTL UNRENEWED", "LIMIT")


@command()
@option("--task", help="Only this task.")
@option(
    "--takeover-slo",
    type=DURATION,
    help="The time after the kill of a worker within which its key must be free and its call must "
    "run again.",
)
@option(
    "--lateness",
    type=DURATION,
    help="The longest pause of a worker process, for example while the machine swaps; by default the "
    "p99 lateness of renewals, if metrics have counted it, otherwise 1s.",
)
@option(
    "--guard",
    type=DURATION,
    help="The margin of a ttl without renewal above p99 and jitter; by default lateness plus twice "
    "the p99 of the lease store, at least 2s.",
)
@option(
    "--jitter",
    type=DURATION,
    help="How much longer than p99 a run may take; by default the longest run minus p99.",
)
@option(
    "--runs", type=AT_MOST, default=5000, help="Use the last runs of each task, at most this many."
)
@option(
    "--picture",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Write a histogram of the run times to this .svg or .png; needs celery-leases[tune].",
)
@as_json
def tune(
    ctx: click.Context,
    task: str | None,
    takeover_slo: str | None,
    lateness: str | None,
    guard: str | None,
    jitter: str | None,
    runs: int,
    picture: Path | None,
    as_json: bool,
    **_: Any,
) -> None:
    """Recommend a lease_ttl from the run times in the records and the response times of the stores.

    Exits with 1 if --takeover-slo cannot be met with these settings; the last lines say why.
    """
    draw = _drawing(picture) if picture is not None else None
    app, client = app_of(ctx), operator_of(ctx)
    check_task(ctx, task)
    times = client.run_times(task=task, limit=runs)
    late = client.lateness(task=task)
    measured = Measured.of(client.latencies(), late, _span(lateness))
    pause, ttl, slo = measured.pause, measured.ttl, _span(takeover_slo)
    on_top = measured.guard if guard is None else _span(guard) or 0.0
    known, delivery = leased_tasks(app), Delivery.of(app)
    advice = {
        "store_p99": measured.store_p99,
        "database_p99": measured.database_p99,
        "lateness": pause.seconds,
        "lateness_from": pause.source,
        "renewals": pause.renewals,
        "latest_renewal": late.latest if late is not None else None,
        "guard": on_top,
        "ttl": ttl,
        "renewed_every": ttl / 3,
        "takeover_slo": slo,
        "key_free_within": delivery.key_free(ttl),
        "work_resumed_within": delivery.work_resumed(ttl),
        "longest_ttl_for_slo": delivery.longest_ttl(slo) if slo is not None else None,
    }
    names = sorted({*times, *((task,) if task else known)})
    tasks = [
        advice_of(name, times.get(name, ()), known, delivery, on_top, _span(jitter))
        for name in names
    ]
    missed = _missed(tasks, advice, slo) if slo is not None else []
    if as_json:
        for each in tasks:
            echo_json(each)
        echo_json({**advice, "missed": missed})
    else:
        echo_table([HEAD, *map(_row, tasks)])
        _echo_advice(tasks, advice, missed)
    if draw is not None:
        draw(times, tasks, ttl)
    if missed:
        ctx.exit(1)


def _row(task: Mapping[str, Any]) -> Row:
    spans = ("p50", "p95", "p99", "longest", "ttl", "unrenewed_ttl", "time_limit")
    shown = [precise(task[name]) if task[name] is not None else "" for name in spans]
    return (task["task"], str(task["runs"]), *shown)


def _echo_advice(tasks: list[dict[str, Any]], advice: Mapping[str, Any], missed: list[str]) -> None:
    echo_line("")
    echo_line(
        f"The lease store answers in {precise(advice['store_p99'])}, "
        f"the database in {precise(advice['database_p99'])} (p99 from this machine)."
    )
    echo_line(
        f"Shortest safe lease_ttl, however long a body runs: {in_short(advice['ttl'])}. It is "
        f"renewed every {precise(advice['renewed_every'])} and outlasts a failed renewal and "
        f"{precise(advice['lateness'])} of standstill."
    )
    echo_line(_lateness(advice))
    echo_line(
        f"With it, after a worker was killed another call of its key runs within "
        f"{in_short(advice['key_free_within'])}, and its own call within "
        f"{in_short(advice['work_resumed_within'])}."
    )
    echo_line(
        "TTL UNRENEWED is what a lock without renewal would need: p99 + jitter + guard; guard is "
        f"{precise(advice['guard'])}."
    )
    few = [task["task"] for task in tasks if task["runs"] < ENOUGH_MEASUREMENTS]
    if few:
        echo_line(
            f"Fewer than {ENOUGH_MEASUREMENTS} finished runs, so p99 is a guess: {', '.join(few)}."
        )
    for line in missed:
        echo_line(line)


def _lateness(advice: Mapping[str, Any]) -> str:
    """Where the value of the standstill comes from."""
    count, span = advice["renewals"], precise(advice["lateness"])
    match advice["lateness_from"]:
        case "measured":
            return (
                f"The standstill is how late renewals were: {span} (p99 of {count} that "
                f"metrics have counted; the latest {precise(advice['latest_renewal'])})."
            )
        case "given":
            return "The standstill is that of --lateness."
        case _ if count:
            return f"The standstill is assumed: {count} renewals were counted, {ENOUGH_MEASUREMENTS} are needed."
        case _:
            return f"The standstill is assumed: with {METRICS_DIRECTORY} workers count how late renewals are."


def _missed(tasks: list[dict[str, Any]], advice: Mapping[str, Any], slo: float) -> list[str]:
    """Why the SLO is not met: one line for each reason."""
    found = []
    longest = advice["longest_ttl_for_slo"]
    if longest is None or longest < advice["ttl"]:
        found.append(
            f"No lease_ttl meets a takeover within {in_short(slo)}: the shortest safe one needs "
            f"{in_short(advice['key_free_within'])}."
        )
    elif slow := [task for task in tasks if (task["key_free_within"] or 0.0) > slo]:
        found.extend(
            f"{task['task']}: with lease_ttl={task['ttl']:g} its key is free after up to "
            f"{in_short(task['key_free_within'])}, later than {in_short(slo)}; write at most "
            f"lease_ttl={int(longest)}."
            for task in slow
        )
    return found


def _span(value: str | None) -> float | None:
    return None if value is None else seconds(value, zero=True)


def _drawing(path: Path) -> Any:
    """A function that draws the histogram into *path*; refuses other files than .svg and .png."""
    if path.suffix not in (".svg", ".png"):
        raise click.BadParameter(
            f"{path.name}: the file name must end with .svg or .png", param_hint="--picture"
        )
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise click.UsageError(
            "--picture needs matplotlib: pip install 'celery-leases[tune]'"
        ) from None

    def draw(times: Mapping[str, Any], tasks: list[dict[str, Any]], advised_ttl: float) -> None:
        shown = [task for task in tasks if times.get(task["task"])]
        figure = Figure(figsize=(9, 2.4 * max(1, len(shown))), layout="constrained")
        all_axes = figure.subplots(max(1, len(shown)), 1, squeeze=False)[:, 0]
        for axes, task in zip(all_axes, shown, strict=False):
            axes.hist(times[task["task"]], bins=60, color="#7a9cc6")
            axes.axvline(task["p99"], color="#222222", linestyle=":", label="p99")
            axes.axvline(advised_ttl, color="#2e7d32", label="shortest safe ttl")
            if task["ttl"] is not None:
                axes.axvline(task["ttl"], color="#1565c0", linestyle="--", label="ttl now")
            if task["time_limit"] is not None:
                axes.axvline(task["time_limit"], color="#c62828", label="time limit")
            axes.set_title(f"{task['task']} ({task['runs']} runs)", fontsize=10)
            axes.set_xlabel("run time in seconds")
            axes.set_ylabel("runs")
            axes.legend(fontsize=8)
        if not shown:
            all_axes[0].set_title("no finished runs")
        figure.savefig(path)
        echo_line(f"written: {path}", err=True)

    return draw
