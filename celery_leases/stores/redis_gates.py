"""The gates of cooldown groups in Redis: what the core says of a gate is written by compare-and-set."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from celery_leases.core.errors import StoreUnavailable
from celery_leases.core.gates import Closing, Gate, closed, remembered_for
from celery_leases.stores import lua, lua_gates
from celery_leases.stores.redis_scripts import RedisScripts
from celery_leases.stores.redis_values import Keys, begin, gate_of, milliseconds, tally_of, trips_in

CLOSE_TRIES = 10
"""Others who close a gate at the same time make each try again that would close it for longer: few do, soon none."""


class RedisGates:
    """A :class:`~celery_leases.core.ports.GateStore` on one Redis server.

    A server that forgets everything opens all gates: the next failure of a group closes its gate again.
    """

    def __init__(self, scripts: RedisScripts, keys: Keys) -> None:
        self._scripts = scripts
        self._keys = keys

    def gate(self, group: str) -> Gate | None:
        """The gate of *group*; ``None`` when it is open."""
        seen = self._scripts.run(lua_gates.LOOK, *self._keys.gate(group))
        return gate_of(group, seen) if seen else None

    def gates(self, limit: int = 1000) -> Iterator[Gate]:
        """At most *limit* gates that are not open. Walks the database with ``SCAN``."""
        return islice(self._not_open(), limit)

    def close_gate(self, group: str, closing: Closing, token: str) -> Gate:
        """Close the gate; see :class:`~celery_leases.core.ports.GateStore`."""
        keys = self._keys.gate(group)
        for _ in range(CLOSE_TRIES):
            seen = self._scripts.run(lua_gates.LOOK, *keys)
            before = gate_of(group, seen) if seen else None
            after = closed(group, before, closing, token)
            if before is not None and after.closed_for == before.closed_for:  # it stands for long enough
                if before.probe != token:
                    return after
                self.give_back_probe(group, token)
                return replace(after, probe=None, probe_for=0.0)
            as_seen = (
                trips_in(seen[0]) if seen else "",
                int(before is not None and not before.half_open),
                int(before is not None and before.probe == token),
            )
            times = milliseconds(after.closed_for), milliseconds(remembered_for(after, closing.policy))
            if self._scripts.run(lua_gates.CLOSE, *keys, begin(token), *as_seen, tally_of(after), *times):
                return after
        raise StoreUnavailable(f"the gate of {group} changed {CLOSE_TRIES} times while it was being closed", False)

    def open_gate(self, group: str, token: str | None = None) -> bool:
        """Open a gate and forget its trips. With *token* only a half-open one whose probe's slot the token holds."""
        keys = self._keys.gate(group)
        if token is not None:
            return bool(self._scripts.run(lua_gates.OPEN, *keys, begin(token)))
        (deleted,) = self._scripts.pipelined([("DEL", *keys)])
        if isinstance(deleted, Exception):
            raise self._scripts.unavailable(deleted) from None
        return bool(deleted)

    def give_back_probe(self, group: str, token: str) -> bool:
        """Free the probe's slot if *token* holds it; the gate stays half-open."""
        return bool(self._scripts.run(lua.RELEASE, self._keys.gate(group)[2], begin(token)))

    def _not_open(self) -> Iterator[Gate]:
        for names in self._scripts.scan(self._keys.every_gate):
            groups = [self._keys.group(name) for name in names]
            calls = [self._keys.gate(group) for group in groups]
            for group, seen in zip(groups, self._scripts.run_many(lua_gates.LOOK, calls), strict=True):
                if isinstance(seen, Exception):
                    raise self._scripts.unavailable(seen) from None
                if seen:
                    yield gate_of(group, seen)
