"""The gates of cooldown groups in Redis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from redis.exceptions import ResponseError

from celery_leases.groups.group import Gate
from celery_leases.groups.history import RETENTION
from celery_leases.stores.group_closing import ClosingGroups
from celery_leases.stores.redis import cooldown_group_scripts, lease_scripts
from celery_leases.stores.redis.commands import RedisCommands
from celery_leases.stores.redis.values import (
    Keys,
    as_text,
    gate_of,
    milliseconds,
    token_prefix,
    trips_value,
)


class RedisGroups(ClosingGroups):
    """A :class:`~celery_leases.stores.interfaces.GroupStore` in Redis.

    If the server loses its data, all gates are open. The next failure of a group closes its gate
    again.
    """

    def __init__(self, commands: RedisCommands, keys: Keys) -> None:
        self._commands = commands
        self._keys = keys

    def all(self, limit: int = 1000) -> Iterator[Gate]:
        """At most *limit* gates that are not open; scans the database with ``SCAN``."""
        return islice(self._not_open(), limit)

    def release_probe(self, group: str, token: str) -> bool:
        """Free the probe slot if *token* holds it; the gate stays half-open."""
        return bool(
            self._commands.run(
                lease_scripts.RELEASE, self._keys.gate(group)[2], token_prefix(token)
            )
        )

    def _read(self, group: str) -> tuple[Gate | None, str | None]:
        keys = *self._keys.gate(group), self._keys.past(group)
        seen, past = self._commands.run(cooldown_group_scripts.READ_WITH_HISTORY, *keys)
        return gate_of(group, seen) if seen else None, as_text(past) if past else None

    def _open(self, group: str, token: str | None, past: str) -> bool:
        keys = *self._keys.gate(group), self._keys.past(group)
        who = "" if token is None else token_prefix(token)
        given = who, past, milliseconds(RETENTION)
        return bool(self._commands.run(cooldown_group_scripts.OPEN, *keys, *given))

    def _swap(
        self, before: Gate | None, after: Gate, remembered: float, token: str, past: str
    ) -> bool:
        as_seen: tuple[int, int, int] = (0, 0, 0)
        if before is not None:
            as_seen = before.trips, int(not before.half_open), int(before.probe == token)
        times = milliseconds(after.closed_for), milliseconds(remembered)
        return bool(
            self._commands.run(
                cooldown_group_scripts.CLOSE,
                *self._keys.gate(after.group),
                self._keys.past(after.group),
                token_prefix(token),
                *as_seen,
                trips_value(after),
                *times,
                past,
                milliseconds(RETENTION),
            )
        )

    def _read_histories(self, groups: Sequence[str] | None, limit: int) -> Mapping[str, str]:
        if groups is not None:
            return dict(self._read_history(groups))
        listed = (
            [*map(self._keys.group, names)]
            for names in self._commands.scan(self._keys.history_pattern)
        )
        return dict(
            islice((found for names in listed for found in self._read_history(names)), limit)
        )

    def _read_history(self, groups: Sequence[str]) -> Iterator[tuple[str, str]]:
        read = self._commands.pipelined([("GET", self._keys.past(group)) for group in groups])
        for group, found in zip(groups, read, strict=True):
            if isinstance(found, ResponseError) and "WRONGTYPE" in str(found):
                continue  # written by another program
            if isinstance(found, Exception):
                raise self._commands.unavailable(found) from None
            if found is not None:
                yield group, as_text(found)

    def _not_open(self) -> Iterator[Gate]:
        for names in self._commands.scan(self._keys.gate_pattern):
            groups = [self._keys.group(name) for name in names]
            calls = [self._keys.gate(group) for group in groups]
            for group, seen in zip(
                groups, self._commands.run_many(cooldown_group_scripts.READ, calls), strict=True
            ):
                if isinstance(seen, Exception):
                    raise self._commands.unavailable(seen) from None
                if seen:
                    yield gate_of(group, seen)
