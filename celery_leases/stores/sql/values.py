"""Converts the values of single columns; an error names the column with the unreadable value."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

from celery_leases import progress
from celery_leases.errors import RecordUnreadable
from celery_leases.record import Failure
from celery_leases.results import decode, unreadable
from celery_leases.stores.sql.record_document import failure_from, failure_to
from celery_leases.text.cleaning import storable

logger = logging.getLogger("celery_leases")

Row = Mapping[Any, Any]
"""A row of a result: values by column name."""
MICROSECONDS = 1e6
SHORT_TEXT: Final = 255


def microseconds(seconds: float) -> int:
    """The stored form of a span of *seconds*."""
    return round(seconds * MICROSECONDS)


def written(failure: Failure | None) -> str | None:
    """The stored form of a failure: JSON."""
    if failure is None:
        return None
    return json.dumps(failure_to(failure), separators=(",", ":"))


def short(text: str | None) -> str | None:
    """The stored form of a reason: truncated to the size of its column."""
    return storable(text, SHORT_TEXT) if text else None


@dataclass
class ColumnReader:
    """Reads columns of *row* whose values may be unreadable, for example because somebody
    changed them by hand.
    """

    row: Mapping[Any, Any]
    lenient: bool
    problem: str | None = field(default=None, init=False)

    def integers(self, names: Iterable[str], or_null: Iterable[str]) -> None:
        """Check that these columns have integers, because SQLite stores text in an integer
        column.
        """
        row = self.row
        wrong = [name for name in names if type(row[name]) is not int]
        wrong += [name for name in or_null if row[name] is not None and type(row[name]) is not int]
        for name in wrong:
            self._refuse(name, ValueError("not an integer"))
            self.row = {**self.row, name: 0 if name in names else None}

    def of(self, column: str, convert: Callable[[Any], Any], *, needed: bool = True) -> Any:
        """The value of *column*, converted by *convert*. ``None`` for NULL, and for an unreadable
        value if it is not *needed*.
        """
        value = self.row[column]
        if value is None:
            return None
        try:
            return convert(value)
        except Exception as error:  # noqa: BLE001 - a decoder may raise anything
            if needed:
                self._refuse(column, error)
            else:
                self.warn(column, error)
            return None

    def warn(self, column: str, error: Exception) -> None:
        """Log that an unreadable column counts as empty."""
        _warn(_problem(self.row, column, error))

    def _refuse(self, column: str, error: Exception) -> None:
        problem = _problem(self.row, column, error)
        if not self.lenient:
            raise RecordUnreadable(problem, False, self.row["key"], column) from None
        self.problem = self.problem or problem


def _problem(row: Mapping[str, Any], column: str, error: Exception) -> str:
    return unreadable(row["key"], row["task"], column, row[column], error)


@lru_cache(1000)
def _warn(problem: str) -> None:
    logger.warning("%s; it counts as empty", problem)


def failure_in(text: str) -> Failure:
    """The failure whose stored form is *text*."""
    return failure_from(json.loads(text))


def mapping(text: str) -> Mapping[str, Any]:
    """The object whose JSON is *text*."""
    found = json.loads(text)
    if not isinstance(found, dict):
        raise TypeError(f"{type(found).__name__}, not an object")
    return found


def progress_in(text: str) -> str:
    """*text*, after checking that it is saved progress which the body can read."""
    found = mapping(text)
    saved = progress.load(text, found.get("generation", -1))
    decode(saved.value)
    if not isinstance(saved.positions, dict):
        raise TypeError("positions is not an object")
    return text
