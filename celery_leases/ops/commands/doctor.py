"""``celery leases doctor``: check the set-up."""

from __future__ import annotations

from typing import Any

import click

from celery_leases.cli.output import as_json as printing_json
from celery_leases.cli.output import echo_json, echo_line, echo_table
from celery_leases.cli.root import app_of, command
from celery_leases.ops.doctor import Examination, examine
from celery_leases.ops.server_facts import ServerFacts


@command()
@printing_json
def doctor(ctx: click.Context, *, as_json: bool, **_: Any) -> None:
    """Check settings, tasks, broker and stores.

    Each finding says what is wrong, what happens because of it, and what to write instead. Nothing
    is changed. Exits with 1 after a finding that is more than a note.
    """
    found = examine(app_of(ctx))
    if as_json:
        echo_json(found.as_json())
    else:
        _echo(found)
    if not found.healthy:
        ctx.exit(1)


def _echo(found: Examination) -> None:
    if found.servers:
        head = ("PART", "VERSION", "ROUND TRIP", "CLOCK", "ADDRESS")
        echo_table([head, *map(_row, found.servers)])
    for finding in found.findings:
        click.echo()
        echo_line(f"{finding.severity}: {finding.code}")
        echo_line(f"  what happens   {finding.problem}")
        if finding.advice:
            echo_line(f"  what to write  {finding.advice}")


def _row(facts: ServerFacts) -> tuple[str, ...]:
    latency = f"{facts.latency * 1000:.1f} ms" if facts.latency is not None else ""
    ahead = f"{facts.clock_ahead:+.2f} s" if facts.clock_ahead is not None else ""
    version = facts.version or ("does not answer" if facts.trouble else "")
    return facts.part, version, latency, ahead, facts.address
