"""Output of the commands: tables and lines for people, JSON lines for programs.

Control characters are escaped, so that a key or a message cannot send commands to the terminal.
"""

from __future__ import annotations

import json
import shutil
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import chain, islice
from typing import Any, Final

import click

from celery_leases.status import AttemptStatus, LeaseStatus
from celery_leases.text.cleaning import printable
from celery_leases.text.durations import in_short

as_json = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON, one object on each line."
)
AT_MOST = click.IntRange(min=1)
"""The type of a ``--limit``."""
ROWS_MEASURED: Final = 500
"""How many rows are read before the first one is printed, to set the widths of the columns."""
NARROWEST: Final = 3
READABLE: Final = 12
"""A cell that is cut keeps at least so many columns of the terminal, if optional columns can be
left out instead.
"""
GAP: Final = "  "
Row = tuple[str, ...]
_NOT_FIELDS: Final = {"message", "message_code", "attempts", "traceback", "stored_key"}
"""Values that :func:`echo_status` does not print as fields: it prints them elsewhere, or not."""


def echo_status(status: LeaseStatus, *, as_json: bool) -> None:
    """Print the status of a key, its attempts, and what happens next."""
    values = status.as_json()
    if as_json:
        echo_json(values)
        return
    echo_line(status.message())
    values |= {name: _local(getattr(status, name)) for name in values if name.endswith("_at")}
    echo_fields({name: value for name, value in values.items() if name not in _NOT_FIELDS})
    if status.attempts:
        click.echo("  attempts")
        rows: list[Row] = [("", "STARTED", "TOOK", "ENDED", "HOST", "ERROR")]
        echo_table([*rows, *(("", *_attempt(each)) for each in status.attempts)])
    if status.traceback:
        click.echo("  last traceback")
        for line in status.traceback.splitlines():
            echo_line(f"  {line}")
    echo_line(f"  what next        {status.what_next()}")


def _local(when: datetime | None) -> str | None:
    """A time in the zone of this machine."""
    return when.astimezone().isoformat(sep=" ", timespec="milliseconds") if when else None


def _attempt(attempt: AttemptStatus) -> Row:
    took = in_short(attempt.runtime) if attempt.runtime is not None else ""
    error = (
        f"{attempt.rule}: {attempt.error}"
        if attempt.rule and attempt.error
        else attempt.error or ""
    )
    started = f"{attempt.started_at.astimezone():%Y-%m-%d %H:%M:%S}"
    return started, took, attempt.ended, attempt.host, error


def echo_fields(values: dict[str, Any]) -> None:
    """Print one line for each value that is not empty and not false."""
    for name, value in values.items():
        if value not in (None, [], {}, "", False):
            text = json.dumps(value) if isinstance(value, dict | list) else str(value)
            echo_line(f"  {name.replace('_', ' '):16} {text}")


def echo_line(text: str, *, err: bool = False) -> None:
    """Print one line with its control characters escaped; with *err* to stderr."""
    click.echo(printable(text, None), err=err)


def echo_json(value: Any) -> None:
    """Print JSON on one line: values are complete, control characters are escaped as in JSON."""
    click.echo(json.dumps(value, default=str))


def echo_table(rows: Iterable[Row], *, optional: int = 0) -> None:
    """Print rows in columns, with their control characters escaped; the first row has the heads.

    On a terminal the widest columns are cut to fit its width. If they would become too narrow, some
    of the last *optional* columns are left out. The first 500 rows set the widths of the columns;
    later rows are printed as soon as they are read.
    """
    shown = (tuple(map(printable, row)) for row in rows)
    first = [*islice(shown, ROWS_MEASURED)]
    if not first:
        return
    widths = [max(map(_width, column)) for column in zip(*first, strict=True)]
    if _is_terminal():
        widths = _fitting(widths, optional, shutil.get_terminal_size().columns)
    for row in chain(first, shown):
        cells = [_cell(cell, width) for cell, width in zip(row, widths, strict=False)]
        click.echo(GAP.join(cells).rstrip())


def _is_terminal() -> bool:
    return sys.stdout is not None and sys.stdout.isatty()


def _fitting(widths: Sequence[int], optional: int, columns: int) -> list[int]:
    """The *widths* reduced to fit a terminal of so many *columns*; the last ones may be missing."""
    found = list(widths)

    def over(least: int | None = None) -> int:
        each = found if least is None else [min(width, least) for width in found]
        return sum(each) + len(GAP) * (len(found) - 1) - columns

    while over(READABLE) > 0 and len(found) > len(widths) - optional:
        del found[-1]
    while over(NARROWEST) > 0 and len(found) > 1:
        del found[-1]
    while over() > 0 and max(found) > NARROWEST:
        found[found.index(max(found))] -= 1
    return found


def _cell(text: str, width: int) -> str:
    taken = _width(text)
    if taken > width and _is_terminal():
        while taken > width - 1:
            taken -= _width(text[-1])
            text = text[:-1]
        text, taken = f"{text}…", taken + 1
    return text + " " * (width - taken)


def _width(text: str) -> int:
    """How many columns of a terminal *text* takes: an East Asian character takes two."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(one) else 2 if unicodedata.east_asian_width(one) in "WF" else 1
        for one in text
    )
