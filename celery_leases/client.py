"""``LeaseClient``: reads and repairs keys, for operators and for web processes that import no
task.
"""

from __future__ import annotations

import builtins
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from itertools import pairwise
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, Literal, Self
from uuid import uuid4

from celery_leases.components import (
    AnyStore,
    lease_store,
    open_effects,
    open_metrics,
    open_records,
)
from celery_leases.decide.answers import Holder
from celery_leases.effect import Effect
from celery_leases.errors import (
    AlreadyDone,
    KeyUnusable,
    LeaseConfigurationError,
    LeaseIsLive,
    LeaseMisuse,
    RecordUnreadable,
    StoreUnavailable,
    UnknownKey,
)
from celery_leases.failures.actions import Reason
from celery_leases.failures.cooldown_policies import CooldownPolicy
from celery_leases.findings import Examination, Finding
from celery_leases.groups.group import Closing, Gate
from celery_leases.groups.history import PastClosing
from celery_leases.keys import stored_key
from celery_leases.metrics_totals import METRICS
from celery_leases.operator_reports import (
    Change,
    Page,
    RuleCount,
    SavedRuns,
    StateCount,
    Stats,
    why_unchanged,
)
from celery_leases.record import Record, State
from celery_leases.record_filters import Order, Position, RecordFilter
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
from celery_leases.stores.interfaces import ClosingStore, WaiterStore
from celery_leases.text.durations import Duration, seconds
from celery_leases.text.redaction import redact
from celery_leases.tuning import Lateness

__all__ = [
    "AttemptStatus",
    "Change",
    "ClosingStatus",
    "EffectStatus",
    "Examination",
    "Finding",
    "GroupStatus",
    "Lateness",
    "LeaseClient",
    "LeaseStatus",
    "Page",
    "RecordFilter",
    "RuleCount",
    "SavedRuns",
    "StateCount",
    "Stats",
]

if TYPE_CHECKING:
    from celery import Celery

    from celery_leases.outbox.calls import RelayResult
    from celery_leases.stores.sql.records import SqlRecordStore
    from celery_leases.worker.app_components import AppComponents

LOOK_THROUGH = 10_000
"""Records that are read for one page, at most."""
OPERATOR = "operator"
"""The rule, and the owner token, of a gate that an operator has closed."""
BATCH: Final = 500
"""Records that are read by one statement."""
PURGE_BATCH: Final = 1000
"""Records that are deleted by one transaction."""
PURGED: Final = (State.PENDING.value, State.DONE.value, State.COOLING.value, State.FAILED.value)
"""The states that :meth:`LeaseClient.purge` deletes with ``older`` by default."""
EVERY_RECORD: Final = RecordFilter()


class LeaseClient:
    """Reads and repairs keys. The two URLs are ``leases_url`` and ``leases_database_url`` of the
    workers.

    *prefix*, *schema* and *transport_options* are those of the workers too, if they have any. A
    process that has the Celery app uses :meth:`from_app`. Close the client, or use it as a context
    manager.
    """

    _components: AppComponents | None = None
    _wall_time: Callable[[], float] = staticmethod(time.time)

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
        self._records = open_records(settings)
        self._leases: AnyStore = lease_store(settings, self._records)
        self._effects = open_effects(self._records)
        self._checked = False

    @classmethod
    def from_app(cls, app: Celery, *, eager: bool | None = None) -> LeaseClient:
        """The client of a Celery *app*: it uses the stores and the connections of the app.

        These are the stores of the settings; under ``task_always_eager`` they are the stores of
        eager calls, which are in memory unless ``leases_eager_stores`` is set. *eager* chooses one
        of them explicitly.
        """
        from celery_leases.worker import app_components

        components = app_components.components_of(app, eager=eager)
        if components.client is None:
            client = cls.on(components.leases, components.records)
            client._components, client._wall_time = components, components.context.wall_time  # noqa: SLF001 - as in a constructor
            components.client = client
        found: LeaseClient = components.client
        return found

    @classmethod
    def on(cls, leases: AnyStore, records: SqlRecordStore) -> LeaseClient:
        """A client of stores that are already open."""
        client = cls.__new__(cls)
        client._leases, client._records, client._checked = leases, records, False  # noqa: SLF001 - its own constructor
        client._effects = open_effects(records)  # noqa: SLF001
        return client

    def close(self) -> None:
        """Close the connections, unless they are those of an app. A later call opens new ones."""
        if self._components is None:
            self._records.database.close()
            self._leases.close()

    def __enter__(self) -> Self:
        """Return the client."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the client."""
        self.close()

    def relay(self, limit: int = 100) -> RelayResult:
        """Publish at most *limit* enqueued messages that are due, because their own process died
        after the commit.

        The result has the records that were ``published``, and those that the broker has
        ``refused``; it is true if any was published. A message that the broker does not confirm is
        due again later. Needs a client made by :meth:`from_app`; another one raises
        :class:`~celery_leases.errors.LeaseConfigurationError`. Raises
        :class:`~celery_leases.errors.StoreUnavailable`.
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
        if self._components is None:
            raise LeaseConfigurationError(
                f"{what}() needs the Celery app: use LeaseClient.from_app(app)"
            )
        return self._components.app

    def status(
        self,
        key: str,
        *,
        task: str | None = None,
        namespace: str | None = None,
        group: str | None = None,
        waiting: bool = False,
    ) -> LeaseStatus:
        """The status of *key*. *namespace* is the ``lease_namespace`` of its *task*, by default the
        name of the task.

        Neither is needed if *key* is a stored key (``t:namespace|key``), or if only one task of the
        app has a record of it. Records of other tasks are searched if none has. *group* is the
        cooldown group of the key; a key that has failed because of its group does not need it. A
        key without a record is ``absent``. *waiting*: also read which calls of the key wait; for
        that, Redis is scanned. Raises :class:`~celery_leases.errors.StoreUnavailable`
        if the records database does not answer; if only the lease store does not answer, ``reason``
        says so.
        """
        self._ready()
        stored = self._stored(key, namespace or task)
        record = self._records.read(stored, lenient=True)
        record = record if record is None or not record.expired else None
        effects = self._effects.of_key(record) if record is not None else ()
        status = self._status(key, task, stored, record, group, effects)
        return self._with_waiting(status, key, stored) if waiting else status

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

    def list(
        self, *, states: Sequence[str] = (), task: str | None = None, limit: int = 100
    ) -> list[LeaseStatus]:
        """The status of at most *limit* records, the latest start first.

        *states* may include ``abandoned`` and ``unreadable``. See :meth:`page` for more records.
        """
        return [*self.page(self.where(states=states, task=task), limit=limit).statuses]

    # -- many records ------------------------------------------------------------------------------

    def where(
        self,
        *,
        states: Sequence[str] = (),
        task: str | None = None,
        group: str | None = None,
        prefix: str | None = None,
        reason: str | None = None,
        since: Duration | datetime | None = None,
        until: Duration | datetime | None = None,
        crashed: bool = False,
    ) -> RecordFilter:
        """A filter for :meth:`page`, :meth:`matching`, :meth:`how_many` and :meth:`purge`. All
        given conditions must hold.

        *group* is the cooldown group of the last failure, *prefix* the beginning of the key,
        *reason* a code as in ``LeaseStatus.reason``. *since* and *until* apply to the start of the
        latest attempt; they are a datetime, or a duration before now. *crashed*: the latest attempt
        crashed. Raises :class:`~celery_leases.errors.LeaseMisuse` for an unknown state.
        """
        return RecordFilter.of(
            now=self._wall_time(),
            states=states,
            task=task,
            group=group,
            prefix=prefix,
            reason=reason,
            since=since,
            until=until,
            crashed=crashed,
        )

    def page(
        self,
        wanted: RecordFilter = EVERY_RECORD,
        *,
        order: Literal["latest", "slowest"] = "latest",
        limit: int = 100,
        after: str | None = None,
    ) -> Page:
        """At most *limit* records, the latest start or the longest run time first; *after* is
        ``next`` of the previous page.

        If the columns do not decide whether a record is wanted, at most 10,000 records are read for
        one page. Raises :class:`~celery_leases.errors.LeaseConfigurationError` for an *after* that
        is no ``next``.
        """
        self._ready()
        ordered, place = Order(order), Position.read(after) if after is not None else None
        found: list[LeaseStatus] = []
        read, size = 0, min(limit, BATCH)
        while True:
            records = self._records.find(wanted, order=ordered, limit=size, after=place)
            for number, (record, status) in enumerate(self._statuses(records, wanted), 1):
                place = Position.of(record, ordered)
                if wanted.admits(record, status.state):
                    found.append(status)
                if len(found) == limit:
                    more = number < len(records) or len(records) == size
                    return Page(found, place.token() if more else None)
            read += len(records)
            if len(records) < size or place is None:
                return Page(found, None)
            if read >= LOOK_THROUGH:
                return Page(found, place.token())
            size = LOOK_THROUGH - read

    def matching(self, wanted: RecordFilter = EVERY_RECORD) -> Iterator[LeaseStatus]:
        """The status of all records that are wanted, in the order of their keys. They are read in
        batches, so memory is bounded.
        """
        self._ready()
        place: Position | None = None
        while True:
            records = self._records.find(wanted, order=Order.KEY, limit=BATCH, after=place)
            for record, status in self._statuses(records, wanted):
                if wanted.admits(record, status.state):
                    yield status
            if len(records) < BATCH:
                return
            place = Position.of(records[-1], Order.KEY)

    def how_many(self, wanted: RecordFilter = EVERY_RECORD) -> int:
        """How many records are wanted. One statement; if the columns do not decide that, each
        record is read.
        """
        self._ready()
        return (
            self._records.how_many(wanted)
            if wanted.decided_by_columns
            else sum(1 for _ in self.matching(wanted))
        )

    def as_of_now(self, wanted: RecordFilter) -> RecordFilter:
        """*wanted* without records that change after now, by the database's clock."""
        self._ready()
        return replace(wanted, unmoved_since=self._records.now())

    def change(
        self,
        what: Literal["retry", "release", "forget"],
        found: Iterable[LeaseStatus],
        *,
        force: bool = False,
        retention: Duration | None = None,
        publish: bool = False,
    ) -> Iterator[Change]:
        """Do *what* to each *found* key that has not changed since; yields the :class:`Change` of
        each.

        A key that has changed, is held by a live lease (unless *force*), or is already done is not
        changed, and its :class:`Change` says why. *publish* publishes the stored message of a
        retried record, see :meth:`publish`. Raises :class:`~celery_leases.errors.StoreUnavailable`;
        the keys before it are changed then.
        """
        span = _span(retention)
        self._ready()
        for seen in found:
            yield self._changed(what, seen, force=force, retention=span, publish=publish)

    def _changed(
        self,
        what: Literal["retry", "release", "forget"],
        seen: LeaseStatus,
        *,
        force: bool,
        retention: float | None,
        publish: bool,
    ) -> Change:
        stored = seen.stored_key or seen.key
        if what == "release" and (why := why_unchanged(what, seen)) is not None:
            return Change(seen, False, why)
        try:
            record = self._reset_record(
                stored,
                seen.key,
                keep=what != "forget",
                forgive=what == "retry",
                force=force or (what == "release" and seen.state != ABANDONED),
                retention=retention,
                found=seen,
            )
        except (LeaseIsLive, AlreadyDone, UnknownKey, RecordUnreadable) as error:
            return Change(seen, False, str(error))
        # What was written is known: asking for it again would take as long as the change.
        after = (
            status_of(record.key, record.task, record, None, wall_time=self._wall_time())
            if record is not None
            else self.status(stored)
        )
        keeps_message = record is None or record.message is not None
        publishes = publish and what == "retry" and keeps_message
        return Change(after, True, published=self.publish(stored) if publishes else None)

    def publish(
        self, key: str, *, task: str | None = None, namespace: str | None = None
    ) -> bool | None:
        """Publish the stored message of the record of *key*, so that the call runs now; ``None`` if
        the record has no message.

        Records of enqueued calls, and of tasks with ``lease_store_arguments``, have a stored
        message. ``False``: the broker did not confirm it, and the next relay tries again. A copy of
        the call that waits at the broker is harmless. Needs a client made by :meth:`from_app`.
        Raises the errors of :meth:`relay`.
        """
        from celery_leases.outbox import calls as outbox

        app = self._app("publish")
        self._ready()
        return outbox.publish_stored(app, self._stored(key, namespace or task))

    def arguments(
        self, key: str, *, task: str | None = None, namespace: str | None = None
    ) -> Mapping[str, Any] | None:
        """The ``args`` and ``kwargs`` in the stored message of the record of *key*, as JSON values;
        ``None`` if the record has no message. Secrets among the arguments are not redacted.

        Raises :class:`~celery_leases.errors.StoreUnavailable`, and
        :class:`~celery_leases.errors.RecordUnreadable` for a message that cannot be read.
        """
        self._ready()
        record = self._records.read(self._stored(key, namespace or task), lenient=True)
        if record is None or record.message is None:
            return None
        try:
            message = json.loads(record.message)
            return {"args": message["args"], "kwargs": message["kwargs"]}
        except (ValueError, TypeError, KeyError):
            raise RecordUnreadable(
                f"{key}: its message cannot be read", False, key, "message"
            ) from None

    def stats(self, *, rules: bool = True) -> Stats:
        """Counts by task and state, failures by rule (unless *rules* is ``False``), groups that are
        not open, and saved runs if processes count them. Reads every record.
        """
        self._ready()
        rows = self._records.counts()
        counts = {
            (row["task"], row["state"]): (int(row["count"]), int(row["oldest"])) for row in rows
        }
        trouble: str | None = None
        gates: Sequence[GroupStatus] = ()
        try:
            gates = self.groups()
            if any(state == State.RUNNING for _, state in counts):
                self._separate_abandoned(counts)
        except StoreUnavailable as error:
            trouble = f"the lease store does not answer: {error}"
        by_rule = self._records.failures() if rules else Counter[tuple[str, str]]()
        return Stats(
            [
                StateCount(task, state, count, datetime.fromtimestamp(oldest / 1e6, UTC))
                for (task, state), (count, oldest) in sorted(counts.items())
            ],
            [RuleCount(rule, reason, count) for (rule, reason), count in by_rule.most_common()],
            gates,
            trouble,
            self._saved_runs(),
        )

    def _saved_runs(self) -> Sequence[SavedRuns] | None:
        """The saved runs that all processes have counted, by task, the most first; ``None`` if none
        was ever counted, and ``leases_metrics`` is not set.
        """
        counts = open_metrics(self._records).read()
        if not counts.begun and not (
            self._components is not None and self._components.settings.metrics
        ):
            return None
        found: Counter[str] = Counter()
        dropped: Counter[str] = Counter()
        for (name, *labels), count in counts.tally.counts.items():
            if name == "saved_runs":
                task, how = labels
                found[task] += count
                dropped[task] += count if how == "dropped" else 0
        return [
            SavedRuns(task, count - dropped[task], dropped[task])
            for task, count in found.most_common()
        ]

    def run_times(
        self, *, task: str | None = None, limit: int = 5_000
    ) -> Mapping[str, Sequence[float]]:
        """The run times of the latest *limit* finished runs of each task, in seconds, by task.

        Only the last run of a key is included. Reads every record.
        """
        self._ready()
        return self._records.run_times(task, limit)

    def latencies(self, rounds: int = 100) -> tuple[Sequence[float], Sequence[float]]:
        """The times of *rounds* round trips from here to the lease store, and to the database, in
        seconds. Raises :class:`~celery_leases.errors.StoreUnavailable`.
        """
        self._ready()
        key = stored_key("celery_leases.latency", uuid4().hex)
        calls: tuple[Callable[[], object], ...] = (
            partial(self._leases.holder, key),
            self._records.now,
        )
        store, database = (_round_trips(call, rounds) for call in calls)
        return store, database

    def lateness(self, *, task: str | None = None) -> Lateness | None:
        """How late the renewals of all tasks, or of *task*, were sent, as counted by all processes;
        ``None`` if none was counted, for example because ``leases_metrics`` is not set.
        """
        self._ready()
        metric = METRICS["renewal_lateness"]
        spans = open_metrics(self._records).read().tally.spans
        found = [
            span[:-1]
            for (name, of_task), span in spans.items()
            if name == metric.name and task in (None, of_task)
        ]
        return Lateness.of(metric.buckets, [sum(counts) for counts in zip(*found, strict=True)])

    def examine(self) -> Examination:
        """Examine the settings, tasks, broker and stores of the app: what is wrong, and what to
        write instead.

        See ``leases doctor``. Needs a client made by :meth:`from_app`. A server that does not
        answer is a finding, and raises no error.
        """
        app = self._app("examine")
        from celery_leases.worker.checks import doctor

        return doctor.examine(app)

    def _separate_abandoned(self, counts: dict[tuple[str, str], tuple[int, int]]) -> None:
        """Count running rows without a live lease as abandoned."""
        for task, state in [*counts]:
            if state != State.RUNNING:
                continue
            running, oldest = counts.pop((task, state))
            starts = [
                status.started_at
                for status in self.matching(RecordFilter(states=(ABANDONED,), task=task))
            ]
            abandoned = [round(start.timestamp() * 1e6) for start in starts if start is not None]
            if abandoned:
                counts[task, ABANDONED] = len(abandoned), min(abandoned)
            if running > len(abandoned):
                counts[task, state] = running - len(abandoned), oldest

    def purge(
        self,
        wanted: RecordFilter = EVERY_RECORD,
        *,
        older: Duration | datetime | None = None,
        batch: int = PURGE_BATCH,
    ) -> Iterator[int]:
        """Delete records in batches; yields how many records each batch has deleted.

        Without *older*: all records whose retention is over. With *older*: the wanted records that
        have not changed for that long, or since that datetime, even if their retention is not over.
        A later copy of a deleted call runs its body again. Records that run, or whose message must
        still be published, are never deleted; ``uncertain`` records only if *wanted* names that
        state.
        """
        self._ready()
        if older is None:
            while (deleted := self._records.purge(batch)) > 0:
                yield deleted
            return
        wanted, after = self.purgeable(wanted, older), ""
        while True:
            deleted, last = self._records.delete_unmoved(wanted, batch, after)
            if deleted:
                yield deleted
            if last is None:
                return
            after = last

    def purgeable(
        self, wanted: RecordFilter = EVERY_RECORD, older: Duration | datetime | None = None
    ) -> RecordFilter:
        """A filter for the records that :meth:`purge` deletes.

        To delete later what is counted now, pass both the same datetime as *older*, see
        :meth:`so_long_ago`. Raises :class:`~celery_leases.errors.LeaseConfigurationError` for a
        filter that purge does not support.
        """
        self._ready()
        now = self._records.now()
        if older is None:
            return RecordFilter(expired_at=now)
        if not wanted.decided_by_columns:
            raise LeaseConfigurationError(
                f"purge: {', '.join(wanted.states) or wanted.reason} cannot be purged; take states that have ended"
            )
        before = (
            older.timestamp() * 1e6
            if isinstance(older, datetime)
            else now - seconds(older, "older") * 1e6
        )
        return replace(
            wanted,
            states=wanted.states or PURGED,
            unmoved_since=round(before),
            published=True,
        )

    def so_long_ago(self, span: Duration) -> datetime:
        """The time *span* before now, by the database's clock."""
        self._ready()
        return datetime.fromtimestamp(self._records.now() / 1e6 - seconds(span, "older"), UTC)

    def _statuses(
        self, records: Sequence[Record], wanted: RecordFilter
    ) -> Iterator[tuple[Record, LeaseStatus]]:
        """The records with their statuses, for which the lease store is read if needed. The status
        of a live record has only its state if that state is not *wanted*.
        """
        gates: dict[str, Gate | None] = {}
        trouble: str | None = None
        live: set[str] = set()
        if ABANDONED in wanted.states and State.RUNNING not in wanted.states:
            running = [record.stored_key for record in records if record.state is State.RUNNING]
            with suppress(StoreUnavailable):  # the first holder that is read reports it
                live = self._leases.held(running) if running else set()
        for record in records:
            if record.stored_key in live:
                yield record, LeaseStatus(record.key, record.task, State.RUNNING.value)
                continue
            now, holder, gate = record, None, None
            group = record.failure.group if record.failure is not None else None
            try:
                if trouble is None and record.state is State.RUNNING:
                    holder = self._leases.holder(record.stored_key)
                    if holder is None:  # it may have ended between the two reads
                        now = self._records.read(record.stored_key, lenient=True) or record
                elif (
                    trouble is None
                    and group is not None
                    and record.state in (State.PENDING, State.COOLING)
                ):
                    if group not in gates:
                        gates[group] = self._leases.gate(group)
                    gate = gates[group]
            except StoreUnavailable as error:
                trouble = f"the lease store does not answer: {error}"
            needed = record.state in (State.RUNNING, State.PENDING, State.COOLING)
            yield (
                record,
                status_of(
                    record.key,
                    record.task,
                    now,
                    holder,
                    gate=gate,
                    trouble=trouble if needed else None,
                    wall_time=self._wall_time(),
                ),
            )

    def retry(
        self,
        key: str,
        *,
        task: str | None = None,
        namespace: str | None = None,
        force: bool = False,
        retention: Duration | None = None,
    ) -> LeaseStatus:
        """End the wait of a key, or let a ``failed`` key run again. Its counts of failures, crashes
        and cooldowns are reset.

        This publishes nothing. If ``resumes`` is true, a copy of the call waits at the broker and
        is delivered when its countdown ends; otherwise call the task again. The gate of a cooldown
        group is not opened, see :meth:`open_group`. The record counts for *retention* from now, by
        default the task's ``lease_retention``.

        Raises :class:`~celery_leases.errors.LeaseIsLive` if an attempt holds the key, or if the key
        has changed meanwhile, unless *force*; :class:`~celery_leases.errors.AlreadyDone` and
        :class:`~celery_leases.errors.UnknownKey`.
        """
        return self._reset(
            key, namespace or task, keep=True, forgive=True, force=force, retention=retention
        )

    def release(
        self,
        key: str,
        *,
        task: str | None = None,
        namespace: str | None = None,
        retention: Duration | None = None,
    ) -> LeaseStatus:
        """Take the key from the attempt that holds it, whose outcome is refused from now on.

        Counts and history stay. The record counts for *retention* from now, by default the task's
        ``lease_retention``. Raises :class:`~celery_leases.errors.UnknownKey`.
        """
        return self._reset(key, namespace or task, keep=True, force=True, retention=retention)

    def forget(
        self,
        key: str,
        *,
        task: str | None = None,
        namespace: str | None = None,
        force: bool = False,
        retention: Duration | None = None,
    ) -> LeaseStatus:
        """Make the record of the key empty: without result, failures, counts and history.

        With ``lease_on_done="rerun"``, effects that the call has done stay done. The empty record
        counts for *retention*, by default the task's ``lease_retention``.

        Raises :class:`~celery_leases.errors.LeaseIsLive` if an attempt holds the key, or if the key
        has changed meanwhile, unless *force*; and :class:`~celery_leases.errors.UnknownKey`.
        """
        return self._reset(key, namespace or task, keep=False, force=force, retention=retention)

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
        found: LeaseStatus | None = None,
    ) -> LeaseStatus:
        """Write what an operator has found out about a key, which is usually ``uncertain``.

        ``"done"``: the work is done; later callers get *result* (JSON) for *retention*, by default
        the task's ``lease_retention``. ``"retry"``: its effects without a reply have not happened,
        and the key may run again; nothing is published. With *found*, the status that the operator
        has seen, a key whose fence or state is another one now is not changed.

        Raises :class:`~celery_leases.errors.LeaseIsLive` for such a key, and if an attempt holds
        the key, unless *force*; :class:`~celery_leases.errors.AlreadyDone`,
        :class:`~celery_leases.errors.UnknownKey`, and :class:`~celery_leases.errors.LeaseMisuse`
        for a result that is not JSON.
        """
        if outcome not in ("done", "retry"):
            raise LeaseMisuse(f"resolve({outcome!r}): write 'done' or 'retry'")
        text, missing = encode(result, NO_LIMIT) if result is not None else (None, None)
        if missing is not None:
            raise LeaseMisuse(f"resolve(result={result!r}): {missing}")
        if outcome == "retry":
            return self._reset(
                key,
                namespace or task,
                keep=True,
                forgive=True,
                force=force,
                retention=retention,
                undone=True,
                found=found,
            )
        stored = self._stored(key, namespace or task)
        record, holder = self._read(stored, key, force=force)
        if found is not None and not _is_unchanged(record, found):
            raise self._has_changed(key, stored)
        if record is None:
            raise UnknownKey(f"there is no record for {key}", key)
        if record.state is State.DONE:
            raise AlreadyDone(f"{key} is already done", key, record.call_id)
        seen = None if force and found is None else record
        if not self._records.resolve(stored, text, _span(retention), seen):
            raise self._has_changed(key, stored)
        self._leases.end_cooldown(stored)
        if holder is not None:
            self._leases.release(stored, holder.token)
        return self.status(stored)

    # -- cooldown groups ---------------------------------------------------------------------------

    def groups(self, *, opened: bool = False) -> Sequence[GroupStatus]:
        """The cooldown groups whose gate is not open; with *opened* also groups with an open gate
        that was closed in the last 30 days.
        """
        self._ready()
        gates = [*self._leases.gates()]
        past = self._past_closings(None if opened else [gate.group for gate in gates])
        found = [
            status_of_group(gate, self._wall_time(), past.get(gate.group, ())) for gate in gates
        ]
        not_open = {gate.group for gate in gates}
        return found + [
            status_of_open_group(group, each)
            for group, each in sorted(past.items())
            if group not in not_open
        ]

    def group(self, group: str) -> GroupStatus:
        """The status of one cooldown group. Raises :class:`~celery_leases.errors.KeyUnusable` for a
        blank name.
        """
        _check_group(group)
        self._ready()
        return self._group(group, self._leases.gate(group))

    def _group(self, group: str, gate: Gate | None) -> GroupStatus:
        past = self._past_closings([group]).get(group, ())
        if gate is None:
            return status_of_open_group(group, past)
        return status_of_group(gate, self._wall_time(), past)

    def _past_closings(self, groups: Sequence[str] | None) -> Mapping[str, Sequence[PastClosing]]:
        """The closings that the lease store has stored, if it stores them."""
        store: object = self._leases
        if not isinstance(store, ClosingStore) or (groups is not None and not groups):
            return {}
        return store.past_closings(groups)

    def open_group(self, group: str) -> bool:
        """Open the gate of *group*, delete its trips, and end the waits of the keys that failed
        because of the group; returns whether the gate was not open.

        Copies that wait at the broker are delivered when their countdowns end. Raises
        :class:`~celery_leases.errors.KeyUnusable` for a blank name.
        """
        _check_group(group)
        self._ready()
        opened = self._leases.open_gate(group)
        self._records.end_waits(group)
        return opened

    def close_group(self, group: str, span: Duration, why: str = "") -> GroupStatus:
        """Close the gate of *group* for *span* (seconds, ``"5m"``, a timedelta); a gate that is
        closed for longer stays so.

        The first attempt after that is a probe, as after a failure of the group. Raises
        :class:`~celery_leases.errors.KeyUnusable` for a blank name.
        """
        _check_group(group)
        self._ready()
        policy = CooldownPolicy.of(span, "close_group: span")
        closing = Closing(policy, Reason.ASKED, OPERATOR, redact(why), server_delay=policy.base)
        return self._group(group, self._leases.close_gate(group, closing, OPERATOR))

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
                record = self._records.read(
                    stored, lenient=True
                )  # it may have ended between the two reads
            gate = (
                self._leases.gate(group)
                if group is not None and waiting and holder is None
                else None
            )
        except StoreUnavailable as error:
            trouble = f"the lease store does not answer: {error}"
        wall_time = self._wall_time()
        return status_of(
            key,
            task,
            record,
            holder,
            gate=gate,
            effects=effects,
            trouble=trouble,
            wall_time=wall_time,
        )

    def _reset(
        self,
        key: str,
        namespace: str | None,
        *,
        keep: bool,
        forgive: bool = False,
        force: bool = False,
        retention: Duration | None = None,
        undone: bool = False,
        found: LeaseStatus | None = None,
    ) -> LeaseStatus:
        stored = self._stored(key, namespace)
        self._reset_record(
            stored,
            key,
            keep=keep,
            forgive=forgive,
            force=force,
            retention=_span(retention),
            undone=undone,
            found=found,
        )
        return self.status(stored)

    def _reset_record(
        self,
        stored: str,
        key: str,
        *,
        keep: bool,
        forgive: bool = False,
        force: bool = False,
        retention: float | None = None,
        undone: bool = False,
        found: LeaseStatus | None = None,
    ) -> Record | None:
        """Reset the record of the *stored* key, which errors call *key*. Returns the record after
        that, or ``None`` if there is only a lease.
        """
        record, holder = self._read(stored, key, force=force, lenient=not keep)
        if found is not None and not _is_unchanged(record, found):
            raise self._has_changed(key, stored)
        if record is None and holder is None:
            raise UnknownKey(f"there is neither a lease nor a record for {key}", key)
        if forgive and record is not None and record.state is State.DONE and not record.expired:
            message = f"{key} is done, there is nothing to retry; `leases forget` lets it run again"
            raise AlreadyDone(message, key, record.call_id)
        # The row is changed first: a holder that loses only its lease could still write its
        # outcome.
        if record is not None and (not keep or forgive or record.state is State.RUNNING):
            seen = None if (force and found is None) or record.unreadable is not None else record
            changed = self._records.reset(
                stored, keep=keep, forgive=forgive, retention=retention, seen=seen
            )
            if changed is None and (found is not None or not force):
                raise self._has_changed(key, stored)
        else:
            changed = record
        if undone and record is not None:
            self._effects.forget_sent(record)
        if holder is not None:
            self._leases.release(stored, holder.token)
        elif forgive or not keep:
            self._leases.end_cooldown(stored)
        return changed

    def _read(
        self, stored: str, key: str, *, force: bool, lenient: bool = False
    ) -> tuple[Record | None, Holder | None]:
        """The record of the *stored* key, and its holder; raises :class:`LeaseIsLive` for a holder,
        unless *force*, and :class:`RecordUnreadable` unless *lenient*.

        The record is read first. So a claim between the two reads is noticed: by its lease, or by
        its fence when the record is written.
        """
        record = self._records.read(stored, lenient=lenient)
        holder = self._leases.holder(stored)
        if holder is not None and not force:
            raise LeaseIsLive(
                f"{key} is held by {holder.host} (call {holder.call_id}) for another {holder.remaining:.1f} s; "
                "wait, or repeat with force=True (on the command line --force)",
                key,
                holder.remaining,
            )
        return record, holder

    def _has_changed(self, key: str, stored: str) -> LeaseIsLive:
        now, holder = self._records.read(stored, lenient=True), self._leases.holder(stored)
        state = now.state.value if now is not None else "deleted"
        message = f"{key} has changed meanwhile, and is {state} now; nothing was done: read its status first"
        return LeaseIsLive(message, key, holder.remaining if holder is not None else 0.0)

    def _stored(self, key: str, namespace: str | None) -> str:
        self._ready()
        if namespace is not None:
            return stored_key(namespace, key)
        if key.startswith("t:") and "|" in key:
            return key
        named = self._of_tasks_of_app(key) or self._records.named(key)
        if len(named) > 1:
            tasks = ", ".join(sorted(record.task for record in named))
            raise UnknownKey(f"{key} is a key of several tasks ({tasks}); say which", key)
        return named[0].stored_key if named else stored_key("", key)

    def _of_tasks_of_app(self, key: str) -> builtins.list[Record]:
        """The records of *key* of the app's tasks. These are found by their stored keys; a search
        for a key of other tasks reads all records.
        """
        stored_keys = self._stored_keys_of_app(key)
        return self._records.of_keys(stored_keys) if stored_keys else []

    def _stored_keys_of_app(self, key: str) -> set[str]:
        """The stored keys that *key* has for the app's tasks."""
        if self._components is None:
            return set()
        from celery_leases.worker.app_settings import leased_tasks

        tasks = leased_tasks(self._components.app).items()
        namespaces = {task.lease_options.namespace or name for name, task in tasks}
        return {stored_key(each, key) for each in namespaces}


def _round_trips(call: Callable[[], object], rounds: int) -> tuple[float, ...]:
    """The times of *rounds* calls, in seconds."""
    call()  # the first call may open a connection
    times = [perf_counter()]
    for _ in range(rounds):
        call()
        times.append(perf_counter())
    return tuple(after - before for before, after in pairwise(times))


def _is_unchanged(record: Record | None, found: LeaseStatus) -> bool:
    """Whether *record* still has the fence and the state of *found*."""
    if record is None or record.fence != found.fence:
        return False
    if found.state == UNREADABLE:
        return record.unreadable is not None
    return record.state == (State.RUNNING.value if found.state == ABANDONED else found.state)


def _check_group(group: str) -> None:
    """Refuse a name that ``lease_cooldown_group`` cannot make."""
    if not group.strip():
        raise KeyUnusable(
            f"group={group!r} is blank; write the name of a cooldown group, such as 'openai:gpt-5'"
        )


def _span(retention: Duration | None) -> float | None:
    return seconds(retention, "retention") if retention is not None else None
