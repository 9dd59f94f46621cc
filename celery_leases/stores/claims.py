"""The claim: one statement that inserts the row of a key, takes it over, or leaves it exactly as it is."""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Dialect,
    Executable,
    Table,
    and_,
    bindparam,
    case,
    cast,
    exists,
    func,
    literal,
    literal_column,
    null,
    or_,
    select,
    union_all,
)
from sqlalchemy.dialects import postgresql, sqlite

from celery_leases.core.decisions import RETRY_GRACE
from celery_leases.core.records import Ended, State

DATABASE: Final = "database"
"""The name of the lease store that is the records' own database."""

LISTED: Final = "!"
"""Stands around each id in ``finished_calls``."""


def database_now(dialect: Dialect) -> ColumnElement[int]:
    """Microseconds since the epoch, one value for the whole statement; SQLite is given the host's clock."""
    if dialect.name == "sqlite":
        return bindparam("now", type_=BigInteger)
    return cast(literal_column("extract(epoch from statement_timestamp())") * 1_000_000, BigInteger)


def claim_statement(records: Table, dialect: Dialect) -> Executable:
    """The claim of one row; where the dialect allows, it returns the row that refused it too (``won`` = 0)."""
    now = database_now(dialect)
    insert = (sqlite if dialect.name == "sqlite" else postgresql).insert(records).values(_first(now))
    ours = and_(records.c.state == State.RUNNING, records.c.owner == bindparam("owner"))
    upsert = insert.on_conflict_do_update(
        index_elements=[records.c.stored_key],
        set_=_taken(records, now, ours),
        where=or_(ours, claimable(records, now)),
    )
    returning = upsert.returning(*records.c, now.label("now"), literal(1).label("won"))
    if dialect.name == "sqlite":
        alone: Executable = returning
        return alone
    claim = returning.cte("claim")
    seen = select(*records.c, now.label("now"), literal(0).label("won")).where(
        records.c.stored_key == bindparam("stored_key"), ~exists(select(claim.c.stored_key))
    )
    answer: Executable = select(union_all(select(claim), seen).subquery("answer"))
    return answer


def claimable(records: Table, now: ColumnElement[int]) -> ColumnElement[bool]:
    """Whether a row that stands there may be taken by the bid."""
    c = records.c
    same_call = c.call_id == bindparam("call_id")
    rerun = bindparam("rerun") == literal(1)
    unlisted = ~c.finished_calls.contains(bindparam("listed"), autoescape=False)
    grace = case((same_call, literal(int(RETRY_GRACE * 1e6))), else_=literal(0))
    waiting = and_(c.state.in_([State.PENDING, State.COOLING]), or_(c.retry_at.is_(None), c.retry_at <= now + grace))
    gone = or_(c.lease_until.is_(None), c.lease_until <= now, c.owner == bindparam("prior"))
    dead = and_(c.state == State.RUNNING, c.lease_store == bindparam("lease_store"), gone)
    ended = and_(rerun, c.state.in_([State.DONE, State.FAILED]), ~same_call)
    agrees = or_(
        same_call,
        rerun,
        bindparam("fingerprint").is_(None),
        c.fingerprint.is_(None),
        c.fingerprint == bindparam("fingerprint"),
    )
    return or_(_expired(records, now), and_(unlisted, or_(ended, and_(agrees, or_(waiting, dead)))))


def _expired(records: Table, now: ColumnElement[int]) -> ColumnElement[bool]:
    return and_(records.c.expires_at.is_not(None), records.c.expires_at <= now)


def _first(now: ColumnElement[int]) -> dict[str, Any]:
    given = ("stored_key", "task", "key", "owner", "call_id", "holder", "fingerprint", "digests", "lease_store")
    return {name: bindparam(name) for name in given} | {
        "state": State.RUNNING,
        "fence": now,
        "attempt": 1,
        "generation": 0,
        "failures": 0,
        "crashes": 0,
        "lease_ttl": bindparam("lease_ttl"),
        "lease_until": _lease_until(now),
        "finished_calls": "",
        "created_at": now,
        "started_at": now,
    }


def _lease_until(now: ColumnElement[int]) -> ColumnElement[int | None]:
    in_records = bindparam("lease_store") == literal(DATABASE)
    return case((in_records, now + bindparam("lease_ttl", type_=BigInteger)), else_=null())


def _taken(records: Table, now: ColumnElement[int], ours: ColumnElement[bool]) -> dict[str, Any]:
    """The row after a takeover; a claim that is only repeated (*ours*) changes nothing but the lease."""
    c = records.c
    same_call = c.call_id == bindparam("call_id")
    expired = _expired(records, now)
    renewed = or_(expired, and_(bindparam("rerun") == literal(1), ~same_call))
    orphaned = c.state == State.RUNNING
    crashed = and_(orphaned, ~renewed, c.owner != func.coalesce(bindparam("prior"), ""))

    def unless_ours(value: Any, kept: ColumnElement[Any]) -> ColumnElement[Any]:
        return case((ours, kept), else_=value)

    def anew(value: Any, kept: Any) -> ColumnElement[Any]:
        return case((renewed, value), else_=kept)

    after = c.fence + 1
    changed: dict[str, Any] = {
        "fence": case((after > now, after), else_=now),
        "attempt": anew(1, c.attempt + 1),
        "generation": case((expired, 0), (renewed, c.generation + 1), else_=c.generation),
        "failures": anew(0, c.failures),
        "crashes": case((renewed, 0), (crashed, c.crashes + 1), else_=c.crashes),
        "crashed_at": case((crashed, now), else_=null()),
        "previous_ended": case(
            (renewed, null()),
            (crashed, literal(Ended.CRASHED.value)),
            (orphaned, literal(Ended.LOST.value)),
            else_=c.ended,
        ),
        "previous_host": anew(null(), c.holder),
        "created_at": anew(now, c.created_at),
        "started_at": now,
        "finished_calls": case((expired, ""), else_=c.finished_calls),
        "finished_results": case((expired, null()), else_=c.finished_results),
        "task": bindparam("task"),
        "key": bindparam("key"),
        "holder": bindparam("holder"),
        "call_id": bindparam("call_id"),
    }
    for name in ("fingerprint", "digests"):
        keep = and_(same_call, ~expired, c.fingerprint.is_not(None))
        changed[name] = case((keep, c[name]), else_=bindparam(name))
    for name in ("error_type", "error_message", "error_rule"):
        changed[f"previous_{name}"] = case((or_(renewed, orphaned), null()), else_=c[name])
        changed[name] = null()
    for name in ("retry_at", "result", "reason", "ended", "finished_at", "expires_at"):
        changed[name] = null()
    settled = {
        "state": State.RUNNING,
        "owner": bindparam("owner"),
        "lease_store": bindparam("lease_store"),
        "lease_ttl": bindparam("lease_ttl"),
        "lease_until": _lease_until(now),
    }
    return {name: unless_ours(value, c[name]) for name, value in changed.items()} | settled
