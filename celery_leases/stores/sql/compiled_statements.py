"""Statements compiled once by SQLAlchemy and executed on the driver's own cursor.

Executing a statement through SQLAlchemy takes several times as long as the driver alone. The
preparation depends on the statement alone, so it is done once: the text in the dialect, the order
of the parameters, the statement's own values, and the type conversions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from operator import itemgetter
from typing import Any, Final
from weakref import WeakKeyDictionary, WeakSet

from sqlalchemy import Dialect, Executable
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.types import TypeEngine

Row = Mapping[Any, Any]
"""A row of a result, by the names of its columns."""
Convert = Callable[[Any], Any]


class CompiledStatement:
    """One statement compiled for one dialect, with the conversions of its parameters and
    columns.
    """

    def __init__(
        self, compiled: SQLCompiler, types: Mapping[str, TypeEngine[Any]], dialect: Dialect
    ) -> None:
        self.text: Final = str(compiled)
        self._order = _Order(compiled.positiontup or ())
        self._own: dict[str, Any] = {}
        self._inward: list[tuple[str, Convert]] = []
        for bind, name in compiled.bind_names.items():
            if not bind.required:
                self._own[name] = bind.effective_value
            if (convert := bind.type.dialect_impl(dialect).bind_processor(dialect)) is not None:
                self._inward.append((name, convert))
        self._types = {
            name: convert
            for name, kind in types.items()
            if (convert := kind.dialect_impl(dialect).result_processor(dialect, None)) is not None
        }
        self._columns: tuple[str, ...] = ()
        self._outward: list[tuple[str, Convert]] = []
        self._returns: bool | None = None

    def parameters(self, values: Mapping[str, Any]) -> Sequence[Any]:
        """The parameters for the driver: *values*, and those that the statement itself has."""
        given = {**self._own, **values}
        for name, convert in self._inward:
            given[name] = convert(given[name])
        return self._order(given)

    def first(self, cursor: Any) -> Row | None:
        """The first row of what was executed on *cursor*."""
        row = cursor.fetchone()
        return self._named(cursor, row) if row is not None else None

    def all(self, cursor: Any) -> Sequence[Row]:
        """All rows of what was executed on *cursor*."""
        return [self._named(cursor, row) for row in cursor.fetchall()]

    def touched(self, cursor: Any) -> bool:
        """Whether the statement executed on *cursor* touched a row, by its returned rows or its row
        count.
        """
        if self._returns is None:
            self._returns = cursor.description is not None
        return cursor.fetchone() is not None if self._returns else bool(cursor.rowcount > 0)

    def _named(self, cursor: Any, row: Sequence[Any]) -> Row:
        if len(row) != len(self._columns):
            self._describe(cursor)
        found = dict(zip(self._columns, row, strict=True))
        for name, convert in self._outward:
            found[name] = convert(found[name])
        return found

    def _describe(self, cursor: Any) -> None:
        """Read the columns of a result. This is slow, so it happens for the first result and after
        the number of columns has changed.
        """
        columns = tuple(column[0] for column in cursor.description)
        self._outward = [(name, self._types[name]) for name in columns if name in self._types]
        self._columns = columns


class _Order:
    """Puts parameters into the order of a statement's placeholders."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        # For a single name, ``itemgetter`` returns the value alone.
        self._get = itemgetter(*names) if len(names) > 1 else None

    def __call__(self, given: Mapping[str, Any]) -> Sequence[Any]:
        if self._get is not None:
            found: Sequence[Any] = self._get(given)
            return found
        return [given[name] for name in self._names]


class Statements:
    """The repeated statements of one engine, compiled when they are executed for the second time.

    SQLAlchemy executes a statement that was built for one call, and a statement whose text depends
    on its values, such as an ``IN`` with any number of values.
    """

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._positional: Dialect | None = None
        self._executed: WeakSet[Executable] = WeakSet()
        self._compiled: WeakKeyDictionary[Executable, CompiledStatement | None] = (
            WeakKeyDictionary()
        )

    def executed(self, statement: Executable) -> None:
        """Note that SQLAlchemy has executed *statement*, and so has connected to the server."""
        self._executed.add(statement)

    def compiled(self, statement: Executable) -> CompiledStatement | None:
        """*statement* in its compiled form; ``None`` for one that SQLAlchemy is to execute."""
        try:
            return self._compiled[statement]
        except KeyError:
            if statement not in self._executed:
                return None
        found = self._compiled[statement] = self._compile(statement)
        return found

    def _compile(self, statement: Any) -> CompiledStatement | None:
        # The first statement has connected by now, so the dialect knows the version of the server.
        dialect = self._positional = self._positional or positional(self._dialect)
        compiled = statement.compile(dialect=dialect)
        if compiled.post_compile_params or compiled.literal_execute_params:
            return None
        types = {column.name: column.type for column in getattr(statement, "exported_columns", ())}
        return CompiledStatement(compiled, types, dialect)


def positional(dialect: Dialect) -> Dialect:
    """*dialect*, with parameters by position: a driver would look up each name each time."""
    if dialect.positional:
        return dialect
    found = copy(dialect)
    found.paramstyle, found.positional = "format", True
    return found
