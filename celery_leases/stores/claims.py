"""The claim: one statement that inserts the row of a key, takes it over, or leaves it exactly as it is.

It is written as text, not built: the condition of the takeover is the heart of the protocol and wants to be read, and
psycopg keeps a parsed statement only up to 4096 characters. Bids with a cooldown group have a variant of their own:
while the group's gate bars them it selects nothing to insert, and so has nothing to take over either. ``clock.now``,
also known as ``excluded.fence``, is the one moment of the statement, in microseconds by the database's clock; SQLite
is given the host's.

MySQL and MariaDB have no upsert with a condition and return no rows: there the same text is an insert, then, where the
key is there, an update, and at last the row is read. Each of the two leaves the row claimed or as it was.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Dialect,
    Integer,
    Table,
    TextualSelect,
    bindparam,
    cast,
    column,
    literal_column,
    text,
)

from celery_leases.core.waiting import RETRY_GRACE
from celery_leases.stores import mysql
from celery_leases.stores.upserts import Writes

DATABASE: Final = "database"
"""The name of the lease store that is the records' own database."""

POSTGRESQL_NOW: Final = "CAST(extract(epoch from statement_timestamp()) * 1000000 AS BIGINT)"

_INSERT: Final = """
INSERT INTO {target} (
    stored_key, task, {key}, state, fence, owner, call_id, retries, holder, attempt,
    fingerprint, digests, message, lease_store, lease_ttl, lease_until, finished_calls, created_at, started_at,
    retention)
SELECT :stored_key, :task, :key, 'running', now, :owner, :call, :retries, :holder, 1,
    CAST(:fingerprint AS {text}), CAST(:digests AS {text}), CAST(:message AS {text}), :store, :ttl,
    CASE WHEN :in_records THEN now + :ttl END, '', now, now, :retention
FROM (SELECT {now} AS now) AS clock
WHERE {let_in}
"""
_UPSERT: Final = "{insert} ON CONFLICT (stored_key) DO UPDATE SET {changes} WHERE {free}"
_UPDATE: Final = "UPDATE {target} SET {changes} WHERE r.stored_key = :stored_key AND {let_in} AND ({free})"

# MySQL changes one column after the other: what others are made of comes after them.
_CHANGES: Final = """
    attempt = CASE WHEN {anew} THEN 1 ELSE r.attempt + 1 END,
    generation = CASE WHEN {anew} THEN r.generation + 1 ELSE r.generation END,
    crashes = CASE WHEN {expired} THEN 0
        WHEN {crashed} AND :rerun AND r.crashed_call <> r.call_id THEN 1
        WHEN {crashed} THEN r.crashes + 1 ELSE r.crashes END,
    crashed_call = CASE WHEN {crashed} THEN r.call_id ELSE r.crashed_call END,
    crashed_at = CASE WHEN {crashed} THEN excluded.fence END,
    previous_ended = CASE WHEN {crashed} THEN 'crashed' WHEN r.state = 'running' THEN 'lost'
        WHEN {anew} THEN NULL ELSE r.ended END,
    previous_host = r.holder, previous_error = r.error,
    digests = CASE WHEN {keeps} THEN r.digests ELSE excluded.digests END,
    fingerprint = CASE WHEN {keeps} THEN r.fingerprint ELSE excluded.fingerprint END,
    message = CASE WHEN r.publish_at > 0 THEN r.message ELSE coalesce(excluded.message, r.message) END,
    finished_calls = CASE WHEN {expired} THEN '' ELSE r.finished_calls END,
    fence = CASE WHEN r.fence >= excluded.fence THEN r.fence + 1 ELSE excluded.fence END,
    state = 'running', owner = excluded.owner, call_id = excluded.call_id, retries = excluded.retries,
    holder = excluded.holder, task = excluded.task, started_at = excluded.fence,
    lease_store = excluded.lease_store, lease_ttl = excluded.lease_ttl, lease_until = excluded.lease_until,
    retention = excluded.retention, error = NULL,
    retry_at = NULL, result = NULL, reason = NULL, ended = NULL, finished_at = NULL, expires_at = NULL
"""

_FREE: Final = """
{expired} OR {find}(r.finished_calls, :listed) = 0 AND (
    :rerun AND r.state IN ('done', 'failed') AND NOT {same}
    OR ({same} OR :rerun OR excluded.fingerprint IS NULL OR r.fingerprint IS NULL
        OR r.fingerprint = excluded.fingerprint OR {over})
    AND NOT ({same} AND (:repeat AND r.state IN ('pending', 'cooling') AND {over}
        OR r.retries > excluded.retries AND (r.state = 'running' OR r.ended = 'retried')))
    AND (r.state IN ('pending', 'cooling')
        AND (r.retry_at IS NULL OR r.retry_at <= excluded.fence
            + CASE WHEN {same} AND r.ended = 'retried' THEN {grace} ELSE 0 END)
        OR r.state = 'running' AND r.owner <> excluded.owner AND r.lease_store = excluded.lease_store
        AND (r.lease_until IS NULL OR r.lease_until <= excluded.fence OR {find}(:prior, r.owner) > 0)))
"""

_PARTS: Final = {
    "same": "r.call_id = :call",
    "expired": "r.expires_at <= excluded.fence",
    # Its retention is over, or this call begins a new generation.
    "anew": "(r.expires_at <= excluded.fence OR :rerun AND r.call_id <> :call)",
    # Its owner never closed it, and did not leave it open with our knowledge.
    "crashed": "(r.state = 'running' AND {find}(:prior, r.owner) = 0)",
    # The call that ended last has failed, and does not come back by itself.
    "over": "r.resumes = 0 AND coalesce(r.ended,'') = 'failed'",
    # A call keeps the content it came with, whatever arguments a retry of it brings.
    "keeps": "r.call_id = :call AND r.fingerprint IS NOT NULL",
}

# What ``excluded`` is where there is none.
_GIVEN: Final = {
    "fence": mysql.NOW,
    "call_id": ":call",
    "lease_store": ":store",
    "lease_ttl": ":ttl",
    "lease_until": f"CASE WHEN :in_records THEN {mysql.NOW} + :ttl END",
}

# The gate is open, or half-open with the bid as its probe.
_LET_IN: Final = """
NOT EXISTS (SELECT 1 FROM {gates} WHERE name = :gate AND expires_at > now
    AND NOT (closed_until <= now AND probe = :token AND probe_until > now))
"""
_PROBES: Final = " + (SELECT count(*) FROM {gates} WHERE name = :gate AND probe = :token)"

_WITH_REFUSAL: Final = """
WITH claim AS ({claim} RETURNING *)
SELECT c.*, c.started_at AS now, 1{probes} AS won FROM claim AS c
UNION ALL
SELECT r.*, {now} AS now, 0 AS won FROM {records} AS r
WHERE r.stored_key = :stored_key AND NOT EXISTS (SELECT 1 FROM claim)
"""
_READ: Final = """
SELECT r.*, {now} AS now, CASE WHEN r.state = 'running' AND r.owner = :owner THEN 1{probes} ELSE 0 END AS won
FROM {records} AS r WHERE r.stored_key = :stored_key
"""


@dataclass(frozen=True)
class Claim:
    """Statements that claim a row, if *answer* does not do it itself; and *answer*, which says what has become of it.

    The columns of the answer are those of the table in the order it was created with, then ``now`` and ``won``: 0 for a
    row that refused the claim, where the dialect can return that too, 1 for a claim that was won, 2 for one that has
    the probe's slot.
    """

    writes: Writes
    answer: TextualSelect


def database_now(dialect: Dialect) -> ColumnElement[int]:
    """Microseconds since the epoch, one value for the whole statement; SQLite is given the host's clock."""
    if dialect.name == "sqlite":
        return bindparam("now", type_=BigInteger)
    if mysql.is_mysql(dialect):
        return literal_column(mysql.NOW, BigInteger)
    return cast(literal_column("extract(epoch from statement_timestamp()) * 1000000"), BigInteger)


def claim_of(records: Table, dialect: Dialect, gates: Table | None = None) -> Claim:
    """The claim of one row; with *gates* for bids with a group, whose gate's name is the parameter ``gate``."""
    named = dialect.identifier_preparer.format_table
    gated = {"gates": named(gates)} if gates is not None else None
    used = words(dialect) | {
        "records": named(records),
        "target": f"{named(records)} AS r",
        "key": dialect.identifier_preparer.quote("key"),
        "grace": str(int(RETRY_GRACE * 1_000_000)),
        "let_in": _LET_IN.format(**gated) if gated else "true",
        "probes": _PROBES.format(**gated) if gated else "",
    }
    used |= {name: part.format(**used) for name, part in _PARTS.items()}
    used |= {"changes": _CHANGES.format(**used), "free": _FREE.format(**used)}
    writes: Writes = ()
    if mysql.is_mysql(dialect):
        inserted = _INSERT.format(**used | {"target": used["records"]})
        # Where nothing is selected, the moment has no name.
        used["let_in"] = re.sub(r"\bnow\b", mysql.NOW, used["let_in"])
        updated = re.sub(r"\bexcluded\.(\w+)", _given, _UPDATE.format(**used))
        writes = text(_squeezed(inserted)), text(_squeezed(updated))
        answer = _READ.format(**used)
    elif dialect.name == "sqlite":
        upsert = _UPSERT.format(insert=_INSERT.format(**used), **used)
        answer = f"{upsert} RETURNING *, started_at AS now, 1{used['probes']} AS won"
    else:
        upsert = _UPSERT.format(insert=_INSERT.format(**used), **used)
        answer = _WITH_REFUSAL.format(claim=upsert, **used)
    columns = (*records.c, column("now", BigInteger), column("won", Integer))
    return Claim(writes, text(_squeezed(answer)).columns(*columns))


def words(dialect: Dialect) -> dict[str, str]:
    """What the dialects call the time of a statement, the place of one text in another, and text."""
    if mysql.is_mysql(dialect):
        return {"now": mysql.NOW, "find": "instr", "text": "CHAR"}
    if dialect.name == "sqlite":
        return {"now": ":now", "find": "instr", "text": "TEXT"}
    return {"now": POSTGRESQL_NOW, "find": "strpos", "text": "TEXT"}


def _given(excluded: re.Match[str]) -> str:
    return _GIVEN.get(excluded[1], f":{excluded[1]}")


def _squeezed(statement: str) -> str:
    text = " ".join(statement.split())
    for sign in (",", "<=", ">=", "<>", "<", ">", "=", "+"):
        text = text.replace(f" {sign} ", sign).replace(f"{sign} ", sign)
    return text.replace("( ", "(")
