"""The operation of the Django migrations: it creates the tables as ``leases migrate`` does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.db import router
from django.db.migrations.operations.base import Operation

from celery_leases.django import configuration, tables


class MigrateTables(Operation):
    """Creates the tables, or brings them to the version of this release while workers run.

    *state_operations* describe the same change to Django's models. Other databases than that of
    the records are not changed.
    """

    reversible = True
    atomic = False

    def __init__(self, state_operations: Sequence[Operation]) -> None:
        self.state_operations = state_operations

    def deconstruct(self) -> tuple[str, list[Any], dict[str, Any]]:
        """The operation as a migration file writes it."""
        return self.__class__.__qualname__, [], {"state_operations": self.state_operations}

    def state_forwards(self, app_label: str, state: Any) -> None:
        """Apply the change to Django's models."""
        for operation in self.state_operations:
            operation.state_forwards(app_label, state)

    def database_forwards(
        self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any
    ) -> None:
        """Create or migrate the tables; for ``sqlmigrate``, collect the SQL that creates them."""
        if not _is_for(schema_editor.connection, app_label):
            return
        if schema_editor.collect_sql:
            _collect(schema_editor, tables.sql(schema_editor.connection))
            return
        tables.migrate(schema_editor.connection)

    def database_backwards(
        self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any
    ) -> None:
        """Drop the tables, as Django does when the first migration of an app is reversed."""
        if not _is_for(schema_editor.connection, app_label):
            return
        if schema_editor.collect_sql:
            _collect(schema_editor, tables.sql_to_drop())
            return
        tables.drop(schema_editor.connection)

    def describe(self) -> str:
        """The text that ``migrate --plan`` shows."""
        return "Create or migrate the tables of celery_leases"


def _is_for(connection: Any, app_label: str) -> bool:
    """Whether the tables belong in the database of *connection*."""
    alias = connection.alias
    return alias == configuration.alias_of_records() and bool(
        router.allow_migrate(alias, app_label)
    )


def _collect(schema_editor: Any, text: str) -> None:
    schema_editor.collected_sql.extend(
        f"{statement.strip()};" for statement in text.split(";\n") if statement.strip()
    )
