"""Status and repair from outside: for operators, and for web processes that import no task."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self

from celery_leases.core.durations import Duration, seconds
from celery_leases.core.effects import Effect
from celery_leases.core.errors import (
    AlreadyDone,
    KeyUnusable,
    LeaseConfigurationError,
    LeaseIsLive,
    StoreUnavailable,
    UnknownKey,
)
from celery_leases.core.gates import Closing
from celery_leases.core.keys import stored_key
from celery_leases.core.policies import CooldownPolicy
from celery_leases.core.ports import Holder
from celery_leases.core.records import Record, State
from celery_leases.core.redaction import redact
from celery_leases.core.results import encode
from celery_leases.core.rulings import Reason
from celery_leases.core.status import (
    ABANDONED,
    UNREADABLE,
    EffectStatus,
    GroupStatus,
    LeaseStatus,
    status_of,
    status_of_group,
)
from celery_leases.settings import read_settings
from celery_leases.wiring import AnyStore, lease_store, open_effects, open_records

__all__ = ["EffectStatus", "GroupStatus", "LeaseClient", "LeaseStatus"]

if TYPE_CHECKING:
    from celery import Celery

    from celery_leases.seam.apps import AppParts
    from celery_leases.seam.outgoing import Round
    from celery_leases.stores.sql import SqlRecordStore

LOOK_THROUGH = 10_000
OPERATOR = "operator"
LARGEST = 2**62


class LeaseClient:
    """Looks at keys and repairs them, given the two URLs a worker has in ``leases_url`` and ``leases_database_url``.

    *prefix*, *schema* and *transport_options* are those of the workers, if they have any. A process that has the Celery
    app takes :meth:`from_app`. Close it, or use it as a context manager.
    """

    _parts: AppParts | None = None

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
        settings = read_settings({f"leases_{name}": value for name, value in conf.items() if value is not None}, None)
        self._records = open_records(settings)
        self._leases: AnyStore = lease_store(settings, self._records)
        self._effects = open_effects(self._records)
        self._checked = False

    @classmethod
    def from_app(cls, app: Celery, *, eager: bool = False) -> LeaseClient:
        """The client of a Celery *app*: on the stores that its settings name, over the connections of the app itself.

        *eager*: on those of its eager calls.
        """
        from celery_leases.seam import apps

        parts = apps.parts_of(app, eager=eager)
        if parts.client is None:
            client = cls.on(parts.parts.leases, parts.records)
            client._parts = parts  # noqa: SLF001 - as in a constructor
            parts.client = client
        found: LeaseClient = parts.client
        return found

    @classmethod
    def on(cls, leases: AnyStore, records: SqlRecordStore) -> LeaseClient:
        """A client on stores that are open already."""
        client = cls.__new__(cls)
        client._leases, client._records, client._checked = leases, records, False  # noqa: SLF001 - its own constructor
        client._effects = open_effects(records)  # noqa: SLF001
        return client

    def close(self) -> None:
        """Let the connections go, unless they are those of an app; the next call would open new ones."""
        if self._parts is None:
            self._records.database.close()
            self._leases.close()

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def relay(self, limit: int = 100) -> Round:
        """Publish enqueued messages that are due: those whose own process died after the commit. At most *limit*.

        Only a client :meth:`from_app` can publish; any other raises
        :class:`~celery_leases.errors.LeaseConfigurationError`. Raises
        :class:`~celery_leases.errors.StoreUnavailable`. A message the broker does not confirm is due again later.
        """
        from celery_leases.seam import outgoing

        return outgoing.relay(self._app("relay"), limit)

    def rescue(self, *, older: Duration = "15m", limit: int = 100) -> Round:
        """Publish again the messages of records that no worker has, and that have not changed for *older*.

        See ``leases rescue``. Raises as :meth:`relay` does.
        """
        from celery_leases.seam import outgoing

        return outgoing.rescue(self._app("rescue"), older=seconds(older, "older"), limit=limit)

    def _app(self, what: str) -> Celery:
        if self._parts is None:
            raise LeaseConfigurationError(f"{what}() publishes messages: take LeaseClient.from_app(app)")
        return self._parts.app

    def status(
        self, key: str, *, task: str | None = None, namespace: str | None = None, group: str | None = None
    ) -> LeaseStatus:
        """Where *key* stands. *namespace* is the task's ``lease_namespace``, by default its name, *task*.

        Neither is needed for a key that has one record, or that is given as it is stored (``t:namespace|key``). *group*
        is its cooldown group, for a key that has not failed of it itself. A key without a record is ``absent``.
        Raises :class:`~celery_leases.errors.StoreUnavailable` when the records do not answer; when only the lease store
        does not, ``reason`` says so.
        """
        self._ready()
        stored = self._stored(key, namespace or task)
        record = self._records.read(stored, lenient=True)
        record = record if record is None or not record.expired else None
        effects = self._effects.of_key(record) if record is not None else ()
        return self._status(key, task, stored, record, group, effects)

    def list(self, *, states: Sequence[str] = (), task: str | None = None, limit: int = 100) -> list[LeaseStatus]:
        """The keys with a record, the latest started first.

        ``abandoned`` and ``unreadable`` may be asked for like any other state.
        """
        self._ready()
        known = {*State, ABANDONED, UNREADABLE}
        if isinstance(states, str) or not known.issuperset(states):
            raise ValueError(f"states={states!r}: give a list of {', '.join(sorted(known))}")
        wanted = {State.RUNNING.value if state == ABANDONED else state for state in states}
        wanted = set() if UNREADABLE in wanted else wanted  # which the row does not say
        found: Sequence[LeaseStatus] = ()
        for look_through in (limit, max(limit, LOOK_THROUGH)):  # most often the first ones are all
            records = self._records.search(states=sorted(wanted), task=task, limit=look_through)
            found = self._in(states, records, limit)
            if not states or len(found) == limit or len(records) < look_through:
                break
        return [*found]

    def _in(self, states: Sequence[str], records: Sequence[Record], limit: int) -> Sequence[LeaseStatus]:
        """The first *limit* of *records* in one of *states*; without states, all but the forgotten ones."""
        found: list[LeaseStatus] = []
        for record in records:
            if len(found) == limit:
                break
            status = self._status(record.key, record.task, record.stored_key, record)
            if status.state in states if states else not record.forgotten:
                found.append(status)
        return found

    def retry(
        self,
        key: str,
        *,
        task: str | None = None,
        namespace: str | None = None,
        force: bool = False,
        retention: Duration | None = None,
    ) -> LeaseStatus:
        """End a cooldown or a countdown, or revive a ``failed`` key; failures, crashes and growth start anew.

        Nothing is published by this: where ``resumes`` is true a copy of the call waits at the broker and comes with
        its next hop, else call the task again. The gate of a cooldown group stays as it is, see :meth:`open_group`. The
        record counts for *retention* from now, by default the task's ``lease_retention``. Raises
        :class:`~celery_leases.errors.LeaseIsLive` while somebody runs it, or if somebody has come meanwhile, unless
        *force*, :class:`~celery_leases.errors.AlreadyDone` and :class:`~celery_leases.errors.UnknownKey`.
        """
        return self._take(key, namespace or task, keep=True, forgive=True, force=force, retention=retention)

    def release(
        self,
        key: str,
        *,
        task: str | None = None,
        namespace: str | None = None,
        retention: Duration | None = None,
    ) -> LeaseStatus:
        """Take the key away from whoever holds it: what a holder still says about the outcome is refused from now on.

        Counts and history stay, and the record counts for *retention* from now, by default the task's. Raises
        :class:`~celery_leases.errors.UnknownKey`.
        """
        return self._take(key, namespace or task, keep=True, force=True, retention=retention)

    def forget(
        self,
        key: str,
        *,
        task: str | None = None,
        namespace: str | None = None,
        force: bool = False,
        retention: Duration | None = None,
    ) -> LeaseStatus:
        """Make the key as good as new: its result, its failures and its counts are gone.

        Under ``rerun`` a call that is forgotten so may run again, but finds the effects it has made. The empty record
        counts for *retention*, by default the task's. Raises :class:`~celery_leases.errors.LeaseIsLive` while somebody
        runs it, or if somebody has come meanwhile, unless *force*, and :class:`~celery_leases.errors.UnknownKey`.
        """
        return self._take(key, namespace or task, keep=False, force=force, retention=retention)

    def resolve(
        self,
        key: str,
        outcome: Literal["done", "retry"],
        *,
        result: Any = None,
        task: str | None = None,
        namespace: str | None = None,
        force: bool = False,
        retention: Duration | None = None,
    ) -> LeaseStatus:
        """Say of a key what an operator has found out, above all of an ``uncertain`` one.

        ``"done"``: the work is done; later callers get *result* (JSON) for *retention*, by default the task's
        ``lease_retention``. ``"retry"``: the effects in doubt have not happened; it may run again, and nothing is
        queued by this. Raises :class:`~celery_leases.errors.LeaseIsLive` while somebody runs it, unless *force*,
        :class:`~celery_leases.errors.AlreadyDone`, :class:`~celery_leases.errors.UnknownKey`, and ValueError for a
        result that is no JSON.
        """
        if outcome not in ("done", "retry"):
            raise ValueError(f"resolve({outcome!r}): write 'done' or 'retry'")
        text, missing = encode(result, LARGEST) if result is not None else (None, None)
        if missing is not None:
            raise ValueError(f"resolve(result={result!r}): {missing}")
        if outcome == "retry":
            return self._take(
                key, namespace or task, keep=True, forgive=True, force=force, retention=retention, undone=True
            )
        stored, record, holder = self._look(key, namespace or task, force=force)
        if record is None:
            raise UnknownKey(f"there is no record for {key}", key)
        if record.state is State.DONE:
            raise AlreadyDone(f"{key} is done already", key, record.call_id)
        if not self._records.resolve(stored, text, _span(retention), None if force else record):
            raise self._moved_on(key, stored)
        self._leases.end_cooldown(stored)
        if holder is not None:
            self._leases.release(stored, holder.token)
        return self.status(stored)

    # -- cooldown groups -----------------------------------------------------------------------------------

    def groups(self) -> Sequence[GroupStatus]:
        """The cooldown groups whose gate is not open."""
        self._ready()
        return [status_of_group(gate, time.time()) for gate in self._leases.gates()]

    def open_group(self, group: str) -> bool:
        """Open the gate of *group*, forget its trips, and end the waits of the keys that failed of it.

        Whether it was closed. Copies that wait at the broker come with their next hop. Raises
        :class:`~celery_leases.errors.KeyUnusable` for a blank name.
        """
        _check_group(group)
        self._ready()
        opened = self._leases.open_gate(group)
        self._records.end_waits(group)
        return opened

    def close_group(self, group: str, span: Duration, why: str = "") -> GroupStatus:
        """Let no body of *group* start for *span* (seconds, ``"5m"``, a timedelta); a longer standing time is not cut.

        The first body after that is a probe, as after any failure of the group. Raises
        :class:`~celery_leases.errors.KeyUnusable` for a blank name.
        """
        _check_group(group)
        self._ready()
        policy = CooldownPolicy.of(span, "close_group: span")
        closing = Closing(policy, Reason.ASKED, OPERATOR, redact(why), told=policy.base)
        return status_of_group(self._leases.close_gate(group, closing, OPERATOR), time.time())

    def _ready(self) -> None:
        if not self._checked:
            self._records.check()
            self._checked = True

    def _status(
        self,
        key: str,
        task: str | None,
        stored: str,
        record: Record | None,
        group: str | None = None,
        effects: Sequence[Effect] = (),
    ) -> LeaseStatus:
        if record is not None and record.failure is not None and record.failure.group is not None:
            group = record.failure.group
        waiting = record is None or record.state in (State.PENDING, State.COOLING)
        holder = gate = trouble = None
        try:
            holder = self._leases.holder(stored)
            if record is not None and record.state is State.RUNNING and holder is None:
                record = self._records.read(stored, lenient=True)  # it may have ended between the two looks
            gate = self._leases.gate(group) if group is not None and waiting and holder is None else None
        except StoreUnavailable as error:
            trouble = f"the lease store does not answer: {error}"
        today = time.time()
        return status_of(key, task, record, holder, gate=gate, effects=effects, trouble=trouble, today=today)

    def _take(
        self,
        key: str,
        namespace: str | None,
        *,
        keep: bool,
        forgive: bool = False,
        force: bool = False,
        retention: Duration | None = None,
        undone: bool = False,
    ) -> LeaseStatus:
        span = _span(retention)
        stored, record, holder = self._look(key, namespace, force=force, lenient=not keep)
        if record is None and holder is None:
            raise UnknownKey(f"there is neither a lease nor a record for {key}", key)
        if forgive and record is not None and record.state is State.DONE and not record.expired:
            message = f"{key} is done, there is nothing to retry; `leases forget` lets it run again"
            raise AlreadyDone(message, key, record.call_id)
        # First the fence, then the lease: the other way round a holder could still write its outcome.
        if record is not None and (not keep or forgive or record.state is State.RUNNING):
            seen = None if force or record.unreadable is not None else record
            taken = self._records.reset(stored, keep=keep, forgive=forgive, retention=span, seen=seen)
            if taken is None and not force:
                raise self._moved_on(key, stored)
        if undone and record is not None:
            self._effects.forget_sent(record)
        if holder is not None:
            self._leases.release(stored, holder.token)
        elif forgive or not keep:
            self._leases.end_cooldown(stored)
        return self.status(stored)

    def _look(
        self, key: str, namespace: str | None, *, force: bool, lenient: bool = False
    ) -> tuple[str, Record | None, Holder | None]:
        """The stored key, its record and then its holder; raises :class:`LeaseIsLive` for one, unless *force*.

        Raises :class:`RecordUnreadable` too, unless *lenient*.
        In this order a claim in between is seen: by its lease, or else by the fence, once the record is written to.
        """
        self._ready()
        stored = self._stored(key, namespace)
        record = self._records.read(stored, lenient=lenient)
        holder = self._leases.holder(stored)
        if holder is not None and not force:
            raise LeaseIsLive(
                f"{key} is held by {holder.host} (call {holder.call_id}) for another {holder.remaining:.1f} s; "
                "wait, or repeat with force",
                key,
                holder.remaining,
            )
        return stored, record, holder

    def _moved_on(self, key: str, stored: str) -> LeaseIsLive:
        now, holder = self._records.read(stored, lenient=True), self._leases.holder(stored)
        state = now.state.value if now is not None else "gone"
        message = f"{key} has moved on meanwhile, and is {state} now; nothing was changed: look again, or use force"
        return LeaseIsLive(message, key, holder.remaining if holder is not None else 0.0)

    def _stored(self, key: str, namespace: str | None) -> str:
        if namespace is not None:
            return stored_key(namespace, key)
        if key.startswith("t:") and "|" in key:
            return key
        named = self._records.named(key)
        if len(named) > 1:
            tasks = ", ".join(sorted(record.task for record in named))
            raise UnknownKey(f"{key} is a key of several tasks ({tasks}); say which", key)
        return named[0].stored_key if named else stored_key("", key)


def _check_group(group: str) -> None:
    """Refuse a name that no task's lease_cooldown_group can make."""
    if not group.strip():
        raise KeyUnusable(f"group={group!r} is blank; write the name of a cooldown group, such as 'openai:gpt-5'")


def _span(retention: Duration | None) -> float | None:
    return seconds(retention, "retention") if retention is not None else None
