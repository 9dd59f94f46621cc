"""The queries of operators: pages of records that match a filter, and counts.

They use no index, because an index would slow down the writes of each run. A page starts after the
last position of the previous page.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import ColumnElement, Select, Table, and_, case, func, not_, or_, select

from celery_leases.record import State
from celery_leases.record_filters import Order, Position, RecordFilter
from celery_leases.stores.sql.dialects import Dialect
from celery_leases.stores.sql.record_statements import RecordStatements

FAILING: Final = (State.PENDING, State.COOLING, State.FAILED, State.UNCERTAIN)


def matching(
    statements: RecordStatements,
    wanted: RecordFilter,
    order: Order,
    limit: int,
    after: Position | None,
    now: ColumnElement[int],
) -> Select[Any]:
    """Whole rows that may match *wanted*, after the position *after*.

    The keys are sorted first, because sorting whole rows is slower.
    """
    table = statements.table
    place = _place(table, order, now)
    keys = select(table.c.stored_key).where(*conditions(table, wanted))
    if order is Order.SLOWEST:
        keys = keys.where(or_(table.c.finished_at.is_not(None), table.c.state == State.RUNNING))
    if order is Order.KEY:
        keys = keys.where(table.c.stored_key > after.stored_key) if after is not None else keys
        ordering: Sequence[ColumnElement[Any]] = (table.c.stored_key.asc(),)
    else:
        if after is not None:
            later = and_(place == after.value, table.c.stored_key < after.stored_key)
            keys = keys.where(or_(place < after.value, later))
        ordering = (place.desc(), table.c.stored_key.desc())
    found = in_subquery(keys.order_by(*ordering).limit(limit))
    return statements.select_rows.where(table.c.stored_key.in_(found)).order_by(*ordering)


def conditions(table: Table, wanted: RecordFilter) -> list[ColumnElement[bool]]:
    """The conditions of *wanted* that SQL can check. :meth:`RecordFilter.admits` checks the others.

    Forgotten keys never match.
    """
    columns = table.c
    found: list[ColumnElement[bool]] = [not_(_is_forgotten(table))]
    if wanted.row_states:
        found.append(columns.state.in_(wanted.row_states))
    if wanted.task is not None:
        found.append(columns.task == wanted.task)
    if wanted.prefix:
        found.append(func.substr(columns.key, 1, len(wanted.prefix)) == wanted.prefix)
    if wanted.since is not None:
        found.append(columns.started_at >= wanted.since)
    if wanted.until is not None:
        found.append(columns.started_at < wanted.until)
    if wanted.unmoved_since is not None:
        found.append(moved(table) <= wanted.unmoved_since)
    if wanted.expired_at is not None:
        found += [columns.expires_at <= wanted.expired_at, columns.state != State.RUNNING]
    if wanted.published:
        found.append(columns.publish_at.is_(None))
    if wanted.crashed:
        found.append(columns.crashes > 0)
    if wanted.group is not None:
        found.append(_in_error(table, "group", wanted.group))
    if (reason := wanted.stored_reason) is not None:
        in_columns = or_(columns.reason == reason, columns.ended == reason)
        found.append(or_(in_columns, _in_error(table, "reason", reason)))
    return found


def in_subquery(limited: Select[Any]) -> Select[Any]:
    """*limited* in a subquery: MySQL allows LIMIT on the table that is changed only in one."""
    return select(limited.subquery())


def moved(table: Table) -> ColumnElement[int]:
    """The time at which a row entered its state."""
    running = table.c.state == State.RUNNING
    return case(
        (running, table.c.started_at), else_=func.coalesce(table.c.finished_at, table.c.started_at)
    )


def counted(table: Table) -> Select[Any]:
    """For each task and state: the number of rows, and the time at which the first of them entered
    that state.
    """
    columns = table.c
    since = func.min(moved(table)).label("oldest")
    rows = select(columns.task, columns.state, func.count().label("count"), since).where(
        not_(_is_forgotten(table))
    )
    return rows.group_by(columns.task, columns.state).order_by(columns.task, columns.state)


def failures(table: Table, dialect: Dialect) -> Select[Any]:
    """How many rows that are not done have failed, by the part of the error's JSON that has rule
    and reason.

    In the JSON, as :mod:`celery_leases.stores.sql.rows` writes it, both follow each other, and the
    group comes next. A quote inside of a text is escaped, so none of the searched texts is inside
    of one.
    """
    error = table.c.error
    start = dialect.position(error, '"rule":')
    no_rule = dialect.position(error, '"reason":')
    tail: ColumnElement[str] = case(
        (start > 0, func.substr(error, start)),
        (no_rule > 0, func.substr(error, no_rule)),
        else_="",
    )
    end = dialect.position(tail, ',"group":')
    part = case((end > 0, func.substr(tail, 1, end - 1)), else_=tail).label("part")
    failed = select(part).where(error.is_not(None), table.c.state.in_(FAILING)).subquery()
    return select(failed.c.part, func.count().label("count")).group_by(failed.c.part)


def _place(table: Table, order: Order, now: ColumnElement[int]) -> ColumnElement[int]:
    if order is Order.SLOWEST:
        ended = case(
            (table.c.state == State.RUNNING, now), else_=func.coalesce(table.c.finished_at, now)
        )
        return ended - table.c.started_at
    return table.c.started_at


def _is_forgotten(table: Table) -> ColumnElement[bool]:
    fresh = and_(table.c.state == State.PENDING, table.c.ended.is_(None))
    return and_(fresh, table.c.call_id == "", table.c.message.is_(None))


def _in_error(table: Table, name: str, value: str) -> ColumnElement[bool]:
    """Whether the error's JSON may contain this field. The caller must parse the error."""
    return table.c.error.contains(f'"{name}":{json.dumps(value)}', autoescape=True)


def run_times(table: Table, task: str | None, limit: int) -> Select[Any]:
    """The latest *limit* finished runs of each task: ``task``, and ``took`` in microseconds."""
    done = [table.c.state == State.DONE, table.c.finished_at >= table.c.started_at]
    if task is not None:
        done.append(table.c.task == task)
    turn = func.row_number().over(
        partition_by=table.c.task, order_by=(table.c.started_at.desc(), table.c.stored_key)
    )
    took = (table.c.finished_at - table.c.started_at).label("took")
    latest = select(table.c.task, took, turn.label("turn")).where(*done).subquery()
    return select(latest.c.task, latest.c.took).where(latest.c.turn <= limit)
