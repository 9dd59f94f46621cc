"""The gates of cooldown groups in the records' database: one row for each that is not open."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Update, and_, case, delete, not_, select, update

from celery_leases.protocol.groups import Gate
from celery_leases.protocol.ports import Renewal
from celery_leases.stores.group_closing import GateClosing
from celery_leases.stores.group_values import gate_from, gate_name, why
from celery_leases.stores.sql.database import Database
from celery_leases.stores.sql.rows import MICROSECONDS
from celery_leases.stores.sql.schema import Tables
from celery_leases.stores.sql.statements import Row
from celery_leases.stores.sql.upserts import Writes, upsert


class SqlGates(GateClosing):
    """A :class:`~celery_leases.protocol.ports.GateStore` in the tables of one database."""

    def __init__(self, database: Database, tables: Tables) -> None:
        self.database = database
        self._gates = tables.gates
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

    def open_gate(self, group: str, token: str | None = None) -> bool:
        """Open a gate and forget its trips. With *token* only a half-open one whose probe's slot
        the token holds.
        """
        opened = delete(self._gates).where(self._named(group), self._remembered)
        if token is not None:
            opened = opened.where(not_(self._closed), self._probes(token))
        return self.database.count(opened, {}) > 0

    def give_back_probe(self, group: str, token: str) -> bool:
        """Free the probe's slot if *token* holds it; the gate stays half-open."""
        freed = update(self._gates).where(self._named(group), self._probes(token))
        return self.database.count(freed.values(probe="", probe_until=0), {}) > 0

    def take_probe(self, group: str, token: str, ttl: float) -> bool:
        """Take the probe's slot of a half-open gate for *ttl* seconds, unless another probes."""
        gates, now = self._gates.c, self.database.now
        taken = update(self._gates).where(self._named(group), self._remembered, not_(self._closed))
        free = (gates.probe_until <= now) | (gates.probe == token)
        return (
            self.database.count(
                taken.where(free).values(probe=token, probe_until=now + _span(ttl)), {}
            )
            > 0
        )

    def renew_probes(self, renewals: Sequence[Renewal], ttl: float) -> None:
        """Push the ends of the slots out that the tokens of *renewals* hold, never back."""
        gates, until = self._gates.c, self.database.now + _span(ttl)
        names = {gate_name(renewal.probe) for renewal in renewals if renewal.probe is not None}
        tokens = [renewal.token for renewal in renewals]
        held = update(self._gates).where(gates.name.in_(names), gates.probe.in_(tokens))
        self.database.count(held.values(probe_until=_later(gates.probe_until, until)), {})

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
        """Write the row of a gate that was open; one that is forgotten may be in its place."""
        values = self._values(after, remembered) | {"probe": "", "probe_until": 0}
        dialect, name = self.database.engine.dialect, gate_name(after.group)
        return upsert(self._gates, dialect, {"name": name}, values, where=not_(self._remembered))

    def _closing(self, before: Gate, after: Gate, remembered: float, token: str) -> Update:
        """Close the gate if what was decided on is still so, and nobody has closed it for longer
        meanwhile.
        """
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
        values["expires_at"] = _later(gates.expires_at, values["expires_at"])
        # MySQL changes one column after the other: the probe comes after what is made of it.
        values["probe_until"] = case((gates.probe == token, 0), else_=gates.probe_until)
        values["probe"] = case((gates.probe == token, ""), else_=gates.probe)
        return as_seen.ordered_values(*((gates[name], value) for name, value in values.items()))

    def _values(self, gate: Gate, remembered: float) -> dict[str, Any]:
        now = self.database.now
        until = {
            "closed_until": now + _span(gate.closed_for),
            "expires_at": now + _span(remembered),
        }
        return {"trips": gate.trips, "why": why(gate), **until}


def gate_of(group: str, row: Row, now: int) -> Gate:
    """The gate in *row*, as it is at *now* in microseconds."""
    left = (row["probe_until"] - now) / MICROSECONDS
    probe = (row["probe"], left) if row["probe"] and left > 0 else None
    return gate_from(
        group, row["trips"], (row["closed_until"] - now) / MICROSECONDS, row["why"], probe
    )


def _span(seconds: float) -> int:
    return int(seconds * MICROSECONDS)


def _later(stands: ColumnElement[int], until: ColumnElement[int]) -> ColumnElement[int]:
    return case((stands > until, stands), else_=until)
