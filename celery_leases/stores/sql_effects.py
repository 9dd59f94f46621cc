"""Effects and progress in the records' database: every write is fenced by the row of the record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import BigInteger, RowMapping, TextClause, bindparam, column, delete, select, text, update
from sqlalchemy.sql.selectable import TextualSelect

from celery_leases.core.effects import Begun, Effect, EffectState, Found
from celery_leases.core.records import Record, State
from celery_leases.stores.claims import POSTGRESQL_NOW
from celery_leases.stores.database import Database
from celery_leases.stores.schema import Tables

BEGIN_TRIES: Final = 3

# The record's row is locked for the length of the statement, so that no claim can come between the fence's check and
# the intent; SQLite locks the whole database for it.
_BEGIN: Final = """
INSERT INTO {effects} AS e (stored_key, name, generation, state, fence, idempotency_key, sent_at)
SELECT held.stored_key, :name, held.generation, 'sent', held.fence, :idempotency_key, {now}
FROM (SELECT stored_key, generation, fence FROM {records}
    WHERE stored_key = :stored_key AND state = 'running' AND fence = :fence AND owner = :owner {lock}) AS held
WHERE true
ON CONFLICT (stored_key, name) DO UPDATE SET
    generation = excluded.generation, state = 'sent', fence = excluded.fence, sent_at = excluded.sent_at,
    idempotency_key = excluded.idempotency_key, reference = NULL, result = NULL, done_at = NULL
WHERE e.generation <> excluded.generation OR e.state = 'sent' AND e.fence = :taken
RETURNING *, sent_at AS now
"""


class SqlEffectStore:
    """An :class:`~celery_leases.core.ports.EffectStore` beside the records of *tables* in *database*."""

    def __init__(self, database: Database, tables: Tables) -> None:
        self.database = database
        self.effects = tables.effects
        self.records = tables.records
        self._begin = self._beginning()

    def begin(self, record: Record, name: str, idempotency_key: str, taken: int | None = None) -> Begun | Found | None:
        """Commit the intent in one statement; see :class:`~celery_leases.core.ports.EffectStore`."""
        values = {
            "stored_key": record.stored_key,
            "fence": record.fence,
            "owner": record.owner,
            "name": name,
            "idempotency_key": idempotency_key,
            "taken": taken if taken is not None else -1,
        }
        for _ in range(BEGIN_TRIES):
            row = self.database.first(self._begin, values)
            if row is not None:
                return Begun(_effect(row))
            found = self.read(record.stored_key, name)
            if found is not None or not self.is_running(record):
                break  # else it was withdrawn before it could be read
        if found is None or found.generation != record.generation or not self.is_running(record):
            return None
        if found.state is EffectState.SENT and found.fence == record.fence:
            return Begun(found)  # the reply to an earlier try was lost
        return Found(found)

    def is_running(self, record: Record) -> bool:
        """Whether the row is still running under the record's fence and owner."""
        return self.database.first(select(self.records.c.fence).where(*self._fenced(record)), {}) is not None

    def finish(self, effect: Effect, result: str | None, reference: str | None) -> bool:
        """Note the reply; see :class:`~celery_leases.core.ports.EffectStore`."""
        effects = self.effects
        done = (
            update(effects)
            .where(*self._intent(effect))
            .values(state=EffectState.DONE, result=result, reference=reference, done_at=self.database.now)
        )
        if self.database.count(done, {}):
            return True
        found = self.read(effect.stored_key, effect.name)
        noted = (EffectState.DONE, effect.fence, effect.generation, result, reference)
        return found is not None and noted == (
            found.state,
            found.fence,
            found.generation,
            found.result,
            found.reference,
        )

    def withdraw(self, effect: Effect) -> bool:
        """Take the intent back; see :class:`~celery_leases.core.ports.EffectStore`."""
        return self.database.count(delete(self.effects).where(*self._intent(effect)), {}) == 1

    def read(self, stored_key: str, name: str) -> Effect | None:
        """One effect of a key, of whatever generation."""
        query = self._reading().where(self.effects.c.stored_key == stored_key, self.effects.c.name == name)
        row = self.database.first(query, {})
        return _effect(row) if row is not None else None

    def of_key(self, record: Record) -> Sequence[Effect]:
        """All effects of the record's generation, in the order in which they were sent."""
        effects = self.effects
        query = self._reading().where(
            effects.c.stored_key == record.stored_key, effects.c.generation == record.generation
        )
        return [_effect(row) for row in self.database.all(query.order_by(effects.c.sent_at), {})]

    def forget_sent(self, record: Record) -> int:
        """Take back the intents without a reply of the attempts up to that of *record*, as they have not happened."""
        effects = self.effects
        sent = delete(effects).where(
            effects.c.stored_key == record.stored_key,
            effects.c.state == EffectState.SENT,
            effects.c.fence <= record.fence,
        )
        return self.database.count(sent, {})

    def save_progress(self, record: Record, progress: str) -> bool:
        """Save the progress of the attempt, which ends its row of crashes, if the row is still its own."""
        saved = update(self.records).where(*self._fenced(record)).values(progress=progress, crashes=0)
        return self.database.count(saved, {}) == 1

    def clear_crashes(self, record: Record) -> None:
        """The attempt has got on, so the crashes before it are not in a row any more."""
        self.database.count(update(self.records).where(*self._fenced(record)).values(crashes=0), {})

    def _fenced(self, record: Record) -> tuple[Any, ...]:
        records = self.records
        return (
            records.c.stored_key == record.stored_key,
            records.c.state == State.RUNNING,
            records.c.fence == record.fence,
            records.c.owner == record.owner,
        )

    def _intent(self, effect: Effect) -> tuple[Any, ...]:
        effects = self.effects
        return (
            effects.c.stored_key == effect.stored_key,
            effects.c.name == effect.name,
            effects.c.generation == effect.generation,
            effects.c.state == EffectState.SENT,
            effects.c.fence == effect.fence,
        )

    def _reading(self) -> Any:
        return select(*self.effects.c, self.database.now.label("now"))

    def _beginning(self) -> TextualSelect:
        named = self.database.engine.dialect.identifier_preparer.format_table
        words = {
            "effects": named(self.effects),
            "records": named(self.records),
            "now": ":now" if self.database.host_clock else POSTGRESQL_NOW,
            "lock": "" if self.database.host_clock else "FOR UPDATE",
        }
        statement: TextClause = text(" ".join(_BEGIN.format(**words).split()))
        return statement.bindparams(bindparam("taken", type_=BigInteger)).columns(
            *self.effects.c, column("now", BigInteger)
        )


def _effect(row: RowMapping) -> Effect:
    return Effect(
        row["stored_key"],
        row["name"],
        row["generation"],
        EffectState(row["state"]),
        row["fence"],
        row["idempotency_key"],
        row["sent_at"],
        int(row["now"]),
        row["reference"],
        row["result"],
        row["done_at"],
    )
