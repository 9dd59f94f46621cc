"""The gates of cooldown groups in the records database: one row for each gate that is not open.

The history of a gate is a row of the effects table without a key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from sqlalchemy import ColumnElement, Update, and_, case, delete, not_, select, update

from celery_leases.decide.answers import Renewal
from celery_leases.groups.group import Gate
from celery_leases.groups.history import RETENTION
from celery_leases.groups.values import gate_from, gate_name, reason_json
from celery_leases.stores.group_closing import GateClosing
from celery_leases.stores.sql.database import Database
from celery_leases.stores.sql.dialects import Writes
from celery_leases.stores.sql.schema import Tables
from celery_leases.stores.sql.values import MICROSECONDS, Row, microseconds

PAST: Final = "celery_leases.closings"
"""The value of the column ``name`` in such a row. The column ``scope`` has the name of the gate."""
PAST_STATE: Final = "noted"


class SqlGates(GateClosing):
    """A :class:`~celery_leases.stores.interfaces.GateStore` in the tables of one database."""

    def __init__(self, database: Database, tables: Tables) -> None:
        self.database = database
        self._gates = tables.gates
        self._effects = effects = tables.effects
        self._past = (effects.c.stored_key == "", effects.c.name == PAST)
        self._remembered = tables.gates.c.expires_at > database.now
        self._closed = tables.gates.c.closed_until > database.now

    def gate(self, group: str) -> Gate | None:
        """The gate of *group*; ``None`` when it is open."""
        row = self.database.first(self._reading().where(self._named(group)), {})
        return gate_of(group, row, int(row["now"])) if row is not None else None

    def gates(self, limit: int = 1000) -> Iterator[Gate]:
        """At most *limit* gates that are not open."""
        for row in self.database.all(self._reading().limit(limit), {}):
            yield gate_of(row["name"], row, int(row["now"]))

    def _open_gate(self, group: str, token: str | None) -> bool:
        opened = delete(self._gates).where(self._named(group), self._remembered)
        if token is not None:
            opened = opened.where(not_(self._closed), self._probes(token))
        return self.database.count(opened, {}) > 0

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

    def _read_histories(self, groups: Sequence[str] | None, limit: int) -> Mapping[str, str]:
        effects = self._effects.c
        query = select(effects.scope, effects.result).where(*self._past)
        if groups is None:
            found = self.database.all(query.order_by(effects.sent_at.desc()).limit(limit), {})
            return {row["scope"]: row["result"] for row in found}
        names = {gate_name(group): group for group in groups}
        if not names:
            return {}
        found = self.database.all(query.where(effects.scope.in_(names)), {})
        return {names[row["scope"]]: row["result"] for row in found}

    def _swap_history(self, group: str, before: str | None, after: str) -> bool:
        effects, now = self._effects, self.database.now
        key = {"stored_key": "", "name": PAST, "scope": gate_name(group)}
        written = {"result": after, "sent_at": now, "expires_at": now + microseconds(RETENTION)}
        if before is None:
            fresh = {**key, **written, "state": PAST_STATE, "fence": 0, "idempotency_key": ""}
            made = self.database.dialect.insert_absent(effects, [*key], fresh)
            return self.database.touch(made, {})
        same = and_(*self._past, effects.c.scope == key["scope"], effects.c.result == before)
        return self.database.count(update(effects).where(same).values(written), {}) == 1

    def _reading(self) -> Any:
        return select(*self._gates.c, self.database.now.label("now")).where(self._remembered)

    def _named(self, group: str) -> ColumnElement[bool]:
        return self._gates.c.name == gate_name(group)

    def _probes(self, token: str) -> ColumnElement[bool]:
        return and_(self._gates.c.probe == token, self._gates.c.probe_until > self.database.now)

    def _swap_gate(self, before: Gate | None, after: Gate, remembered: float, token: str) -> bool:
        if before is None:
            swap = self._first_closing(after, remembered)
        else:
            swap = (self._closing(before, after, remembered, token),)
        return self.database.touch(swap, {})

    def _first_closing(self, after: Gate, remembered: float) -> Writes:
        """Write the row of a gate that was open: insert it, or replace an expired one."""
        values = self._values(after, remembered) | {"probe": "", "probe_until": 0}
        name = {"name": gate_name(after.group)}
        dialect = self.database.dialect
        return dialect.upsert(self._gates, name, values, where=not_(self._remembered))

    def _closing(self, before: Gate, after: Gate, remembered: float, token: str) -> Update:
        """Close the gate if it is unchanged since *before*, and is not closed for longer."""
        gates, probes = self._gates.c, self._probes(token)
        values = self._values(after, remembered)
        as_seen = update(self._gates).where(
            self._named(after.group),
            self._remembered,
            gates.trips == before.trips,
            not_(self._closed) if before.half_open else self._closed,
            probes if before.probe == token else not_(probes),
            gates.closed_until <= values["closed_until"],
        )
        values["expires_at"] = later_of(gates.expires_at, values["expires_at"])
        # MySQL assigns the columns in order: probe comes after probe_until, whose value depends on
        # it.
        values["probe_until"] = case((gates.probe == token, 0), else_=gates.probe_until)
        values["probe"] = case((gates.probe == token, ""), else_=gates.probe)
        return as_seen.ordered_values(*((gates[name], value) for name, value in values.items()))

    def _values(self, gate: Gate, remembered: float) -> dict[str, Any]:
        now = self.database.now
        until = {
            "closed_until": now + microseconds(gate.closed_for),
            "expires_at": now + microseconds(remembered),
        }
        return {"trips": gate.trips, "why": reason_json(gate), **until}


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
