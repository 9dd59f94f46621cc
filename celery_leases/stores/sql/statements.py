"""Statements compiled once by SQLAlchemy and executed on the driver's own cursor.

SQLAlchemy's execution of a statement costs several times what the driver needs for it. What it does
on the way to the cursor depends on the statement alone, so it is done once: the text in the
dialect, the order of the parameters, the values that the statement itself has, and the conversions
of the types.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final
from weakref import WeakKeyDictionary, WeakSet

from sqlalchemy import Dialect, Executable
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.types import TypeEngine

Row = Mapping[Any, Any]
"""A row of a result, by the names of its columns."""
Convert = Callable[[Any], Any]


class CompiledStatement:
    """One statement for one dialect; what it needs of a value or of a row is known, and not asked
    for again.
    """

    def __init__(
        self, compiled: SQLCompiler, types: Mapping[str, TypeEngine[Any]], dialect: Dialect
    ) -> None:
        self.text: Final = str(compiled)
        self._order = compiled.positiontup if compiled.positional else None
        self._names = tuple(compiled.bind_names.values())
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

    def parameters(self, values: Mapping[str, Any]) -> Mapping[str, Any] | Sequence[Any]:
        """The parameters for the driver: *values*, and those that the statement itself has."""
        given = {**self._own, **values}
        for name, convert in self._inward:
            given[name] = convert(given[name])
        if self._order is not None:
            return [given[name] for name in self._order]
        return {
            name: given[name] for name in self._names
        }  # PyMySQL would convert all that it is given

    def first(self, cursor: Any) -> Row | None:
        """The first row of what was executed on *cursor*."""
        row = cursor.fetchone()
        return self._named(cursor, row) if row is not None else None

    def all(self, cursor: Any) -> Sequence[Row]:
        """All rows of what was executed on *cursor*."""
        return [self._named(cursor, row) for row in cursor.fetchall()]

    def touched(self, cursor: Any) -> bool:
        """Whether what was executed on *cursor* has touched a row; a write may return those that it
        touched.
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
        """Look at the columns of a result, which is slow: at the first one, and when a table has
        got another column.
        """
        columns = tuple(column[0] for column in cursor.description)
        self._outward = [(name, self._types[name]) for name in columns if name in self._types]
        self._columns = columns


class Statements:
    """The statements of one engine that are executed again and again, compiled at their second
    time.

    A statement that was built for one call does not come a second time, and SQLAlchemy executes it.
    So it does one whose text depends on the values, as that of an ``IN`` with any number of them.
    """

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._executed: WeakSet[Executable] = WeakSet()
        self._compiled: WeakKeyDictionary[Executable, CompiledStatement | None] = (
            WeakKeyDictionary()
        )

    def executed(self, statement: Executable) -> None:
        """SQLAlchemy has executed *statement*, and knows the server by now."""
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
        compiled = statement.compile(dialect=self._dialect)
        if compiled.post_compile_params or compiled.literal_execute_params:
            return None
        types = {column.name: column.type for column in getattr(statement, "exported_columns", ())}
        return CompiledStatement(compiled, types, self._dialect)
