"""Status and repair from outside: for operators, and for web processes that import no task."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from itertools import pairwise
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, Literal, Self
from uuid import uuid4

from celery_leases.common.durations import Duration, seconds
from celery_leases.common.redaction import redact
from celery_leases.composition import (
    AnyStore,
    lease_store,
    open_effects,
    open_metrics,
    open_records,
)
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
from celery_leases.protocol.closings import PastClosing
from celery_leases.protocol.effects import Effect
from celery_leases.protocol.filters import Order, Position, RecordFilter
from celery_leases.protocol.findings import Examination, Finding
from celery_leases.protocol.groups import Closing, Gate
from celery_leases.protocol.keys import stored_key
from celery_leases.protocol.metrics import METRICS
from celery_leases.protocol.operator_values import (
    Change,
    Page,
    RuleCount,
    SavedRuns,
    StateCount,
    Stats,
    why_unchanged,
)
from celery_leases.protocol.ports import ClosingStore, Holder
from celery_leases.protocol.records import Record, State
from celery_leases.protocol.results import NO_LIMIT, encode
from celery_leases.protocol.status import (
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
from celery_leases.protocol.tuning import Lateness
from celery_leases.settings import read_settings

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

    from celery_leases.stores.sql.records import SqlRecordStore
    from celery_leases.worker.app_components import AppParts
    from celery_leases.worker.outbox import Round

LOOK_THROUGH = 10_000
OPERATOR = "operator"
AT_ONCE: Final = 500
PURGED_AT_ONCE: Final = 1000
PURGED: Final = (State.PENDING.value, State.DONE.value, State.COOLING.value, State.FAILED.value)
"""What :meth:`LeaseClient.purge` deletes with ``older``, unless it is told which states."""
EVERY_RECORD: Final = RecordFilter()


class LeaseClient:
    """Looks at keys and repairs them, given the two URLs a worker has in ``leases_url`` and
    ``leases_database_url``.

    *prefix*, *schema* and *transport_options* are those of the workers, if they have any. A process
    that has the Celery app takes :meth:`from_app`. Close it, or use it as a context manager.
    """

    _parts: AppParts | None = None
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
        """The client of a Celery *app*, on the stores that its calls use, over the connections of
        the app itself.

        They are the stores that its settings name, and under ``task_always_eager`` those of its
        eager calls, in memory unless ``leases_eager_stores`` is set. *eager* says which ones,
        whatever that setting says.
        """
        from celery_leases.worker import app_components

        parts = app_components.parts_of(app, eager=eager)
        if parts.client is None:
            client = cls.on(parts.leases, parts.records)
            client._parts, client._wall_time = parts, parts.context.wall_time  # noqa: SLF001 - as in a constructor
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
        """Let the connections go, unless they are those of an app; the next call would open new
        ones.
        """
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
        """Publish enqueued messages that are due: those whose own process died after the commit. At
        most *limit*.

        What it returns has the records ``published`` and ``refused`` by the broker, and is true if
        any was published. Only a client :meth:`from_app` can publish; any other raises
        :class:`~celery_leases.errors.LeaseConfigurationError`. Raises
        :class:`~celery_leases.errors.StoreUnavailable`. A message the broker does not confirm is
        due again later.
        """
        from celery_leases.worker import outbox

        return outbox.relay(self._app("relay"), limit)

    def rescue(self, *, older: Duration = "15m", limit: int = 100) -> Round:
        """Publish again the messages of records that no worker has, and that have not changed for
        *older*.

        See ``leases rescue``. Raises as :meth:`relay` does.
        """
        from celery_leases.worker import outbox

        return outbox.rescue(self._app("rescue"), older=seconds(older, "older"), limit=limit)

    def _app(self, what: str) -> Celery:
        if self._parts is None:
            raise LeaseConfigurationError(
                f"{what}() needs the Celery app: take LeaseClient.from_app(app)"
            )
        return self._parts.app

    def status(
        self,
        key: str,
        *,
        task: str | None = None,
        namespace: str | None = None,
        group: str | None = None,
    ) -> LeaseStatus:
        """Where *key* stands. *namespace* is the task's ``lease_namespace``, by default its name,
        *task*.

        Neither is needed for a key that has one record, or that is given as it is stored
        (``t:namespace|key``). *group* is its cooldown group, for a key that has not failed of it
        itself. A key without a record is ``absent``. Raises
        :class:`~celery_leases.errors.StoreUnavailable` when the records do not answer; when only
        the lease store does not, ``reason`` says so.
        """
        self._ready()
        stored = self._stored(key, namespace or task)
        record = self._records.read(stored, lenient=True)
        record = record if record is None or not record.expired else None
        effects = self._effects.of_key(record) if record is not None else ()
        return self._status(key, task, stored, record, group, effects)

    def list(
        self, *, states: Sequence[str] = (), task: str | None = None, limit: int = 100
    ) -> list[LeaseStatus]:
        """The keys with a record, the latest started first.

        ``abandoned`` and ``unreadable`` may be asked for like any other state. See :meth:`page` for
        more.
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
        """A filter for :meth:`page`, :meth:`matching`, :meth:`how_many` and :meth:`purge`: all that
        is given holds.

        *group* is the cooldown group of the last failure, *prefix* what the key begins with,
        *reason* a code as in ``LeaseStatus.reason``. *since* and *until* are about the start of the
        latest attempt: a datetime, or a span before now. *crashed*: its process died in the latest
        attempts. Raises :class:`~celery_leases.errors.LeaseMisuse` for an unknown state.
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
        """At most *limit* records, the latest started or the longest run first; *after* is ``next``
        of another page.

        Looks through 10,000 records at most, where the row does not say of itself whether it is
        wanted. Raises :class:`~celery_leases.errors.LeaseConfigurationError` for an *after* that is
        none.
        """
        self._ready()
        ordered, place = Order(order), Position.read(after) if after is not None else None
        found: list[LeaseStatus] = []
        looked, size = 0, min(limit, AT_ONCE)
        while True:
            records = self._records.find(wanted, order=ordered, limit=size, after=place)
            for number, (record, status) in enumerate(self._statuses(records), 1):
                place = Position.of(record, ordered)
                if wanted.admits(record, status.state):
                    found.append(status)
                if len(found) == limit:
                    more = number < len(records) or len(records) == size
                    return Page(found, place.token() if more else None)
            looked += len(records)
            if len(records) < size or place is None:
                return Page(found, None)
            if looked >= LOOK_THROUGH:
                return Page(found, place.token())
            size = LOOK_THROUGH - looked

    def matching(self, wanted: RecordFilter = EVERY_RECORD) -> Iterator[LeaseStatus]:
        """All records that are wanted, by their keys; read in pages, so that any number of them
        takes little memory.
        """
        self._ready()
        place: Position | None = None
        while True:
            records = self._records.find(wanted, order=Order.KEY, limit=AT_ONCE, after=place)
            for record, status in self._statuses(records):
                if wanted.admits(record, status.state):
                    yield status
            if len(records) < AT_ONCE:
                return
            place = Position.of(records[-1], Order.KEY)

    def how_many(self, wanted: RecordFilter = EVERY_RECORD) -> int:
        """How many records are wanted; one statement, or a look at each where the row does not
        say.
        """
        self._ready()
        return (
            self._records.how_many(wanted)
            if wanted.decided_by_columns
            else sum(1 for _ in self.matching(wanted))
        )

    def as_of_now(self, wanted: RecordFilter) -> RecordFilter:
        """*wanted* without what changes from now on, by the database's clock."""
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
        """Do *what* to each key that was *found*, if it is still as it was found; what became of
        each, as it happens.

        A key that has changed, is held by a live lease (unless *force*), or is done already is left
        as it is, and its :class:`Change` says why. *publish* publishes the message that a retried
        record keeps, see :meth:`publish`. Raises :class:`~celery_leases.errors.StoreUnavailable`;
        the keys before are changed then.
        """
        span = _span(retention)
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
            after = self._take(
                stored,
                None,
                keep=what != "forget",
                forgive=what == "retry",
                force=force or (what == "release" and seen.state != ABANDONED),
                retention=retention,
                found=seen,
            )
        except (LeaseIsLive, AlreadyDone, UnknownKey, RecordUnreadable) as error:
            return Change(seen, False, str(error))
        return Change(
            after, True, published=self.publish(stored) if publish and what == "retry" else None
        )

    def publish(
        self, key: str, *, task: str | None = None, namespace: str | None = None
    ) -> bool | None:
        """Publish the message that the record of *key* keeps, so that the call runs now; ``None``:
        it keeps none.

        Tasks with ``lease_store_arguments``, and enqueued calls, keep it. ``False``: the broker did
        not confirm it, and the next relay tries again. A copy that waits at the broker meanwhile
        does no harm. Only a client :meth:`from_app` can publish. Raises as :meth:`relay` does.
        """
        from celery_leases.worker import outbox

        app = self._app("publish")
        self._ready()
        return outbox.publish_stored(app, self._stored(key, namespace or task))

    def arguments(
        self, key: str, *, task: str | None = None, namespace: str | None = None
    ) -> Mapping[str, Any] | None:
        """The ``args`` and ``kwargs`` in the message that the record of *key* keeps, as JSON has
        them; ``None``: it keeps none. Nothing is redacted.

        Raises :class:`~celery_leases.errors.StoreUnavailable`, also for a message that cannot be
        read.
        """
        self._ready()
        record = self._records.read(self._stored(key, namespace or task), lenient=True)
        if record is None or record.message is None:
            return None
        try:
            kept = json.loads(record.message)
            return {"args": kept["args"], "kwargs": kept["kwargs"]}
        except (ValueError, TypeError, KeyError):
            raise RecordUnreadable(
                f"{key}: its message cannot be read", False, key, "message"
            ) from None

    def stats(self, *, rules: bool = True) -> Stats:
        """Counts by task and state, failures by rule unless *rules* is ``False``, the groups that
        are not open, and the runs saved if processes count them. Looks at every record.
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
                self._tell_abandoned(counts)
        except StoreUnavailable as error:
            trouble = f"the lease store does not answer: {error}"
        failures = self._records.errors() if rules else ()
        by_rule = Counter((failure.rule or "", failure.reason or "") for failure in failures)
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
        """The runs that all processes have counted as saved, by task, the most first; ``None``:
        nothing has ever counted, and the app does not say that it is to.
        """
        counts = open_metrics(self._records).read()
        if not counts.begun and not (self._parts is not None and self._parts.settings.metrics):
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
        """What the latest *limit* finished runs of each task took, in seconds, by task.

        Of a key with several runs the last one counts. Looks at every record.
        """
        self._ready()
        return self._records.run_times(task, limit)

    def latencies(self, rounds: int = 100) -> tuple[Sequence[float], Sequence[float]]:
        """How long *rounds* small questions to the lease store, and to the database, have taken
        from here, in seconds. Raises :class:`~celery_leases.errors.StoreUnavailable`.
        """
        self._ready()
        key = stored_key("celery_leases.latency", uuid4().hex)
        questions: tuple[Callable[[], object], ...] = (
            partial(self._leases.holder, key),
            self._records.now,
        )
        store, database = (_taken(question, rounds) for question in questions)
        return store, database

    def lateness(self, *, task: str | None = None) -> Lateness | None:
        """How late the renewals of all tasks, or of *task*, were sent, as all processes have
        counted; ``None`` without a count, as where ``leases_metrics`` is off.
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
        """Look at the app's settings, tasks, broker and stores: what is wrong, and what to write.

        See ``leases doctor``. Only a client :meth:`from_app` can. A server that is away is a
        finding, and no error.
        """
        app = self._app("examine")
        from celery_leases.worker import doctor

        return doctor.examine(app)

    def _tell_abandoned(self, counts: dict[tuple[str, str], tuple[int, int]]) -> None:
        """Count running rows without a live lease apart."""
        for task, state in [*counts]:
            if state != State.RUNNING:
                continue
            running, oldest = counts.pop((task, state))
            starts = [
                status.started_at
                for status in self.matching(RecordFilter(states=(ABANDONED,), task=task))
            ]
            gone = [round(start.timestamp() * 1e6) for start in starts if start is not None]
            if gone:
                counts[task, ABANDONED] = len(gone), min(gone)
            if running > len(gone):
                counts[task, state] = running - len(gone), oldest

    def purge(
        self,
        wanted: RecordFilter = EVERY_RECORD,
        *,
        older: Duration | datetime | None = None,
        batch: int = PURGED_AT_ONCE,
    ) -> Iterator[int]:
        """Delete records in batches; how many each batch has deleted, as it happens.

        Without *older* those whose retention is over, whatever is *wanted*. With it those that are
        wanted and have not changed for that long, or since that moment, however long they would
        still count: a later copy of such a call runs its body again. Never one that runs, or whose
        message is still to be published. Those that are ``uncertain`` only if they are asked for.
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
        """What :meth:`purge` would delete; raises LeaseConfigurationError for what it cannot.

        To delete later what is counted now, give both the same moment as *older*:
        :meth:`so_long_ago`.
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
        return replace(wanted, states=wanted.states or PURGED, unmoved_since=round(before))

    def so_long_ago(self, span: Duration) -> datetime:
        """The moment *span* before now, by the database's clock."""
        self._ready()
        return datetime.fromtimestamp(self._records.now() / 1e6 - seconds(span, "older"), UTC)

    def _statuses(self, records: Sequence[Record]) -> Iterator[tuple[Record, LeaseStatus]]:
        """The records with their statuses; the lease store is asked for the holders of those that
        run.
        """
        gates: dict[str, Gate | None] = {}
        trouble: str | None = None
        for record in records:
            now, holder, gate = record, None, None
            group = record.failure.group if record.failure is not None else None
            try:
                if trouble is None and record.state is State.RUNNING:
                    holder = self._leases.holder(record.stored_key)
                    if holder is None:  # it may have ended between the two looks
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
            asked = (
                trouble if record.state in (State.RUNNING, State.PENDING, State.COOLING) else None
            )
            yield (
                record,
                status_of(
                    record.key,
                    record.task,
                    now,
                    holder,
                    gate=gate,
                    trouble=asked,
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
        """End a cooldown or a countdown, or revive a ``failed`` key; failures, crashes and growth
        start anew.

        This publishes nothing. If ``resumes`` is true, a copy of the call waits at the broker and
        is delivered when its countdown ends; otherwise call the task again. The gate of a cooldown
        group stays as it is, see :meth:`open_group`. The record counts for *retention* from now, by
        default the task's ``lease_retention``. Raises :class:`~celery_leases.errors.LeaseIsLive`
        while somebody runs it, or if somebody has come meanwhile, unless *force*,
        :class:`~celery_leases.errors.AlreadyDone` and :class:`~celery_leases.errors.UnknownKey`.
        """
        return self._take(
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
        """Take the key away from whoever holds it: what a holder still says about the outcome is
        refused from now on.

        Counts and history stay, and the record counts for *retention* from now, by default the
        task's. Raises :class:`~celery_leases.errors.UnknownKey`.
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

        Under ``rerun`` a call that is forgotten so may run again, but finds the effects it has
        made. The empty record counts for *retention*, by default the task's. Raises
        :class:`~celery_leases.errors.LeaseIsLive` while somebody runs it, or if somebody has come
        meanwhile, unless *force*, and :class:`~celery_leases.errors.UnknownKey`.
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
        found: LeaseStatus | None = None,
    ) -> LeaseStatus:
        """Say of a key what an operator has found out, above all of an ``uncertain`` one.

        ``"done"``: the work is done; later callers get *result* (JSON) for *retention*, by default
        the task's ``lease_retention``. ``"retry"``: the effects in doubt have not happened; it may
        run again, and nothing is queued by this. *found* is the status that the operator has seen:
        a key that another attempt has had since, or that is in another state, is not changed.
        Raises :class:`~celery_leases.errors.LeaseIsLive` for such a key, and while somebody runs
        it, unless *force*, :class:`~celery_leases.errors.AlreadyDone`,
        :class:`~celery_leases.errors.UnknownKey`, and :class:`~celery_leases.errors.LeaseMisuse`
        for a result that is no JSON.
        """
        if outcome not in ("done", "retry"):
            raise LeaseMisuse(f"resolve({outcome!r}): write 'done' or 'retry'")
        text, missing = encode(result, NO_LIMIT) if result is not None else (None, None)
        if missing is not None:
            raise LeaseMisuse(f"resolve(result={result!r}): {missing}")
        if outcome == "retry":
            return self._take(
                key,
                namespace or task,
                keep=True,
                forgive=True,
                force=force,
                retention=retention,
                undone=True,
                found=found,
            )
        stored, record, holder = self._look(key, namespace or task, force=force)
        if found is not None and not _is_as_found(record, found):
            raise self._moved_on(key, stored)
        if record is None:
            raise UnknownKey(f"there is no record for {key}", key)
        if record.state is State.DONE:
            raise AlreadyDone(f"{key} is done already", key, record.call_id)
        seen = None if force and found is None else record
        if not self._records.resolve(stored, text, _span(retention), seen):
            raise self._moved_on(key, stored)
        self._leases.end_cooldown(stored)
        if holder is not None:
            self._leases.release(stored, holder.token)
        return self.status(stored)

    # -- cooldown groups ---------------------------------------------------------------------------

    def groups(self, *, opened: bool = False) -> Sequence[GroupStatus]:
        """The cooldown groups whose gate is not open; with *opened* also those that are open and
        have been closed in the last 30 days.
        """
        self._ready()
        gates = [*self._leases.gates()]
        past = self._past_closings(None if opened else [gate.group for gate in gates])
        found = [
            status_of_group(gate, self._wall_time(), past.get(gate.group, ())) for gate in gates
        ]
        shut = {gate.group for gate in gates}
        return found + [
            status_of_open_group(group, each)
            for group, each in sorted(past.items())
            if group not in shut
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
        """What the lease store remembers, if it does."""
        store: object = self._leases
        if not isinstance(store, ClosingStore) or (groups is not None and not groups):
            return {}
        return store.past_closings(groups)

    def open_group(self, group: str) -> bool:
        """Open the gate of *group*, forget its trips, and end the waits of the keys that failed of
        it.

        Whether it was closed. Copies that wait at the broker are delivered when their countdowns
        end. Raises :class:`~celery_leases.errors.KeyUnusable` for a blank name.
        """
        _check_group(group)
        self._ready()
        opened = self._leases.open_gate(group)
        self._records.end_waits(group)
        return opened

    def close_group(self, group: str, span: Duration, why: str = "") -> GroupStatus:
        """Let no body of *group* start for *span* (seconds, ``"5m"``, a timedelta); a longer
        standing time is not cut.

        The first body after that is a probe, as after any failure of the group. Raises
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
                )  # it may have ended between the two looks
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
        found: LeaseStatus | None = None,
    ) -> LeaseStatus:
        span = _span(retention)
        stored, record, holder = self._look(key, namespace, force=force, lenient=not keep)
        if found is not None and not _is_as_found(record, found):
            raise self._moved_on(found.key, stored)
        if record is None and holder is None:
            raise UnknownKey(f"there is neither a lease nor a record for {key}", key)
        if forgive and record is not None and record.state is State.DONE and not record.expired:
            message = f"{key} is done, there is nothing to retry; `leases forget` lets it run again"
            raise AlreadyDone(message, key, record.call_id)
        # First the fence, then the lease: the other way round a holder could still write its
        # outcome.
        if record is not None and (not keep or forgive or record.state is State.RUNNING):
            seen = None if (force and found is None) or record.unreadable is not None else record
            taken = self._records.reset(
                stored, keep=keep, forgive=forgive, retention=span, seen=seen
            )
            if taken is None and (found is not None or not force):
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
        """The stored key, its record and then its holder; raises :class:`LeaseIsLive` for one,
        unless *force*.

        Raises :class:`RecordUnreadable` too, unless *lenient*. In this order a claim in between is
        seen: by its lease, or else by the fence, once the record is written to.
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


def _taken(ask: Callable[[], object], rounds: int) -> tuple[float, ...]:
    """How long each of *rounds* calls of *ask* took, in seconds."""
    ask()  # the first one may open a connection
    moments = [perf_counter()]
    for _ in range(rounds):
        ask()
        moments.append(perf_counter())
    return tuple(after - before for before, after in pairwise(moments))


def _is_as_found(record: Record | None, found: LeaseStatus) -> bool:
    if record is None or record.fence != found.fence:
        return False
    if found.state == UNREADABLE:
        return record.unreadable is not None
    return record.state == (State.RUNNING.value if found.state == ABANDONED else found.state)


def _check_group(group: str) -> None:
    """Refuse a name that no task's lease_cooldown_group can make."""
    if not group.strip():
        raise KeyUnusable(
            f"group={group!r} is blank; write the name of a cooldown group, such as 'openai:gpt-5'"
        )


def _span(retention: Duration | None) -> float | None:
    return seconds(retention, "retention") if retention is not None else None
