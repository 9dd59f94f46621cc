"""Records in the memory of this process, in SQLite: for eager calls and for the test kit.

They hold to the same contracts as other records, but cannot be part of the caller's transaction.
What would be committed with it waits in this process until it commits: an outcome is then written,
a call then runs. A rollback of the transaction, or to a savepoint before, drops it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, event, text
from sqlalchemy.orm import Session, SessionTransaction, scoped_session

from celery_leases.errors import LeaseLost, WrongDatabase
from celery_leases.keys import CallKey
from celery_leases.record import Outcome, Record, State
from celery_leases.stores.sql.records import SqlRecordStore
from celery_leases.stores.sql.transactions import JoinedTransaction, open_check

MAX_RECORDS: Final = 1000
WAITING: Final = "celery_leases_after_commit"
"""The key of ``info``, of a session or connection, for the calls that wait for its commit."""
COMMITTED: Final = "celery_leases_committed"
"""The key of ``Session.info`` for the calls to run once the committed transaction has ended."""


def prepare(records: SqlRecordStore, now: Callable[[], int] | None = None) -> None:
    """Create the tables of *records*, and limit them to the latest ``MAX_RECORDS``; *now* is their
    clock, in microseconds.

    Each new record deletes older ones with their effects and marks, but not those of running
    attempts. No other process can hold a lease here, so an expired one is taken over at once.
    Raises :class:`~celery_leases.errors.StoreUnavailable`.
    """
    if now is not None:
        records.database.host_now = now
    records.availability.grace = 0.0
    records.check()
    tables = records.tables
    dependent = (tables.effects, tables.marks)
    own = " ".join(f"DELETE FROM {table} WHERE stored_key = OLD.stored_key;" for table in dependent)  # noqa: S608
    old = f"DELETE FROM {tables.records} WHERE rowid <= NEW.rowid - {MAX_RECORDS} AND state <> 'running';"  # noqa: S608
    triggers = (
        f"CREATE TRIGGER IF NOT EXISTS celery_leases_evict AFTER INSERT ON {tables.records} BEGIN {old} END",
        f"CREATE TRIGGER IF NOT EXISTS celery_leases_cascade AFTER DELETE ON {tables.records} BEGIN {own} END",
    )
    with records.database.errors(), records.database.engine.connect() as connection:
        for trigger in triggers:
            connection.execute(text(trigger))


# -- the user's transaction ------------------------------------------------------------------------


def commit_is_observable(given: Any) -> bool:
    """Whether the commit of *given*, a session or connection, can be observed."""
    return isinstance(given, Session | Connection | scoped_session)


class EagerTransaction(JoinedTransaction):
    """One open transaction of the user's, in any database."""

    def join(self, key: str) -> None:
        """Join the transaction; begin one if the user gave a SQLAlchemy session or connection."""
        if self._is_open is None:
            self._is_open = open_check(self._given)

    def guard(self, record: Record) -> None:
        """Raise :class:`LeaseLost` unless the attempt still owns the record."""
        now = self.records.read(record.stored_key)
        if now is None or not now.is_attempt(State.RUNNING, record.owner, record.fence):
            why = "the record was changed by another attempt or an operator"
            raise LeaseLost(f"{record.key}: the lease is lost: {why}", record.key, why)

    def has_completed(self, record: Record) -> bool:
        """Whether the record is done under its attempt."""
        now = self.records.read(record.stored_key)
        return now is not None and now.is_attempt(State.DONE, record.owner, record.fence)

    def read(self, stored_key: str, key: str, *, newest: bool = False) -> Record | None:
        """The row of a key."""
        return self.records.read(stored_key)

    def complete(self, record: Record, outcome: Outcome) -> None:
        """Write the outcome when this transaction commits; raises :class:`LeaseLost` as
        :meth:`guard` does.
        """
        self.guard(record)
        key = CallKey(record.key, record.stored_key)

        def committed(_: bool) -> None:
            self.records.settle(record, outcome)

        do_after_commit(self._given, key, record.call_id, committed, completes=True)


@dataclass(frozen=True, slots=True)
class WaitingCall:
    """A call of ``key`` that waits until all transactions and savepoints in ``within`` are
    committed.

    Then ``done`` is called, with ``True`` if the transaction has ended, so that the task may run at
    once. ``completes``: the call writes an outcome, which happens at the moment of the commit.
    """

    key: CallKey
    call_id: str
    done: Callable[[bool], None]
    within: tuple[Any, ...] = ()
    completes: bool = False


def waiting_in(given: Any) -> Sequence[WaitingCall]:
    """The calls that wait for the commit of *given*'s transaction; empty if that is not known."""
    given = _unwrapped(given)
    if isinstance(given, Session):
        return [call for call in given.info.get(WAITING, ()) if not call.completes]
    if isinstance(given, Connection):
        root = given.get_transaction()
        return [
            call
            for call in given.info.get(WAITING, ())
            if root in call.within and not call.completes
        ]
    return ()


def do_after_commit(
    given: Any, key: CallKey, call_id: str, done: Callable[[bool], None], *, completes: bool = False
) -> None:
    """Call *done* once the transaction of *given* commits.

    *given* is a SQLAlchemy ``Session`` or ``Connection``, or one of Django's connections. For a
    ``Connection`` *done* is called just before the commit, so no task may run yet. Raises
    :class:`WrongDatabase` for anything else.
    """
    given = _unwrapped(given)
    if isinstance(given, Session):
        given.connection()  # begins its transaction
        call = WaitingCall(key, call_id, done, tuple(_of_session(given)), completes)
        _waiting(given.info).append(call)
        _listen(
            given, ("after_commit", "after_soft_rollback", "after_transaction_end"), _ON_SESSION
        )
    elif isinstance(given, Connection):
        if given.get_transaction() is None:
            given.begin()
        waiting = _waiting(given.info)
        root = given.get_transaction()
        waiting[:] = [call for call in waiting if root in call.within]
        waiting.append(WaitingCall(key, call_id, done, (root, *_savepoints(given)), completes))
        _listen(given, ("commit", "rollback", "rollback_savepoint"), _ON_CONNECTION)
    elif callable(getattr(given, "on_commit", None)):
        given.on_commit(lambda: done(True))
    else:
        raise WrongDatabase(
            f"{key.key}: the commit of a {type(given).__name__} cannot be observed, and the records of eager "
            "calls are in memory; give a Session or Connection of SQLAlchemy or Django's connection, or set "
            "leases_eager_stores=True, so that eager calls use leases_database_url"
        )


def _unwrapped(given: Any) -> Any:
    return given.registry() if isinstance(given, scoped_session) else given


def _waiting(info: MutableMapping[Any, Any]) -> list[WaitingCall]:
    found: list[WaitingCall] = info.setdefault(WAITING, [])
    return found


def _listen(target: Any, names: Sequence[str], receivers: dict[str, Callable[..., None]]) -> None:
    for name in names:
        if not event.contains(target, name, receivers[name]):
            event.listen(target, name, receivers[name])


# -- sessions --------------------------------------------------------------------------------------


def _of_session(session: Session) -> Iterator[SessionTransaction]:
    """The savepoints and the transaction that a session is in, the innermost first."""
    found = session.get_nested_transaction() or session.get_transaction()
    while found is not None:
        yield found
        found = found.parent


def _session_commits(session: Session) -> None:
    if session.get_nested_transaction() is None:
        waiting: list[WaitingCall] = session.info.pop(WAITING, [])
        session.info.setdefault(COMMITTED, []).extend(
            call for call in waiting if not call.completes
        )
        for call in waiting:
            if call.completes:
                call.done(False)


def _session_rolls_back(session: Session, transaction: SessionTransaction) -> None:
    _drop(session.info, transaction)


def _session_ends(session: Session, transaction: SessionTransaction) -> None:
    if transaction.parent is not None:
        return
    _drop(session.info, transaction)  # close() reports neither a commit nor a rollback
    for call in session.info.pop(COMMITTED, ()):
        call.done(True)


def _drop(info: MutableMapping[Any, Any], transaction: Any) -> None:
    if waiting := info.get(WAITING):
        waiting[:] = [call for call in waiting if transaction not in call.within]


_ON_SESSION: Final[dict[str, Callable[..., None]]] = {
    "after_commit": _session_commits,
    "after_soft_rollback": _session_rolls_back,
    "after_transaction_end": _session_ends,
}


# -- connections -----------------------------------------------------------------------------------


def _savepoints(connection: Connection) -> Iterator[str]:
    """The names of the savepoints that a connection is in."""
    nested: Any = connection.get_nested_transaction()
    while nested is not None:
        yield getattr(nested, "_savepoint", "")
        nested = getattr(nested, "_previous_nested", None)


def _connection_commits(connection: Connection) -> None:
    for call in connection.info.pop(WAITING, ()):
        if connection.get_transaction() in call.within:
            call.done(False)


def _connection_rolls_back(connection: Connection) -> None:
    connection.info.pop(WAITING, None)


def _connection_rolls_back_to(connection: Connection, name: str, _: None) -> None:
    _drop(connection.info, name)


_ON_CONNECTION: Final[dict[str, Callable[..., None]]] = {
    "commit": _connection_commits,
    "rollback": _connection_rolls_back,
    "rollback_savepoint": _connection_rolls_back_to,
}
