"""``LeaseClient``: reads and repairs a key, for web processes that import no task.

:class:`celery_leases.ops.client.OperatorClient` also reads and changes many keys.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from celery_leases.attempt.process import lease_store, open_effects, open_records
from celery_leases.decide.answers import Holder
from celery_leases.decide.claim import finished_by
from celery_leases.decide.latest import replaced_mark
from celery_leases.errors import (
    AlreadyDone,
    LeaseConfigurationError,
    LeaseIsLive,
    LeaseMisuse,
    RecordUnreadable,
    StoreUnavailable,
    UnknownKey,
)
from celery_leases.groups.group import ClosedGroup
from celery_leases.groups.history import PastClosing
from celery_leases.groups.slots import NO_SLOTS, Slots, full_group
from celery_leases.keys import is_shared, stored_key
from celery_leases.record import Record, State
from celery_leases.results import NO_LIMIT, encode
from celery_leases.settings import read_settings
from celery_leases.status import (
    ABANDONED,
    UNREADABLE,
    AttemptStatus,
    ClosingStatus,
    EffectStatus,
    GroupStatus,
    LeaseStatus,
    status_of,
    status_of_group,
    status_of_open_group,
)
from celery_leases.stores.interfaces import MarkedLeaseStore, WaiterStore
from celery_leases.text.durations import Duration, seconds

__all__ = [
    "AttemptStatus",
    "ClosingStatus",
    "EffectStatus",
    "GroupStatus",
    "LeaseClient",
    "LeaseStatus",
]

if TYPE_CHECKING:
    from celery import Celery

    from celery_leases.attempt.process import Process
    from celery_leases.outbox.calls import RelayResult
    from celery_leases.stores.sql.records import SqlRecordStore

Write = Literal["retry", "release", "forget", "resolve_done", "resolve_retry"]
"""What is written into the record of a key."""
RETRIES: Final = ("retry", "resolve_retry")
"""These let a key run again, and set its counts to zero."""


class LeaseClient:
    """Reads and repairs keys. The two URLs are ``leases_url`` and ``leases_database_url`` of the
    workers.

    *prefix*, *schema* and *transport_options* are those of the workers too, if they have any. A
    process that has the Celery app uses :meth:`from_app`. Close the client, or use it as a context
    manager.

    A *key* is that of the *task*, a shared key (``/name/key``), or a stored key (``t:task|key``).
    The task is not needed for these two, or if only one task of the app has a record of the key.
    Records of other tasks are searched if none has. Each method raises
    :class:`~celery_leases.errors.StoreUnavailable` if the records database does not answer, and
    :class:`~celery_leases.errors.UnknownKey` for a key of several tasks.
    """

    _process: Process | None = None
    _wall_time: Callable[[], float] = staticmethod(time.time)
    _checked = False

    def __init__(
        self,
        leases_url: str,
        database_url: str,
        *,
        prefix: str = "celery_leases",
        schema: str | None = None,
        transport_options: Mapping[str, Any] | None = None,
    ) -> None:
        conf: dict[str, Any] = {"url": leases_url, "database_url": database_url, "prefix": prefix}
        conf |= {"database_schema": schema, "transport_options": transport_options}
        settings = read_settings(
            {f"leases_{name}": value for name, value in conf.items() if value is not None}, None
        )
        records = open_records(settings)
        self._use(lease_store(settings, records), records)

    @classmethod
    def from_app(cls, app: Celery, *, eager: bool | None = None) -> Self:
        """The client of a Celery *app*: it uses the stores and the connections of the app.

        These are the stores of the settings; under ``task_always_eager`` they are the stores of
        eager calls, which are in memory unless ``leases_eager_stores`` is set. *eager* chooses one
        of them explicitly.
        """
        from celery_leases.worker import processes

        process = processes.process_of(app, eager=eager)
        client = cls.__new__(cls)
        client._use(process.leases, process.records, process)  # noqa: SLF001 - its own
        return client

    def _use(
        self, leases: MarkedLeaseStore, records: SqlRecordStore, process: Process | None = None
    ) -> None:
        """Use stores that are open, such as those that *process* has."""
        self._leases, self._records = leases, records
        if process is None:
            self._effects = open_effects(records)
            return
        self._process, self._effects = process, process.effects
        self._wall_time = process.wall_time

    def close(self) -> None:
        """Close the connections, unless they are those of an app. A later call opens new ones."""
        if self._process is None:
            self._records.database.close()
            self._leases.close()

    def __enter__(self) -> Self:
        """Return the client."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the client."""
        self.close()

    # -- reading -----------------------------------------------------------------------------------

    def status(
        self,
        key: str,
        *,
        task: str | None = None,
        group: str | None = None,
        waiting: bool = False,
        call: str | None = None,
    ) -> LeaseStatus:
        """The status of *key*; a key without a record is ``absent``.

        *group* is the cooldown group of the key; a key that has failed because of its group does
        not need it. *waiting*: also read which calls of the key wait; for that, Redis is scanned.
        *call*: the id of a call with ``lease_runs="latest"``, for which another status is given as
        long as another call has the record: ``pending``, or ``replaced`` if that call has answered
        it. If only the lease store does not answer, ``reason`` says so.
        """
        stored = self._stored(key, task)
        record = self._records.read(stored, lenient=True)
        record = record if record is None or not record.expired else None
        effects = self._effects.of_key(record) if record is not None else ()
        holder = closed_group = trouble = None
        try:
            holder = self._leases.holder(stored)
            record, closed_group = self._now(stored, record, holder, group, self._closed_group_of)
        except StoreUnavailable as error:
            trouble = unanswered(error)
        status = status_of(
            *(key, task, record, holder),
            closed_group=closed_group,
            effects=effects,
            trouble=trouble,
            wall_time=self._wall_time(),
        )
        if call is not None and record is not None and record.arrived:
            status = self._of_call(status, stored, record, call)
        return self._with_waiting(status, key, stored) if waiting else status

    def _of_call(self, status: LeaseStatus, stored: str, record: Record, call: str) -> LeaseStatus:
        """The *status* of a key for the person who waits for one of its calls."""
        if record.call_id == call or finished_by(call, record):
            return status
        try:
            if self._leases.mark(stored, replaced_mark(call)) is not None:
                return replace(status, replaced=True)
        except StoreUnavailable:
            return status
        if status.state == State.RUNNING:
            return status
        return LeaseStatus(status.key, status.task, State.PENDING.value, call_id=call)

    def _now(
        self,
        stored: str,
        record: Record | None,
        holder: Holder | None,
        group: str | None,
        closed_group_of: Callable[[str], ClosedGroup | None],
    ) -> tuple[Record | None, ClosedGroup | None]:
        """The *record* after the lease was read, and the group for which its key waits.

        A running record without a lease may have ended between the two reads.
        """
        if holder is not None:
            return record, None
        if record is not None and record.state is State.RUNNING:
            return self._records.read(stored, lenient=True), None
        if record is not None and record.state not in (State.PENDING, State.COOLING):
            return record, None
        if record is not None and record.failure is not None:
            group = record.failure.group or group
        return record, closed_group_of(group) if group is not None else None

    def _closed_group_of(self, group: str) -> ClosedGroup | None:
        """*group* if it is not open, or else what shows that the group is full."""
        slots, now = self._leases.groups.slots([group]).get(group, (NO_SLOTS, 0.0))
        return full_group(group, slots, now)

    def _with_waiting(self, status: LeaseStatus, key: str, stored: str) -> LeaseStatus:
        """*status* with the calls that wait; without a record, of all tasks of the app that may
        have the *key*.
        """
        store: object = self._leases
        if not isinstance(store, WaiterStore):
            return status
        of_key = {stored}
        if status.stored_key is None and stored == stored_key("", key):
            of_key |= self._stored_keys_of_app(key)
        found: set[str] = set()
        with suppress(StoreUnavailable):  # this user may not be allowed to SCAN
            for each in sorted(of_key):
                found.update(store.waiting(each))
        if status.state == State.RUNNING:
            found.discard(status.call_id or "")
        return replace(status, waiting=tuple(sorted(found)))

    def arguments(self, key: str, *, task: str | None = None) -> Mapping[str, Any] | None:
        """The ``args`` and ``kwargs`` in the stored message of the record of *key*, as JSON values;
        ``None`` if the record has no message. Secrets among the arguments are not redacted.

        Raises :class:`~celery_leases.errors.RecordUnreadable` for a message that cannot be read.
        """
        record = self._records.read(self._stored(key, task), lenient=True)
        if record is None or record.message is None:
            return None
        try:
            message = json.loads(record.message)
            return {"args": message["args"], "kwargs": message["kwargs"]}
        except (ValueError, TypeError, KeyError):
            raise RecordUnreadable(
                f"{key}: its message cannot be read", False, key, "message"
            ) from None

    def groups(self, *, opened: bool = False) -> Sequence[GroupStatus]:
        """The groups that are not open, and those that are full; with *opened* also groups that
        have running bodies, or were closed in the last 30 days.
        """
        self._ready()
        closed_groups, store = [*self._leases.groups.all()], self._leases.groups
        past = store.history(
            None if opened else [closed_group.group for closed_group in closed_groups]
        )
        in_use = store.slots()
        named = {closed_group.group: closed_group for closed_group in closed_groups}
        names = [*named, *sorted({*past, *in_use} - {*named})]
        found = [self._group(named.get(name), name, past, in_use) for name in names]
        return [each for each in found if opened or each.state != "open"]

    def _group(
        self,
        closed_group: ClosedGroup | None,
        group: str,
        past: Mapping[str, Sequence[PastClosing]],
        in_use: Mapping[str, tuple[Slots, float]],
    ) -> GroupStatus:
        slots, now = in_use.get(group, (NO_SLOTS, 0.0))
        if closed_group is None:
            return status_of_open_group(
                group, past.get(group, ()), full_group(group, slots, now), slots
            )
        return status_of_group(closed_group, self._wall_time(), past.get(group, ()), slots)

    # -- changing ----------------------------------------------------------------------------------

    def retry(
        self,
        key: str,
        *,
        task: str | None = None,
        force: bool = False,
        retention: Duration | None = None,
    ) -> LeaseStatus:
        """End the wait of a key, or let a ``failed`` key run again. Its counts of failures, crashes
        and cooldowns are reset.

        This publishes nothing. If ``resumes`` is true, a copy of the call waits at the broker and
        is delivered when its countdown ends; otherwise call the task again, or :meth:`publish` its
        stored message. A cooldown group is not opened. The record counts for
        *retention* from now, by default the task's ``lease_retention``.

        Raises :class:`~celery_leases.errors.LeaseIsLive` if an attempt holds the key, or if the key
        has changed meanwhile, unless *force*; :class:`~celery_leases.errors.AlreadyDone` and
        :class:`~celery_leases.errors.UnknownKey`.
        """
        return self._write("retry", key, task, force, retention)

    def release(
        self,
        key: str,
        *,
        task: str | None = None,
        retention: Duration | None = None,
    ) -> LeaseStatus:
        """Take the key from the attempt that holds it, whose outcome is refused from now on.

        Counts and history stay; *retention* is that of :meth:`retry`. Raises
        :class:`~celery_leases.errors.UnknownKey`.
        """
        return self._write("release", key, task, True, retention)

    def forget(
        self,
        key: str,
        *,
        task: str | None = None,
        force: bool = False,
        retention: Duration | None = None,
    ) -> LeaseStatus:
        """Make the record of the key empty: without result, failures, counts and history.

        With ``lease_runs="each"``, effects that the call has done stay done. *retention*,
        *force* and the errors are those of :meth:`retry`.
        """
        return self._write("forget", key, task, force, retention)

    def resolve(
        self,
        key: str,
        outcome: Literal["done", "retry"],
        *,
        result: Any = None,
        task: str | None = None,
        force: bool = False,
        retention: Duration | None = None,
    ) -> LeaseStatus:
        """Write what an operator has found out about a key, which is usually ``uncertain``.

        ``"done"``: the work is done; later callers get *result* (JSON). ``"retry"``: its effects
        without a reply have not happened, and the key may run again; nothing is published.
        *retention*, *force* and the errors are those of :meth:`retry`; a result that is not JSON
        raises :class:`~celery_leases.errors.LeaseMisuse`.
        """
        if outcome not in ("done", "retry"):
            raise LeaseMisuse(f"resolve({outcome!r}): write 'done' or 'retry'")
        what: Write = "resolve_done" if outcome == "done" else "resolve_retry"
        return self._write(what, key, task, force, retention, as_text(result))

    def publish(self, key: str, *, task: str | None = None) -> bool | None:
        """Publish the stored message of the record of *key*, so that the call runs now; ``None`` if
        the record has no message.

        Records of enqueued calls, and of tasks with ``lease_outbox="store"``, have a stored
        message. ``False``: the broker did not confirm it, and the next relay tries again. A copy of
        the call that waits at the broker is harmless. Raises the errors of :meth:`relay`.
        """
        from celery_leases.outbox import calls as outbox

        return outbox.publish_stored(self._app("publish"), self._stored(key, task))

    def relay(self, limit: int = 100) -> RelayResult:
        """Publish at most *limit* enqueued messages that are due, because their own process died
        after the commit.

        The result has the records that were ``published``, and those that the broker has
        ``refused``; it is true if any was published. A message that the broker does not confirm is
        due again later. A client that was not made by :meth:`from_app` raises
        :class:`~celery_leases.errors.LeaseConfigurationError`.
        """
        from celery_leases.outbox import calls as outbox

        return outbox.relay(self._app("relay"), limit)

    def rescue(self, *, older: Duration = "15m", limit: int = 100) -> RelayResult:
        """Publish again the stored messages of records that no worker runs, and that have not
        changed for *older*.

        See ``leases rescue``. Raises the errors of :meth:`relay`.
        """
        from celery_leases.outbox import calls as outbox

        return outbox.rescue(self._app("rescue"), older=seconds(older, "older"), limit=limit)

    def _app(self, what: str) -> Celery:
        if self._process is None:
            raise LeaseConfigurationError(
                f"{what}() needs the Celery app: use {type(self).__name__}.from_app(app)"
            )
        return self._process.app

    def _write(
        self,
        what: Write,
        key: str,
        task: str | None,
        force: bool,
        retention: Duration | None,
        result: str | None = None,
    ) -> LeaseStatus:
        stored, span = self._stored(key, task), _span(retention)
        self._change(what, key, stored, force=force, retention=span, result=result)
        return self.status(stored)

    def _change(
        self,
        what: Write,
        key: str,
        stored: str,
        *,
        force: bool = False,
        retention: float | None = None,
        result: str | None = None,
        seen: LeaseStatus | None = None,
    ) -> Record | None:
        """Write *what* into the record of the *stored* key, which errors call *key*. Returns the
        record after that, or ``None`` if it was not read again.

        With *seen*, a key whose fence or state is another one now is not changed, even with
        *force*.
        """
        record, holder = self._changeable(what, key, stored, force=force, seen=seen)
        exact = not force or seen is not None
        compared = exact or what == "release"  # an attempt that has ended meanwhile holds nothing
        known = record if compared and record is not None and record.unreadable is None else None
        # The row is changed first: a holder that loses only its lease could still write its
        # outcome.
        changed = record
        if what == "resolve_done":
            if not self._records.resolve(stored, result, retention, known):
                raise self._has_changed(key, stored)
            changed = None
        elif record is not None and (what != "release" or record.state is State.RUNNING):
            changed = self._records.reset(
                stored,
                keep=what != "forget",
                forgive=what in RETRIES,
                retention=retention,
                seen=known,
            )
            if changed is None and (exact or what in RETRIES):
                raise self._has_changed(key, stored)
        if what == "resolve_retry" and record is not None:
            self._effects.forget_sent(record)
        if holder is not None:
            self._leases.release(stored, holder.token)
        elif what != "release":
            self._leases.end_cooldown(stored)
        return changed

    def _changeable(
        self, what: Write, key: str, stored: str, *, force: bool, seen: LeaseStatus | None
    ) -> tuple[Record | None, Holder | None]:
        """The record and the holder of a key that *what* may change.

        The record is read first. So a claim between the two reads is noticed: by its lease, or by
        its fence when the record is written. If an attempt has claimed the key between them, the
        record is read again, so that a forced change applies to that attempt.
        """
        lenient = what == "forget"
        record = self._records.read(stored, lenient=lenient)
        holder = self._leases.holder(stored)
        if holder is not None and (record is None or record.owner != holder.token):
            record = self._records.read(stored, lenient=lenient)
        if holder is not None and not force:
            raise LeaseIsLive(
                f"{key} is held by {holder.host} (call {holder.call_id}) for another {holder.remaining:.1f} s; "
                "wait, or repeat with force=True (on the command line --force)",
                *(key, holder.remaining),
            )
        if seen is not None and not is_unchanged(record, seen):
            raise self._has_changed(key, stored)
        if record is None and (holder is None or what == "resolve_done"):
            raise UnknownKey(f"there is neither a lease nor a record for {key}", key)
        if record is not None and record.state is State.DONE:
            if what in RETRIES and not record.expired:
                message = (
                    f"{key} is done, there is nothing to retry; `leases forget` lets it run again"
                )
                raise AlreadyDone(message, key, record.call_id)
            if what == "resolve_done":
                raise AlreadyDone(f"{key} is already done", key, record.call_id)
        return record, holder

    def _has_changed(self, key: str, stored: str) -> LeaseIsLive:
        now, holder = self._records.read(stored, lenient=True), self._leases.holder(stored)
        state = now.state.value if now is not None else "deleted"
        message = f"{key} has changed meanwhile, and is {state} now; nothing was done: read its status first"
        return LeaseIsLive(message, key, holder.remaining if holder is not None else 0.0)

    # -- keys --------------------------------------------------------------------------------------

    def _ready(self) -> None:
        if self._process is not None:
            self._process.check_once()
        elif not self._checked:
            self._records.check()
            self._checked = True

    def _stored(self, key: str, task: str | None) -> str:
        self._ready()
        if task is not None or is_shared(key):
            return stored_key(task or "", key)
        if key.startswith("t:") and "|" in key:
            return key
        # The keys of the app's tasks are found by their stored keys; a search reads all records.
        of_app = self._stored_keys_of_app(key)
        named = (self._records.of_keys(of_app) if of_app else []) or self._records.named(key)
        if len(named) > 1:
            tasks = ", ".join(sorted(record.task for record in named))
            raise UnknownKey(f"{key} is a key of several tasks ({tasks}); say which", key)
        return named[0].stored_key if named else stored_key("", key)

    def _stored_keys_of_app(self, key: str) -> set[str]:
        """The stored keys that *key* has for the app's tasks."""
        if self._process is None:
            return set()
        from celery_leases.worker.app_settings import leased_tasks

        tasks = leased_tasks(self._process.app)
        return {stored_key(name, key) for name in tasks}


def is_unchanged(record: Record | None, seen: LeaseStatus) -> bool:
    """Whether *record* still has the fence and the state that were *seen*; the end of its lease
    does not change it.
    """
    if record is None or record.fence != seen.fence:
        return False
    if seen.state == UNREADABLE:
        return record.unreadable is not None
    return record.state == (State.RUNNING.value if seen.state == ABANDONED else seen.state)


def as_text(result: Any) -> str | None:
    text, missing = encode(result, NO_LIMIT) if result is not None else (None, None)
    if missing is not None:
        raise LeaseMisuse(f"resolve(result={result!r}): {missing}")
    return text


def unanswered(error: StoreUnavailable) -> str:
    return f"the lease store does not answer: {error}"


def _span(retention: Duration | None) -> float | None:
    return seconds(retention, "retention") if retention is not None else None
