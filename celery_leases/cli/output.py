"""Output of the commands: tables and lines for people, JSON lines for programs.

Control characters are escaped, so that a key or a message cannot send commands to the terminal.
"""

from __future__ import annotations

import json
import shutil
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from itertools import chain, islice
from typing import Any, Final

import click

from celery_leases.common.durations import in_short
from celery_leases.common.texts import printable
from celery_leases.protocol.status import AttemptStatus, LeaseStatus

as_json = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON, one object on each line."
)
AT_MOST = click.IntRange(min=1)
"""The type of a ``--limit``."""
ROWS_MEASURED: Final = 500
"""How many rows are read before the first one is printed, to set the widths of the columns."""
NARROWEST: Final = 8
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


def _attempt(attempt: AttemptStatus) -> Row:
    took = in_short(attempt.runtime) if attempt.runtime is not None else ""
    error = (
        f"{attempt.rule}: {attempt.error}"
        if attempt.rule and attempt.error
        else attempt.error or ""
    )
    return f"{attempt.started_at:%Y-%m-%d %H:%M:%S}", took, attempt.ended, attempt.host, error


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


def echo_table(rows: Iterable[Row], *, lines: int | None = None) -> None:
    """Print rows in columns, with their control characters escaped; the first row has the heads.

    On a terminal the widest columns are cut to fit its width. The first 500 rows set the widths of
    the columns; later rows are printed as soon as they are read. With *lines*, at most that many
    rows are printed.
    """
    shown = (tuple(map(printable, row)) for row in islice(rows, lines))
    first = [*islice(shown, ROWS_MEASURED)]
    if not first:
        return
    widths = _fitting([max(map(_width, column)) for column in zip(*first, strict=True)])
    for row in chain(first, shown):
        cells = [_cell(cell, width) for cell, width in zip(row, widths, strict=True)]
        click.echo(GAP.join(cells).rstrip())


def _fitting(widths: Sequence[int]) -> list[int]:
    """*widths* of columns, the widest ones reduced until the table fits the terminal."""
    found = list(widths)
    if not sys.stdout.isatty():
        return found
    over = sum(found) + len(GAP) * (len(found) - 1) - shutil.get_terminal_size().columns
    while over > 0 and max(found) > NARROWEST:
        found[found.index(max(found))] -= 1
        over -= 1
    return found


def _cell(text: str, width: int) -> str:
    taken = _width(text)
    if taken > width and sys.stdout.isatty():
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
