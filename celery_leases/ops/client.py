"""``OperatorClient``: reads, counts and changes many keys, and cooldown groups."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache, partial
from itertools import pairwise
from math import inf
from time import perf_counter
from typing import Any, Final, Literal
from uuid import uuid4

from celery_leases.client import LeaseClient, Write, as_text, unanswered
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
from celery_leases.groups.group import ClosedGroup, Closing
from celery_leases.keys import stored_key
from celery_leases.ops.actions import next_step, why_unchanged
from celery_leases.ops.counts import counted
from celery_leases.ops.filters import filter_of
from celery_leases.ops.reports import Change, Page, RuleCount, SavedRuns, StateCount, Stats
from celery_leases.ops.tuning import Lateness
from celery_leases.record import Record, State
from celery_leases.record_filters import Order, Position, RecordFilter
from celery_leases.status import ABANDONED, GroupStatus, LeaseStatus, status_of
from celery_leases.text.durations import Duration, seconds
from celery_leases.text.redaction import redact
from celery_leases.worker.processes import METRICS_DIRECTORY

LOOK_THROUGH: Final = 10_000
"""Records that are read for one page, at most."""
OPERATOR: Final = "operator"
"""The rule, and the owner token, of a group that an operator has closed."""
BATCH: Final = 500
"""Records that are read by one statement."""
PURGE_BATCH: Final = 1000
"""Records that are deleted by one transaction."""
PURGED: Final = (State.PENDING.value, State.DONE.value, State.COOLING.value, State.FAILED.value)
"""The states that :meth:`OperatorClient.purge` deletes with ``older`` by default."""
EVERY_RECORD: Final = RecordFilter()


class OperatorClient(LeaseClient):
    """A :class:`~celery_leases.client.LeaseClient` that also reads and changes many records."""

    # -- reading -----------------------------------------------------------------------------------

    def where(self, **conditions: Any) -> RecordFilter:
        """A filter for the other methods; all conditions must hold.

        They are *states* (also ``abandoned`` and ``unreadable``), *task*, *group* (the cooldown
        group of the last failure), *prefix* (the beginning of the key), *reason* (a code as in
        ``LeaseStatus.reason``), *since* and *until* (for the start of the latest attempt: a
        datetime, or a duration before now), and *crashed* (the latest attempt crashed); see
        :func:`~celery_leases.ops.filters.filter_of` for the errors.
        """
        return filter_of(conditions)

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
        if wanted.decided_by_columns:
            return self._records.how_many(wanted)
        return sum(1 for _ in self.matching(wanted))

    def as_of_now(self, wanted: RecordFilter) -> RecordFilter:
        """*wanted* without records that change after now, by the database's clock."""
        self._ready()
        return replace(wanted, unmoved_since=self._records.now())

    def _statuses(
        self, records: Sequence[Record], wanted: RecordFilter
    ) -> Iterator[tuple[Record, LeaseStatus]]:
        """The records with their statuses, for which the lease store is read if needed. The status
        of a live record has only its state if that state is not *wanted*.
        """
        closed_group_of, trouble = cache(self._closed_group_of), None
        live: set[str] = set()
        if ABANDONED in wanted.states and State.RUNNING not in wanted.states:
            running = [record.stored_key for record in records if record.state is State.RUNNING]
            with suppress(StoreUnavailable):  # the first holder that is read reports it
                live = self._leases.held(running) if running else set()
        for record in records:
            if record.stored_key in live:
                yield record, LeaseStatus(record.key, record.task, State.RUNNING.value)
                continue
            now: Record | None = record
            holder = closed_group = None
            needed = record.state in (State.RUNNING, State.PENDING, State.COOLING)
            if needed and trouble is None:
                try:
                    if record.state is State.RUNNING:
                        holder = self._leases.holder(record.stored_key)
                    now, closed_group = self._now(
                        record.stored_key, record, holder, None, closed_group_of
                    )
                except StoreUnavailable as error:
                    trouble = unanswered(error)
            status = status_of(
                *(record.key, record.task, now or record, holder),
                closed_group=closed_group,
                trouble=trouble if needed else None,
                wall_time=self._wall_time(),
            )
            yield record, status

    # -- changing ----------------------------------------------------------------------------------

    def change(
        self,
        what: Write,
        found: Iterable[LeaseStatus],
        *,
        force: bool = False,
        retention: Duration | None = None,
        publish: bool = False,
        result: Any = None,
    ) -> Iterator[Change]:
        """Do *what* to each *found* key that has not changed since; yields the
        :class:`~celery_leases.ops.reports.Change` of each.

        A key that has changed, is held by a live lease (unless *force*), or is already done is not
        changed, and its ``Change`` says why. *publish* publishes the stored message of a retried
        record, see :meth:`publish`; *result* is that of ``resolve_done``. After a
        :class:`~celery_leases.errors.StoreUnavailable` the keys before it are changed.
        """
        span = seconds(retention, "retention") if retention is not None else None
        text = as_text(result)
        self._ready()
        for seen in found:
            yield self._changed(what, seen, force, span, publish, text)

    def _changed(
        self,
        what: Write,
        seen: LeaseStatus,
        force: bool,
        retention: float | None,
        publish: bool,
        result: str | None,
    ) -> Change:
        stored = seen.stored_key or seen.key
        if what == "release":
            if (why := why_unchanged(what, seen)) is not None:
                return Change(seen, False, why)
            force = seen.state != ABANDONED
        how: dict[str, Any] = {"force": force, "retention": retention, "result": result}
        try:
            record = self._change(what, seen.key, stored, **how, seen=seen)
        except (LeaseIsLive, AlreadyDone, UnknownKey, RecordUnreadable) as error:
            return Change(seen, False, str(error))
        # What was written is known: asking for it again would take as long as the change.
        after = (
            status_of(record.key, record.task, record, None, wall_time=self._wall_time())
            if record is not None
            else self.status(stored)
        )
        keeps_message = record is None or record.message is not None
        published = self.publish(stored) if publish and what == "retry" and keeps_message else None
        return Change(after, True, None, published, next_step(what, after, published))

    def purgeable(
        self, wanted: RecordFilter = EVERY_RECORD, older: Duration | None = None
    ) -> RecordFilter:
        """The records that :meth:`purge` may delete.

        Without *older*: all whose retention is over. With *older*: the wanted records that have not
        changed for that long before now, even if their retention is not over; ``uncertain`` ones
        only if *wanted* names that state. Records that run, or whose message must still be
        published, are none of them. Raises :class:`~celery_leases.errors.LeaseConfigurationError`
        for a filter that purge does not support.
        """
        self._ready()
        now = self._records.now()
        if older is None:
            return RecordFilter(expired_at=now)
        if not wanted.decided_by_columns:
            raise LeaseConfigurationError(
                f"purge: {', '.join(wanted.states) or wanted.reason} cannot be purged; take states that have ended"
            )
        before = round(now - seconds(older, "older") * 1e6)
        states = wanted.states or PURGED
        return replace(wanted, states=states, unmoved_since=before, published=True)

    def purge(self, doomed: RecordFilter, *, batch: int = PURGE_BATCH) -> Iterator[int]:
        """Delete the records of a filter that :meth:`purgeable` made, in batches; yields how many
        records each batch has deleted. A later copy of a deleted call runs its body again.
        """
        self._ready()
        if doomed.expired_at is not None:
            while (deleted := self._records.purge(batch)) > 0:
                yield deleted
            return
        if not doomed.published:
            raise LeaseMisuse("purge(): give it a filter that purgeable() has made")
        after: str | None = ""
        while after is not None:
            deleted, after = self._records.delete_unmoved(doomed, batch, after)
            if deleted:
                yield deleted

    # -- counting and measuring --------------------------------------------------------------------

    def stats(self, *, rules: bool = True) -> Stats:
        """Counts by task and state, failures by rule (unless *rules* is ``False``), groups that are
        not open, and saved runs if processes count them. Reads every record.
        """
        self._ready()
        counts = {
            (row["task"], row["state"]): (int(row["count"]), int(row["oldest"]))
            for row in self._records.counts()
        }
        trouble: str | None = None
        closed_groups: Sequence[GroupStatus] = ()
        try:
            closed_groups = self.groups()
            for task, state in [*counts]:
                if state == State.RUNNING:
                    self._separate_abandoned(task, counts)
        except StoreUnavailable as error:
            trouble = unanswered(error)
        by_rule = self._records.failures() if rules else Counter[tuple[str, str]]()
        return Stats(
            [
                StateCount(task, state, count, datetime.fromtimestamp(oldest / 1e6, UTC))
                for (task, state), (count, oldest) in sorted(counts.items())
            ],
            [RuleCount(rule, reason, count) for (rule, reason), count in by_rule.most_common()],
            *(closed_groups, trouble, self._saved_runs()),
        )

    def _separate_abandoned(
        self, task: str, counts: dict[tuple[str, str], tuple[int, int]]
    ) -> None:
        """Count running rows of *task* without a live lease as abandoned."""
        running, oldest = counts[task, State.RUNNING]
        found = self.matching(RecordFilter(states=(ABANDONED,), task=task))
        starts = [each.started_at for each in found if each.started_at is not None]
        if starts:
            counts[task, ABANDONED] = len(starts), round(min(starts).timestamp() * 1e6)
        counts[task, State.RUNNING] = running - len(starts), oldest
        if running <= len(starts):
            del counts[task, State.RUNNING]

    def _saved_runs(self) -> Sequence[SavedRuns] | None:
        """The saved runs that the processes of this host have counted, by task, the most first;
        ``None`` if :data:`METRICS_DIRECTORY` is not set.
        """
        if METRICS_DIRECTORY not in os.environ:
            return None
        found: Counter[str] = Counter()
        dropped: Counter[str] = Counter()
        for labels, count in counted("celery_leases_saved_runs_total"):
            found[labels["task"]] += int(count)
            dropped[labels["task"]] += int(count) if labels["how"] == "dropped" else 0
        return [
            SavedRuns(task, count, count - dropped[task], dropped[task])
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
        seconds.
        """
        self._ready()
        key = stored_key("celery_leases.latency", uuid4().hex)
        return (
            _round_trips(partial(self._leases.holder, key), rounds),
            _round_trips(self._records.now, rounds),
        )

    def lateness(self, *, task: str | None = None) -> Lateness | None:
        """How late the renewals of all tasks, or of *task*, were sent, as the processes of this
        host have counted; ``None`` if none was counted.
        """
        counts: Counter[float] = Counter()
        for labels, count in counted("celery_leases_renewal_lateness_seconds_bucket"):
            if task in (None, labels["task"]):
                counts[float(labels["le"])] += int(count)
        *bounds, _ = sorted(counts) or [inf]
        return Lateness.of(bounds, [counts[bound] for bound in (*bounds, inf)])

    # -- cooldown groups ---------------------------------------------------------------------------

    def group(self, group: str) -> GroupStatus:
        """The status of one cooldown group. A blank name raises
        :class:`~celery_leases.errors.KeyUnusable` here and below.
        """
        self._check_group(group)
        return self._group_now(self._leases.groups.get(group), group)

    def open_group(self, group: str) -> bool:
        """Open *group*, delete how often it closed in a row, and end the waits of the keys that
        failed because of the group; returns whether the group was not open.

        Copies that wait at the broker are delivered when their countdowns end.
        """
        self._check_group(group)
        opened = self._leases.groups.open(group)
        self._records.end_waits(group)
        return opened

    def close_group(self, group: str, span: Duration, why: str = "") -> GroupStatus:
        """Close *group* for *span* (seconds, ``"5m"``, a timedelta); a group that is
        closed for longer stays so.

        The first attempt after that is a probe, as after a failure of the group.
        """
        self._check_group(group)
        policy = CooldownPolicy.of(span, "close_group: span")
        closing = Closing(policy, Reason.ASKED, OPERATOR, redact(why), server_delay=policy.base)
        closed_group = self._leases.groups.close(group, closing, OPERATOR)
        return self._group_now(closed_group, group)

    def _group_now(self, closed_group: ClosedGroup | None, group: str) -> GroupStatus:
        store = self._leases.groups
        in_use = store.slots([group])
        return self._group(closed_group, group, store.history([group]), in_use)

    def _check_group(self, group: str) -> None:
        """Refuse a name that ``lease_group`` cannot make."""
        if not group.strip():
            raise KeyUnusable(
                f"group={group!r} is blank; write the name of a cooldown group, such as 'openai:gpt-5'"
            )
        self._ready()


def _round_trips(call: Callable[[], object], rounds: int) -> tuple[float, ...]:
    """The times of *rounds* calls, in seconds."""
    call()  # the first call may open a connection
    times = [perf_counter()]
    for _ in range(rounds):
        call()
        times.append(perf_counter())
    return tuple(after - before for before, after in pairwise(times))
