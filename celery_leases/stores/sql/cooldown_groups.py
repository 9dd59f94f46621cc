"""The gates of cooldown groups in the records database.

There is a row for each gate that is not open, or that was closed in the last 30 days: the row also
has the history of the gate.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from sqlalchemy import (
    ColumnElement,
    Executable,
    Update,
    and_,
    bindparam,
    case,
    not_,
    select,
    update,
)

from celery_leases.call import Call
from celery_leases.concurrency import os_threads
from celery_leases.decide.answers import Renewal
from celery_leases.errors import StoreUnavailable
from celery_leases.groups.group import Gate, gate_from, gate_name, reason_json
from celery_leases.groups.history import RETENTION
from celery_leases.groups.slots import (
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
from celery_leases.stores.group_closing import ClosingGroups
from celery_leases.stores.sql.database import Database
from celery_leases.stores.sql.dialects import Writes
from celery_leases.stores.sql.rows import MICROSECONDS, Row, microseconds
from celery_leases.stores.sql.schema import Tables

CHANGE_TRIES: Final = 10
"""How often a change of slots is tried while other processes change the same ones, before it locks
their row. A lock is slower, because it is held for several round trips.
"""
CHANGE_PAUSE: Final = 0.002
"""Seconds by which the longest pause between two of these tries grows. Pauses are random, so that
many processes do not try again at the same moment.
"""
SLOTS_RETENTION: Final = 3600.0
"""Seconds for which the row of a group's slots stays when none is held."""


class SeenSlots(NamedTuple):
    """The slots of a group as they were read, at ``now`` microseconds; ``version`` is ``None`` if
    there is no row of them. ``read_at``: when they had arrived, by the local clock.
    """

    version: int | None
    slots: Slots
    now: int
    read_at: float


class SqlGroups(ClosingGroups):
    """A :class:`~celery_leases.stores.interfaces.GroupStore` in the tables of one database."""

    def __init__(self, database: Database, tables: Tables) -> None:
        self.database = database
        self._gates = tables.gates
        self._slots = tables.slots
        self._remembered, self._closed = database.once(self._conditions)
        self._select_slots, self._lock_slots, self._update_slots, self._insert_slots = (
            database.once(self._slot_statements)
        )

    def _conditions(self) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
        gates, now = self._gates.c, self.database.now
        return gates.opens_at > now, gates.closed_until > now

    def all(self, limit: int = 1000) -> Iterator[Gate]:
        """At most *limit* gates that are not open."""
        for row in self.database.all(self._reading().where(self._remembered).limit(limit), {}):
            yield gate_of(row["name"], row, int(row["now"]))

    def _read(self, group: str) -> tuple[Gate | None, str | None]:
        row = self.database.first(self._reading().where(self._named(group)), {})
        if row is None:
            return None, None
        now = int(row["now"])
        return gate_of(group, row, now) if row["opens_at"] > now else None, row["history"]

    def _open(self, group: str, token: str | None, past: str) -> bool:
        opened = update(self._gates).where(self._named(group), self._remembered)
        if token is not None:
            opened = opened.where(not_(self._closed), self._probes(token))
        kept = self.database.now + microseconds(RETENTION)
        values = {"opens_at": 0, "probe": "", "probe_until": 0, "history": past, "expires_at": kept}
        return self.database.count(opened.values(values), {}) > 0

    def release_probe(self, group: str, token: str) -> bool:
        """Free the probe slot if *token* holds it; the gate stays half-open."""
        freed = update(self._gates).where(self._named(group), self._probes(token))
        return self.database.count(freed.values(probe="", probe_until=0), {}) > 0

    def take_probe(self, group: str, token: str, ttl: float) -> bool:
        """Take the probe slot of a half-open gate for *ttl* seconds, unless another token holds
        it.
        """
        gates, now = self._gates.c, self.database.now
        taken = update(self._gates).where(self._named(group), self._remembered, not_(self._closed))
        free = (gates.probe_until <= now) | (gates.probe == token)
        return (
            self.database.count(
                taken.where(free).values(probe=token, probe_until=now + microseconds(ttl)), {}
            )
            > 0
        )

    def renew_probes(self, renewals: Sequence[Renewal], ttl: float) -> None:
        """Extend the probe slots that the tokens of *renewals* hold; never shorten one."""
        gates, until = self._gates.c, self.database.now + microseconds(ttl)
        names = {gate_name(renewal.probe) for renewal in renewals if renewal.probe is not None}
        tokens = [renewal.token for renewal in renewals]
        held = update(self._gates).where(gates.name.in_(names), gates.probe.in_(tokens))
        self.database.count(held.values(probe_until=later_of(gates.probe_until, until)), {})

    # -- slots -------------------------------------------------------------------------------------

    def slots(
        self, groups: Sequence[str] | None = None, limit: int = 1000
    ) -> Mapping[str, tuple[Slots, float]]:
        """The slots of the groups, and the time of the database in milliseconds."""
        names = {gate_name(group): group for group in groups or ()}
        query = self._reading_slots()
        if groups is not None:
            query = query.where(self._slots.c.name.in_(names))
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

    def take(self, call: Call, seen: SeenSlots) -> tuple[Taken | Room, float]:
        """Take what the call asks of its group, beginning with the slots as they were *seen*; also
        returns when the slots had arrived, from which the time until its turn counts.
        """
        assert call.ask is not None  # otherwise nothing is taken
        ask, answer = call.ask, None

        def taken(slots: Slots, now: float) -> Slots | None:
            nonlocal answer
            answer = take(slots, ask, call.token, call.options.ttl, now)
            return answer.slots if isinstance(answer, Taken) else None

        read_at = self._change(call.group or "", taken, seen)
        assert answer is not None  # it was called
        return answer, read_at

    def room(self, asked: Mapping[str, Ask]) -> Mapping[str, Room]:
        """The room of each group; one statement, and two for each worker's place that is to be
        written, once a second.
        """
        found, rooms = self.slots(list(asked)), {}
        for group, ask in asked.items():
            slots, now = found.get(group) or (Slots(), self.database_time())
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

    def database_time(self) -> float:
        """The time of the database, in milliseconds."""
        row = self.database.first(select(self.database.now.label("now")), {})
        return int(row["now"]) / 1000 if row is not None else 0.0

    def _reading_slots(self) -> Any:
        return select(*self._slots.c, self.database.now.label("now"))

    def _change(
        self,
        group: str,
        change: Callable[[Slots, float], Slots | None],
        seen: SeenSlots | None = None,
    ) -> float:
        """Replace the slots of *group* by what *change* makes of them and the time, unless that is
        ``None``; returns when these slots had arrived.

        Repeated if another process changes them at the same time. The last try locks the row
        before it is read, so that it cannot fail because of others.
        """
        for tries in range(CHANGE_TRIES):
            if tries:
                # The thread that renews changes slots too, so this is no sleep of greenlets.
                os_threads.Wakeup().wait(random.uniform(0, CHANGE_PAUSE * tries))
            seen = seen or self._seen(group)
            new = change(seen.slots, seen.now / 1000)
            if new is None or self._swap_slots(group, seen, new):
                return seen.read_at
            seen = None
        with self.database.transaction() as run:
            row = run(self._lock_slots, {"group": gate_name(group)})
            if row is None:
                raise StoreUnavailable(f"the slots of the group {group} were deleted", False)
            seen = self._seen_in(row)
            if (new := change(seen.slots, seen.now / 1000)) is not None:
                run(self._update_slots, self._new_values(group, seen, new))
        return seen.read_at

    def _seen(self, group: str) -> SeenSlots:
        row = self.database.first(self._select_slots, {"group": gate_name(group)})
        if row is None:
            now = int(self.database_time() * 1000)
            return SeenSlots(None, Slots(), now, os_threads.boot_clock())
        return self._seen_in(row)

    def _seen_in(self, row: Row) -> SeenSlots:
        slots = load(row["slots"])
        return SeenSlots(row["version"], slots, int(row["now"]), os_threads.boot_clock())

    def _swap_slots(self, group: str, seen: SeenSlots, new: Slots) -> bool:
        values = self._new_values(group, seen, new)
        if seen.version is None:
            return self.database.touch(self._insert_slots, values)
        return self.database.count(self._update_slots, values) > 0

    def _new_values(self, group: str, seen: SeenSlots, new: Slots) -> dict[str, Any]:
        return {
            "group": gate_name(group),
            "seen": seen.version,
            "new_version": max((seen.version or 0) + 1, seen.now),
            "new_slots": dump(new),
            "new_expires_at": int(new.expires_at * 1000) + microseconds(SLOTS_RETENTION),
        }

    def _slot_statements(self) -> tuple[Executable, Executable, Executable, Writes]:
        slots = self._slots.c
        new: dict[str, Any] = {
            name: bindparam(f"new_{name}", type_=slots[name].type)
            for name in ("version", "slots", "expires_at")
        }
        name = slots.name == bindparam("group")
        read = self._reading_slots().where(name)
        return (
            read,
            read.with_for_update(),
            update(self._slots).where(name, slots.version == bindparam("seen")).values(new),
            self.database.dialect.insert_absent(
                self._slots, ["name"], {"name": bindparam("group"), **new}
            ),
        )

    def _read_histories(self, groups: Sequence[str] | None, limit: int) -> Mapping[str, str]:
        gates = self._gates.c
        query = select(gates.name, gates.history)
        if groups is None:
            found = self.database.all(query.order_by(gates.expires_at.desc()).limit(limit), {})
            return {row["name"]: row["history"] for row in found}
        names = {gate_name(group): group for group in groups}
        found = self.database.all(query.where(gates.name.in_(names)), {})
        return {names[row["name"]]: row["history"] for row in found}

    def _reading(self) -> Any:
        return select(*self._gates.c, self.database.now.label("now"))

    def _named(self, group: str) -> ColumnElement[bool]:
        return self._gates.c.name == gate_name(group)

    def _probes(self, token: str) -> ColumnElement[bool]:
        return and_(self._gates.c.probe == token, self._gates.c.probe_until > self.database.now)

    def _swap(
        self, before: Gate | None, after: Gate, remembered: float, token: str, past: str
    ) -> bool:
        now = self.database.now
        values = {
            "trips": after.trips,
            "why": reason_json(after),
            "closed_until": now + microseconds(after.closed_for),
            "opens_at": now + microseconds(remembered),
            "history": past,
            "expires_at": now + microseconds(max(remembered, RETENTION)),
        }
        if before is None:
            return self.database.touch(self._first_closing(after, values), {})
        return self.database.touch((self._closing(before, after, values, token),), {})

    def _first_closing(self, after: Gate, values: dict[str, Any]) -> Writes:
        """Write the row of a gate that was open: insert it, or replace the one it had."""
        values |= {"probe": "", "probe_until": 0}
        name, dialect = {"name": gate_name(after.group)}, self.database.dialect
        return dialect.upsert(self._gates, name, values, where=not_(self._remembered))

    def _closing(self, before: Gate, after: Gate, values: dict[str, Any], token: str) -> Update:
        """Close the gate if it is unchanged since *before*, and is not closed for longer."""
        gates, probes = self._gates.c, self._probes(token)
        as_seen = update(self._gates).where(
            self._named(after.group),
            self._remembered,
            gates.trips == before.trips,
            not_(self._closed) if before.half_open else self._closed,
            probes if before.probe == token else not_(probes),
            gates.closed_until <= values["closed_until"],
        )
        for name in ("opens_at", "expires_at"):
            values[name] = later_of(gates[name], values[name])
        # MySQL assigns the columns in order: probe comes after probe_until, whose value depends on
        # it.
        values["probe_until"] = case((gates.probe == token, 0), else_=gates.probe_until)
        values["probe"] = case((gates.probe == token, ""), else_=gates.probe)
        return as_seen.ordered_values(*((gates[name], value) for name, value in values.items()))


def _with_place_of(ask: Ask, slots: Slots, now: float) -> Slots:
    return with_place(slots, ask, now)


def gate_of(group: str, row: Row, now: int) -> Gate:
    """The gate in *row* at the time *now*, in microseconds."""
    left = (row["probe_until"] - now) / MICROSECONDS
    probe = (row["probe"], left) if row["probe"] and left > 0 else None
    return gate_from(
        group, row["trips"], (row["closed_until"] - now) / MICROSECONDS, row["why"], probe
    )


def later_of(first: ColumnElement[int], second: ColumnElement[int]) -> ColumnElement[int]:
    """The later of two times; *second* if the first is NULL."""
    return case((first > second, first), else_=second)
