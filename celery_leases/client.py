"""Status and repair from outside: for operators, and for web processes that import no task."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from celery_leases.core.errors import LeaseIsLive, StoreUnavailable, UnknownKey
from celery_leases.core.keys import stored_key
from celery_leases.core.ports import Holder, LeaseStore
from celery_leases.core.records import Attempt, Failure, Record, State
from celery_leases.core.results import decode
from celery_leases.stores.sql import SqlRecordStore
from celery_leases.wiring import lease_store, open_records, read_settings

ABSENT = "absent"
ABANDONED = "abandoned"
LOOK_THROUGH = 10_000


@dataclass(frozen=True, slots=True)
class LeaseStatus:
    """Where a key stands.

    ``state`` is a record's state, or ``absent`` (no record), or ``abandoned`` (running, but nobody holds the lease).
    ``retry_after`` and ``lease_remaining`` are seconds, the ``*_at`` are aware datetimes in UTC.
    ``holder`` is ``hostname/pid``, ``reason`` and ``rule`` say what decided the state.
    """

    key: str
    task: str | None
    state: str
    attempt: int = 0
    failures: int = 0
    crashes: int = 0
    call_id: str | None = None
    fence: int = 0
    retry_at: datetime | None = None
    retry_after: float | None = None
    reason: str | None = None
    rule: str | None = None
    holder: str | None = None
    lease_remaining: float | None = None
    result: Any = None
    error: Failure | None = None
    previous: Attempt | None = None
    created_at: datetime | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None

    def message(self) -> str:
        """One sentence for the person who waits; times are rounded up."""
        match self.state:
            case "absent":
                return "Not started yet"
            case "done":
                return "Done"
            case "failed":
                return f"Failed for good: {self.error.message}" if self.error else "Failed for good"
            case "running":
                return f"Running (attempt {self.attempt})"
            case "abandoned":
                return "Its process died; it runs again when the broker delivers it"
            case "pending" | "cooling" if self.retry_after:
                return f"Retry available in {_words(self.retry_after)}"
            case "pending" if self.error:
                return f"The last attempt failed: {self.error.message}"
            case "pending":
                return "Not running: it runs when it is delivered, or called again"
            case state:
                return state.capitalize()

    def as_json(self) -> dict[str, Any]:
        """Plain values, datetimes in ISO 8601."""
        return {
            name: value.isoformat() if isinstance(value, datetime) else value for name, value in asdict(self).items()
        }


class LeaseClient:
    """Looks at keys and repairs them, given the two URLs a worker has in ``leases_url`` and ``leases_database_url``."""

    def __init__(
        self, leases_url: str, database_url: str, *, prefix: str = "celery_leases", schema: str | None = None
    ) -> None:
        conf = {"url": leases_url, "database_url": database_url, "prefix": prefix, "database_schema": schema}
        settings = read_settings({f"leases_{name}": value for name, value in conf.items() if value is not None}, None)
        self._records = open_records(settings)
        self._leases: LeaseStore = lease_store(settings, self._records)
        self._checked = False

    @classmethod
    def on(cls, leases: LeaseStore, records: SqlRecordStore) -> LeaseClient:
        """A client on stores that are open already."""
        client = cls.__new__(cls)
        client._leases, client._records, client._checked = leases, records, False  # noqa: SLF001 - its own constructor
        return client

    def status(self, key: str, *, task: str | None = None, scope: str = "task") -> LeaseStatus:
        """Where *key* stands; *task* is needed unless the key is global, or given as it is stored (``t:task|key``).

        A key nobody knows has the state ``absent``. Raises :class:`~celery_leases.StoreUnavailable` when the records
        do not answer; when only the lease store does not, ``reason`` says so.
        """
        self._ready()
        stored = self._stored(key, task, scope)
        record = self._records.read(stored)
        if record is not None and record.expired:
            record = None
        try:
            return _status(key, task, record, self._leases.holder(stored))
        except StoreUnavailable as error:
            return _status(key, task, record, None, f"the lease store does not answer: {error}")

    def list(self, *, states: Sequence[str] = (), task: str | None = None, limit: int = 100) -> list[LeaseStatus]:
        """The keys with a record, the latest started first. ``abandoned`` may be asked for like any other state."""
        self._ready()
        known = {*State, ABANDONED}
        if isinstance(states, str) or not known.issuperset(states):
            raise ValueError(f"states={states!r}: give a list of {', '.join(sorted(known))}")
        wanted = {State.RUNNING.value if state == ABANDONED else state for state in states}
        found: list[LeaseStatus] = []
        for record in self._records.search(states=sorted(wanted), task=task, limit=LOOK_THROUGH if states else limit):
            if len(found) == limit:
                break
            try:
                holder = self._leases.holder(record.stored_key) if record.state is State.RUNNING else None
                status = _status(record.key, record.task, record, holder)
            except StoreUnavailable as error:
                status = _status(record.key, record.task, record, None, f"the lease store does not answer: {error}")
            if not states or status.state in states:
                found.append(status)
        return found

    def release(self, key: str, *, task: str | None = None) -> LeaseStatus:
        """Take the key away from whoever holds it: what a holder still says about the outcome is refused from now on.

        Counts and history stay. Raises :class:`~celery_leases.UnknownKey`.
        """
        return self._take(key, task, keep=True)

    def forget(self, key: str, *, task: str | None = None, force: bool = False) -> LeaseStatus:
        """Make the key as good as new: its result, its failures and its counts are gone.

        Raises :class:`~celery_leases.LeaseIsLive` while somebody runs it, unless *force*, and
        :class:`~celery_leases.UnknownKey`.
        """
        if not force:
            self._refuse_live(key, task)
        return self._take(key, task, keep=False)

    def close(self) -> None:
        """Let the connections go; the next call would open new ones."""
        self._records.database.close()
        self._leases.close()

    def _ready(self) -> None:
        if not self._checked:
            self._records.check()
            self._checked = True

    def _take(self, key: str, task: str | None, *, keep: bool) -> LeaseStatus:
        self._ready()
        stored = self._stored(key, task)
        record = self._records.read(stored)
        holder = self._leases.holder(stored)
        if record is None and holder is None:
            raise UnknownKey(f"there is neither a lease nor a record for {key}", key)
        # First the fence, then the lease: the other way round a holder could still write its outcome.
        if record is not None and (not keep or record.state is State.RUNNING):
            self._records.reset(stored, keep=keep)
        if holder is not None:
            self._leases.release(stored, holder.token)
        return self.status(stored)

    def _refuse_live(self, key: str, task: str | None) -> None:
        self._ready()
        holder = self._leases.holder(self._stored(key, task))
        if holder is not None:
            raise LeaseIsLive(
                f"{key} is held by {holder.host} (call {holder.call_id}) for another {holder.remaining:.1f} s; "
                "wait, or repeat with force",
                key,
                holder.remaining,
            )

    def _stored(self, key: str, task: str | None, scope: str = "task") -> str:
        if task is not None:
            return stored_key(task, key, scope)
        if key.startswith("g:") or (key.startswith("t:") and "|" in key):
            return key
        named = self._records.named(key)
        if len(named) > 1:
            tasks = ", ".join(sorted(record.task for record in named))
            raise UnknownKey(f"{key} is a key of several tasks ({tasks}); say which", key)
        return named[0].stored_key if named else stored_key("", key, "global")


def _status(
    key: str, task: str | None, record: Record | None, holder: Holder | None, trouble: str | None = None
) -> LeaseStatus:
    if record is None:
        state = ABSENT if holder is None else State.RUNNING.value
        return LeaseStatus(key, task, state, reason=trouble, **_held(holder))
    state = record.state.value
    if record.state is State.RUNNING and holder is None and trouble is None:
        state = ABANDONED
    waits = record.state in (State.PENDING, State.COOLING) and record.waits > 0
    return LeaseStatus(
        key=record.key,
        task=record.task,
        state=state,
        attempt=record.attempt,
        failures=record.failures,
        crashes=record.crashes,
        fence=record.fence,
        retry_at=_time(record.retry_at) if waits else None,
        retry_after=record.waits if waits else None,
        reason=trouble or record.reason,
        rule=record.failure.rule if record.failure else None,
        result=decode(record.result) if record.state is State.DONE else None,
        error=record.failure,
        previous=record.previous,
        created_at=_time(record.created_at),
        started_at=_time(record.started_at),
        finished_at=_time(record.finished_at),
        **{"call_id": record.call_id, **_held(holder)},
    )


def _held(holder: Holder | None) -> Mapping[str, Any]:
    if holder is None:
        return {}
    return {"holder": holder.host, "call_id": holder.call_id, "lease_remaining": holder.remaining}


def _time(microseconds: int | None) -> datetime | None:
    return datetime.fromtimestamp(microseconds / 1e6, UTC) if microseconds is not None else None


def _words(seconds: float) -> str:
    for unit, size in (("hour", 3600), ("minute", 60), ("second", 1)):
        if seconds > size or size == 1:
            count = max(1, math.ceil(seconds / size))
            return f"{count} {unit}{'s' if count > 1 else ''}"
    raise AssertionError(seconds)
