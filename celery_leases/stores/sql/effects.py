"""Effects and progress in the records database. Each write is fenced by the record's row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    BindParameter,
    Select,
    TextClause,
    Update,
    bindparam,
    column,
    delete,
    select,
    text,
    update,
)
from sqlalchemy.sql.selectable import TextualSelect

from celery_leases.effect import (
    Begun,
    Effect,
    EffectState,
    Found,
    Scope,
    scopes_of,
    unreadable,
)
from celery_leases.errors import RecordUnreadable, ValueRefused
from celery_leases.record import Record
from celery_leases.results import decode
from celery_leases.stores.sql.database import Database
from celery_leases.stores.sql.dialects import Writes
from celery_leases.stores.sql.record_statements import is_running
from celery_leases.stores.sql.rows import Row, attempt_parameters, microseconds
from celery_leases.stores.sql.schema import Tables
from celery_leases.text.notices import logger

BEGIN_TRIES: Final = 3

# The statement locks the record's row, so no claim can happen between the check of the fence and
# the write of the intent. SQLite locks the whole database.
_HELD: Final = """
FROM {records} WHERE stored_key = :stored_key AND state = 'running' AND fence = :fence AND owner = :owner {lock}
"""
_INSERT: Final = """
INSERT INTO {effects} (stored_key, name, scope, state, fence, idempotency_key, sent_at, expires_at)
SELECT held.stored_key, :name, :scope, 'sent', held.fence, :idempotency_key, {now}, {now} + CAST(:keep AS {big})
FROM (SELECT stored_key, fence {held}) AS held
WHERE true
"""
_BEGIN: Final = """
{insert} ON CONFLICT (stored_key, name, scope) DO UPDATE SET
    fence = excluded.fence, sent_at = excluded.sent_at, expires_at = excluded.expires_at
WHERE e.state = 'sent' AND e.fence = :taken
RETURNING *, sent_at AS now
"""
_TAKE_OVER: Final = """
UPDATE {effects} SET fence = :fence, sent_at = {now}, expires_at = {now} + CAST(:keep AS {big})
WHERE e.stored_key = :stored_key AND e.name = :name AND e.scope = :scope AND e.state = 'sent' AND e.fence = :taken
    AND EXISTS (SELECT 1 {held})
"""


class SqlEffectStore:
    """Effects and progress of running attempts on the records of *tables* in *database*. Every
    method raises ``StoreUnavailable`` if the database fails.
    """

    def __init__(self, database: Database, tables: Tables) -> None:
        self.database = database
        self.effects = tables.effects
        self.records = tables.records
        self._begin = database.once(self._beginning)
        self._select_running, self._clear_crashes, self._save_progress = database.once(
            self._statements
        )
        self._select, self._finish = database.once(self._effect_statements)

    def _effect_statements(self) -> tuple[Select[Any], Update]:
        """Those that read an effect, and write its reply."""
        effects, values = self.effects, ("result", "reference")
        one = [
            effects.c[name] == bindparam(f"of_{name}") for name in ("stored_key", "name", "scope")
        ]
        sent = effects.c.state == EffectState.SENT, effects.c.fence == bindparam("of_fence")
        reply = {name: bindparam(f"new_{name}", type_=effects.c[name].type) for name in values}
        done = update(effects).where(*one, *sent)
        done = done.values(state=EffectState.DONE, done_at=self.database.now, **reply)
        return self._reading().where(*one), done

    def _statements(self) -> tuple[Select[Any], Update, Update]:
        running, columns = is_running(self.records), self.records.c
        cleared = update(self.records).where(*running).values(crashes=0)
        progress: BindParameter[str] = bindparam("new_progress", type_=columns.progress.type)
        kept = columns.crashes * bindparam("keeps_crashes", type_=columns.crashes.type)
        saved = cleared.values(progress=progress, crashes=kept)
        return select(columns.fence).where(*running), cleared, saved

    def begin(
        self,
        record: Record,
        name: str,
        idempotency_key: str,
        scope: Scope,
        taken: int | None = None,
    ) -> Begun | Found | None:
        """Commit the intent of an effect with the record's fence, in one statement that locks and
        checks the record.

        An effect that was begun before in its *scope* is ``Found`` and not changed, unless it is
        still *sent* with the fence *taken*: then this attempt takes over its intent. ``None``: the
        attempt no longer owns the record.
        """
        values = {
            "stored_key": record.stored_key,
            "fence": record.fence,
            "owner": record.owner,
            "name": name,
            "scope": scope.name,
            "keep": microseconds(scope.keep) if scope.keep is not None else None,
            "idempotency_key": idempotency_key,
            "taken": taken if taken is not None else -1,
        }
        for _ in range(BEGIN_TRIES):
            begun = self._begun(values)
            if begun is not None:
                return Begun(begun)
            found = self.read(record.stored_key, name, scope.name)
            if found is not None or not self.is_running(record):
                break  # otherwise it was withdrawn before it could be read: try again
        if found is None or not self.is_running(record):
            return None
        if found.state is EffectState.SENT and found.fence == record.fence:
            return Begun(found)  # the reply to an earlier try was lost
        return Found(found)

    def is_running(self, record: Record) -> bool:
        """Whether the row is still running under the record's fence and owner."""
        return self.database.first(self._select_running, attempt_parameters(record)) is not None

    def finish(self, effect: Effect, result: str | None, reference: str | None) -> bool:
        """Write the reply, if the intent still has the effect's fence, even if another attempt
        holds the lease now.

        If the database refuses the text of the reply, the effect is stored as done without it.
        """
        try:
            return self._finished(effect, result, reference)
        except ValueRefused as error:
            logger.error(
                "the reply of effect %s of %s is not stored: %s",
                effect.name,
                effect.stored_key,
                error,
                code="reply-not-stored",
            )
            return self._finished(effect, None, None)

    def _finished(self, effect: Effect, result: str | None, reference: str | None) -> bool:
        values: dict[str, Any] = {"of_stored_key": effect.stored_key, "of_name": effect.name}
        values |= {"of_scope": effect.scope, "of_fence": effect.fence}
        values |= {"new_result": result, "new_reference": reference}
        if self.database.count(self._finish, values):
            return True
        found = self.read(effect.stored_key, effect.name, effect.scope)
        noted = (EffectState.DONE, effect.fence, result, reference)
        return found is not None and noted == (
            found.state,
            found.fence,
            found.result,
            found.reference,
        )

    def withdraw(self, effect: Effect) -> bool:
        """Delete the intent: the call was not made, or certainly not executed."""
        return self.database.count(delete(self.effects).where(*self._intent(effect)), {}) == 1

    def read(self, stored_key: str, name: str, scope: str) -> Effect | None:
        """One effect of a key."""
        values = {"of_stored_key": stored_key, "of_name": name, "of_scope": scope}
        row = self.database.first(self._select, values)
        return _effect(row) if row is not None else None

    def of_key(self, record: Record) -> Sequence[Effect]:
        """All effects of the record's generation and of its call, ordered by the time of their
        intents.
        """
        effects = self.effects
        query = self._reading().where(
            effects.c.stored_key == record.stored_key, effects.c.scope.in_(scopes_of(record))
        )
        return [
            _effect(row, lenient=True)
            for row in self.database.all(query.order_by(effects.c.sent_at), {})
        ]

    def forget_sent(self, record: Record) -> int:
        """Delete the intents without a reply of all attempts up to that of *record*: an operator
        has found that these effects have not happened. Returns how many were deleted.

        Intents of later attempts, and those in the scope of another call, stay.
        """
        effects = self.effects
        sent = delete(effects).where(
            effects.c.stored_key == record.stored_key,
            effects.c.scope.in_(scopes_of(record)),
            effects.c.state == EffectState.SENT,
            effects.c.fence <= record.fence,
        )
        return self.database.count(sent, {})

    def save_progress(self, record: Record, progress: str, *, keeps_crashes: bool = False) -> bool:
        """Save the progress, and set the crashes in a row to 0 unless they are kept, if the attempt
        still owns the row.
        """
        given = {"new_progress": progress, "keeps_crashes": int(keeps_crashes)}
        values = attempt_parameters(record) | given
        return self.database.count(self._save_progress, values) == 1

    def clear_crashes(self, record: Record) -> None:
        """Set the crashes in a row to 0, because the attempt has made progress."""
        self.database.count(self._clear_crashes, attempt_parameters(record))

    def _intent(self, effect: Effect) -> tuple[Any, ...]:
        effects = self.effects
        return (
            effects.c.stored_key == effect.stored_key,
            effects.c.name == effect.name,
            effects.c.scope == effect.scope,
            effects.c.state == EffectState.SENT,
            effects.c.fence == effect.fence,
        )

    def _reading(self) -> Any:
        return select(*self.effects.c, self.database.now.label("now"))

    def _begun(self, values: Mapping[str, Any]) -> Effect | None:
        if isinstance(self._begin, TextualSelect):
            row = self.database.first(self._begin, values)
            return _effect(row) if row is not None else None
        if not self.database.touch(self._begin, values):
            return None
        return self.read(values["stored_key"], values["name"], values["scope"])

    def _beginning(self) -> TextualSelect | Writes:
        dialect = self.database.dialect
        effects = dialect.in_text(self.effects)
        words = {
            "effects": f"{effects} AS e",
            "records": dialect.in_text(self.records),
            "now": dialect.NOW,
            "lock": dialect.ROW_LOCK,
            "big": dialect.BIG_INTEGER,
        }
        words["held"] = _HELD.format(**words)
        if not dialect.writes_return:
            return text(_INSERT.format(**words | {"effects": effects})), text(
                _TAKE_OVER.format(**words)
            )
        written: TextClause = text(_BEGIN.format(insert=_INSERT.format(**words), **words))
        return written.bindparams(bindparam("taken", type_=BigInteger)).columns(
            *self.effects.c, column("now", BigInteger)
        )


def _effect(found: Row, *, lenient: bool = False) -> Effect:
    """The effect in the row *found*. Raises :class:`RecordUnreadable` for an unreadable value.

    *lenient*, for operators: an unreadable value counts as absent, and ``unreadable`` says why.
    """
    row: dict[str, Any] = dict(found)
    problem = None
    for column_name, (convert, absent) in _READ.items():
        value = row[column_name]
        try:
            if value is None and column_name not in _NULLABLE:
                raise TypeError("NULL")
            row[column_name] = None if value is None else convert(value)
        except Exception as error:  # noqa: BLE001 - a decoder may raise anything
            problem = unreadable(row["stored_key"], row["name"], column_name, value, error)
            if not lenient:
                raise RecordUnreadable(problem, False, row["stored_key"], column_name) from None
            row[column_name] = absent
    return Effect(
        row["stored_key"],
        row["name"],
        row["scope"],
        row["state"],
        row["fence"],
        row["idempotency_key"],
        row["sent_at"],
        int(row["now"]),
        row["reference"],
        row["result"],
        row["done_at"],
        problem,
    )


def _integer(value: object) -> int:
    if type(value) is not int:  # SQLite stores text in an integer column
        raise TypeError("not an integer")
    return value


def _decodable(text: str) -> str:
    decode(text)
    return text


_READ: Final[Mapping[str, tuple[Callable[[Any], object], object]]] = {
    "state": (EffectState, EffectState.SENT),
    "fence": (_integer, 0),
    "sent_at": (_integer, 0),
    "done_at": (_integer, None),
    "result": (_decodable, None),
}
_NULLABLE: Final = {"done_at", "result"}
