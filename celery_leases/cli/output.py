"""How commands print: tables and lines for people, of which a terminal obeys nothing; JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import click

from celery_leases.core.status import LeaseStatus
from celery_leases.core.texts import printable

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
AT_MOST = click.IntRange(min=1)
"""How many of something: a ``--limit``."""


def echo_status(status: LeaseStatus, *, as_json: bool) -> None:
    """Print where a key stands."""
    values = status.as_json()
    if as_json:
        echo_json(values)
        return
    echo_line(status.message())
    echo_fields({name: value for name, value in values.items() if name not in ("message", "message_code")})


def echo_fields(values: dict[str, Any]) -> None:
    """Print one line for each value that says something."""
    for name, value in values.items():
        if value not in (None, [], {}, "", False):
            text = json.dumps(value) if isinstance(value, dict | list) else str(value)
            echo_line(f"  {name.replace('_', ' '):16} {text}")


def echo_line(text: str, *, err: bool = False) -> None:
    """Print one line, to stderr with *err*; what a terminal would obey is escaped."""
    click.echo(printable(text, None), err=err)


def echo_json(value: Any) -> None:
    """Print JSON; values are as they are, what a terminal would obey is escaped as JSON escapes it."""
    click.echo(json.dumps(value, indent=2, default=str))


def echo_table(rows: Iterable[tuple[str, ...]]) -> None:
    """Print rows in columns; what a terminal would obey is escaped."""
    rows = [tuple(map(printable, row)) for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
