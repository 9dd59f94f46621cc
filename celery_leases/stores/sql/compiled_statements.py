"""Statements that SQLAlchemy compiles once and that run on the driver's own cursor.

SQLAlchemy takes several times as long to execute a statement as the driver alone. All preparation
depends only on the statement, so it is done once: the SQL text, the order of the parameters, the
statement's own values, and the type conversions.
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
"""A row of a result: values by column name."""
Convert = Callable[[Any], Any]


class CompiledStatement:
    """A statement compiled for a dialect, with the conversions of its parameters and result
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
        """The parameters for the driver: *values*, and the statement's own values."""
        given = {**self._own, **values}
        for name, convert in self._inward:
            given[name] = convert(given[name])
        return self._order(given)

    def first(self, cursor: Any) -> Row | None:
        """The first row of the result on *cursor*."""
        row = cursor.fetchone()
        return self._named(cursor, row) if row is not None else None

    def all(self, cursor: Any) -> Sequence[Row]:
        """All rows of the result on *cursor*."""
        return [self._named(cursor, row) for row in cursor.fetchall()]

    def touched(self, cursor: Any) -> bool:
        """Whether the statement executed on *cursor* inserted, changed or deleted a row."""
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
        """Read the column names of a result. This is slow, so it is done for the first result, and
        again if the number of columns changes.
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
    """The compiled statements of an engine. A statement is compiled when it is executed for the
    second time.

    SQLAlchemy executes all others: statements that are built for one call, and statements whose
    text depends on their values, such as ``IN`` with a variable number of values.
    """

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._positional: Dialect | None = None
        self._executed: WeakSet[Executable] = WeakSet()
        self._compiled: WeakKeyDictionary[Executable, CompiledStatement | None] = (
            WeakKeyDictionary()
        )

    def executed(self, statement: Executable) -> None:
        """Remember that SQLAlchemy has executed *statement*. So it has connected to the server, and
        the dialect knows the server's version.
        """
        self._executed.add(statement)

    def compiled(self, statement: Executable) -> CompiledStatement | None:
        """*statement* in its compiled form; ``None`` if SQLAlchemy must execute it."""
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
