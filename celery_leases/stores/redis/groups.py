"""The gates of cooldown groups in Redis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from redis.exceptions import ResponseError

from celery_leases.protocol import closings
from celery_leases.protocol.groups import Gate
from celery_leases.stores.group_closing import GateClosing
from celery_leases.stores.redis import group_scripts, lease_scripts
from celery_leases.stores.redis.scripts import RedisScripts
from celery_leases.stores.redis.values import (
    Keys,
    as_text,
    begin,
    gate_of,
    milliseconds,
    tally_of,
)


class RedisGates(GateClosing):
    """A :class:`~celery_leases.protocol.ports.GateStore` on one Redis server.

    When a server loses its data, all gates are open: the next failure of a group closes its gate
    again.
    """

    def __init__(self, scripts: RedisScripts, keys: Keys) -> None:
        self._scripts = scripts
        self._keys = keys

    def gate(self, group: str) -> Gate | None:
        """The gate of *group*; ``None`` when it is open."""
        seen = self._scripts.run(group_scripts.LOOK, *self._keys.gate(group))
        return gate_of(group, seen) if seen else None

    def gates(self, limit: int = 1000) -> Iterator[Gate]:
        """At most *limit* gates that are not open. Walks the database with ``SCAN``."""
        return islice(self._not_open(), limit)

    def _open_gate(self, group: str, token: str | None) -> bool:
        keys = self._keys.gate(group)
        if token is not None:
            return bool(self._scripts.run(group_scripts.OPEN, *keys, begin(token)))
        (deleted,) = self._scripts.pipelined([("DEL", *keys)])
        if isinstance(deleted, Exception):
            raise self._scripts.unavailable(deleted) from None
        return bool(deleted)

    def give_back_probe(self, group: str, token: str) -> bool:
        """Free the probe's slot if *token* holds it; the gate stays half-open."""
        return bool(
            self._scripts.run(lease_scripts.RELEASE, self._keys.gate(group)[2], begin(token))
        )

    def _swap_gate(self, before: Gate | None, after: Gate, remembered: float, token: str) -> bool:
        as_seen: tuple[int, int, int] = (0, 0, 0)
        if before is not None:
            as_seen = before.trips, int(not before.half_open), int(before.probe == token)
        times = milliseconds(after.closed_for), milliseconds(remembered)
        keys = self._keys.gate(after.group)
        return bool(
            self._scripts.run(
                group_scripts.CLOSE, *keys, begin(token), *as_seen, tally_of(after), *times
            )
        )

    def _texts(self, groups: Sequence[str] | None, limit: int) -> Mapping[str, str]:
        if groups is not None:
            return dict(self._read_past(groups))
        listed = (
            [*map(self._keys.group, names)] for names in self._scripts.scan(self._keys.every_past)
        )
        return dict(islice((found for names in listed for found in self._read_past(names)), limit))

    def _read_past(self, groups: Sequence[str]) -> Iterator[tuple[str, str]]:
        read = self._scripts.pipelined([("GET", self._keys.past(group)) for group in groups])
        for group, found in zip(groups, read, strict=True):
            if isinstance(found, ResponseError) and "WRONGTYPE" in str(found):
                continue  # another program's
            if isinstance(found, Exception):
                raise self._scripts.unavailable(found) from None
            if found is not None:
                yield group, as_text(found)

    def _swap_text(self, group: str, before: str | None, after: str) -> bool:
        given = int(before is not None), before or "", after, milliseconds(closings.REMEMBERED)
        return bool(self._scripts.run(lease_scripts.SWAP_MARK, self._keys.past(group), *given))

    def _not_open(self) -> Iterator[Gate]:
        for names in self._scripts.scan(self._keys.every_gate):
            groups = [self._keys.group(name) for name in names]
            calls = [self._keys.gate(group) for group in groups]
            for group, seen in zip(
                groups, self._scripts.run_many(group_scripts.LOOK, calls), strict=True
            ):
                if isinstance(seen, Exception):
                    raise self._scripts.unavailable(seen) from None
                if seen:
                    yield gate_of(group, seen)
