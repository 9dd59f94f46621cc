"""The state of groups in the records database.

There is a row for each group that has slots, waiting calls or a rate, that is not open, or that was
closed in the last 30 days: the row also has its history.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from sqlalchemy import ColumnElement, Executable, bindparam, case, literal_column, select, update

from celery_leases.call import Call
from celery_leases.concurrency import os_threads
from celery_leases.decide.answers import Renewal
from celery_leases.errors import StoreUnavailable
from celery_leases.groups.group import ClosedGroup, stored_group
from celery_leases.groups.history import RETENTION
from celery_leases.groups.slots import (
    NO_SLOTS,
    NOTHING,
    PLACE_TTL,
    Ask,
    Room,
    Slots,
    Taken,
    dump,
    load,
    room,
    take,
    with_place,
    with_slot,
    without_slot,
)
from celery_leases.stores.group_closing import Change, ClosingGroups, noted
from celery_leases.stores.sql.database import Database
from celery_leases.stores.sql.dialects import Writes
from celery_leases.stores.sql.rows import Row, microseconds
from celery_leases.stores.sql.schema import Tables

CHANGE_TRIES: Final = 10
"""How often a change of slots is tried while other processes change the same ones, before it locks
their row. A lock is slower, because it is held for several round trips.
"""
CHANGE_PAUSE: Final = 0.002
"""Seconds by which the longest pause between two of these tries grows. Pauses are random, so that
many processes do not try again at the same moment.
"""
KEPT: Final = 3600.0
"""Seconds for which the row of a group stays when nothing of it counts."""


class SeenSlots(NamedTuple):
    """The slots of a group as they were read, at ``now`` microseconds; ``version`` is ``None`` if
    there is no row of them. ``read_at``: when they had arrived, by the local clock.
    ``expires_at``: of the row; ``history``: its text, if it was read.
    """

    version: int | None
    slots: Slots
    now: int
    read_at: float
    expires_at: int = 0
    history: str | None = None


class SqlGroups(ClosingGroups):
    """A :class:`~celery_leases.stores.interfaces.GroupStore` in the tables of one database."""

    def __init__(self, database: Database, tables: Tables) -> None:
        self.database = database
        self._groups = tables.groups
        self._select, self._lock, self._update, self._note, self._insert = database.once(
            self._statements
        )

    def all(self, limit: int = 1000) -> Iterator[ClosedGroup]:
        """At most *limit* groups that are not open."""
        columns, now = self._groups.c, self.database.now
        closed = select(columns.name, columns.slots, now.label("now")).where(
            columns.limited_until > now
        )
        for row in self.database.all(closed.limit(limit), {}):
            at = row["now"] / 1000
            if (
                closed_group := load(row["slots"]).at(at).closed_group(str(row["name"]), at)
            ) is not None:
                yield closed_group

    def slots(
        self, groups: Sequence[str] | None = None, limit: int = 1000
    ) -> Mapping[str, tuple[Slots, float]]:
        """The slots of the groups, and the time of the database in milliseconds."""
        names = {stored_group(group): group for group in groups or ()}
        columns = self._groups.c
        query = select(columns.name, columns.slots, self.database.now.label("now"))
        if groups is not None:
            query = query.where(columns.name.in_(names))
        found = {
            names.get(str(row["name"]), str(row["name"])): (load(row["slots"]).at(now), now)
            for row in self.database.all(query.limit(limit), {})
            for now in [row["now"] / 1000]
        }
        return {
            group: seen
            for group, seen in found.items()
            if groups is not None or seen[0].expires_at > seen[1]
        }

    def take(self, call: Call, seen: SeenSlots) -> tuple[Taken | Room | ClosedGroup, float]:
        """Take what the call asks of its group, beginning with the slots as they were *seen*; also
        returns when the slots had arrived, from which the time until its turn counts.
        """
        group, ask, ttl = call.group or "", call.ask or NOTHING, call.options.ttl
        answer: Taken | Room | ClosedGroup | None = None

        def taken(slots: Slots, now: float) -> Slots | None:
            nonlocal answer
            answer = take(group, slots, ask, call.token, ttl, now)
            return answer.slots if isinstance(answer, Taken) else None

        read_at = self._change(group, taken, seen).read_at
        assert answer is not None  # it was called
        return answer, read_at

    def room(self, asked: Mapping[str, Ask]) -> Mapping[str, Room]:
        """The room of each group; one statement, and two for each worker's place that is to be
        written, once a second.
        """
        found, rooms = self.slots(list(asked)), {}
        for group, ask in asked.items():
            slots, now = found.get(group) or (NO_SLOTS, self._seen(group).now / 1000)
            rooms[group] = room(slots, ask, now)
            since, until = slots.places.get(ask.worker, (0.0, 0.0))
            if ask.worker and (since != ask.since or until - now < PLACE_TTL * 2 / 3):
                self._change(group, partial(_with_place_of, ask))
        return rooms

    def release_slot(self, group: str, token: str) -> None:
        """Free the slot of *token*."""
        self._change(
            group,
            lambda slots, _: without_slot(slots, token) if token in slots.held else None,
        )

    def renew_slot(self, renewal: Renewal) -> None:
        """Extend the slot of a renewal, and write it again if it is missing."""
        assert renewal.slot is not None  # otherwise there is nothing to renew
        group, limit = renewal.slot
        self._change(
            group, lambda slots, now: with_slot(slots, renewal.token, renewal.ttl, limit, now)
        )

    def _seen(self, group: str) -> SeenSlots:
        row = self.database.first(self._select, {"group": stored_group(group)})
        assert row is not None  # the statement always returns one row
        return seen_in(row)

    def _change_group(self, group: str, token: str, change: Change) -> tuple[Slots, float] | None:
        after: Slots | None = None

        def changed(slots: Slots, now: float) -> Slots | None:
            nonlocal after
            after = change(slots, now)
            return after

        seen = self._change(group, changed, of_group=True)
        return (after, seen.now / 1000) if after is not None else None

    def _change(
        self,
        group: str,
        change: Change,
        seen: SeenSlots | None = None,
        *,
        of_group: bool = False,
    ) -> SeenSlots:
        """Replace the slots of *group* by what *change* makes of them and the time, unless that is
        ``None`` or the same; returns the slots that it has replaced.

        Repeated if another process changes them at the same time. The last try locks the row
        before it is read, so that it cannot fail because of others.
        """
        for tries in range(CHANGE_TRIES):
            if tries:
                # The thread that renews changes slots too, so this is no sleep of greenlets.
                os_threads.Wakeup().wait(random.uniform(0, CHANGE_PAUSE * tries))
            seen = seen or self._seen(group)
            new = change(seen.slots, seen.now / 1000)
            if new is None or new == seen.slots or self._swap(group, seen, new, of_group):
                return seen
            seen = None
        with self.database.transaction() as run:
            row = run(self._lock, {"group": stored_group(group)})
            if row is None:
                raise StoreUnavailable(f"the state of the group {group} was deleted", False)
            seen = seen_in(row)
            if (new := change(seen.slots, seen.now / 1000)) is not None:
                run(*self._writing(group, seen, new, of_group))
        return seen

    def _swap(self, group: str, seen: SeenSlots, new: Slots, of_group: bool) -> bool:
        statement, values = self._writing(group, seen, new, of_group)
        if seen.version is None:
            return self.database.touch(self._insert, {"new_history": "", **values})
        return self.database.count(statement, values) > 0

    def _writing(
        self, group: str, seen: SeenSlots, new: Slots, of_group: bool
    ) -> tuple[Executable, dict[str, Any]]:
        """The update to *new*, and its values. It writes the history if the group is changed."""
        kept = int(new.expires_at * 1000) + microseconds(KEPT)
        values = {
            "group": stored_group(group),
            "seen": seen.version,
            "new_version": max((seen.version or 0) + 1, seen.now),
            "new_slots": dump(new),
            "new_limited_until": int(new.closed.counts * 1000) if new.closed is not None else 0,
        }
        history = None
        if of_group:
            history = noted(seen.history, seen.slots, new, group, seen.now / 1000)
        if history is not None:
            values["new_history"] = history
            kept = max(kept, seen.now + microseconds(RETENTION))
        values["new_expires_at"] = max(kept, seen.expires_at)
        return self._update if history is None else self._note, values

    def _statements(self) -> tuple[Executable, Executable, Executable, Executable, Writes]:
        groups = self._groups
        names = ("version", "slots", "limited_until", "expires_at", "history")
        new: dict[str, Any] = {
            name: bindparam(f"new_{name}", type_=groups.c[name].type) for name in names
        }
        name = groups.c.name == bindparam("group")
        columns = (
            *(groups.c.version, groups.c.slots, groups.c.history),
            groups.c.expires_at.label("kept_until"),
            self.database.now.label("now"),
        )
        always = select(literal_column("1").label("one")).subquery("always")
        changed = update(groups).where(name, groups.c.version == bindparam("seen"))
        return (
            select(*columns).select_from(always.outerjoin(groups, name)),
            select(*columns).where(name).with_for_update(),
            changed.values({name: new[name] for name in names if name != "history"}),
            changed.values(new),
            self.database.dialect.insert_absent(
                groups, ["name"], {"name": bindparam("group"), **new}
            ),
        )

    def _read_histories(self, groups: Sequence[str] | None, limit: int) -> Mapping[str, str]:
        columns = self._groups.c
        query = select(columns.name, columns.history).where(columns.history != "")
        if groups is None:
            found = self.database.all(query.order_by(columns.expires_at.desc()).limit(limit), {})
            return {row["name"]: row["history"] for row in found}
        names = {stored_group(group): group for group in groups}
        found = self.database.all(query.where(columns.name.in_(names)), {})
        return {names[row["name"]]: row["history"] for row in found}


def seen_in(row: Row) -> SeenSlots:
    """The slots in a row that has just been read; its columns are NULL if there is none."""
    now, arrived = int(row["now"]), os_threads.boot_clock()
    slots = load(row["slots"]).at(now / 1000)
    return SeenSlots(
        row["version"], slots, now, arrived, row["kept_until"] or 0, row.get("history")
    )


def _with_place_of(ask: Ask, slots: Slots, now: float) -> Slots:
    return with_place(slots, ask, now)


def later_of(first: ColumnElement[int], second: ColumnElement[int]) -> ColumnElement[int]:
    """The later of two times; *second* if the first is NULL."""
    return case((first > second, first), else_=second)
