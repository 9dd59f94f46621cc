"""The gates of cooldown groups in Redis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from redis.exceptions import ResponseError

from celery_leases.groups.group import Gate
from celery_leases.groups.history import RETENTION
from celery_leases.groups.slots import Ask, Room, Slots, load
from celery_leases.stores.group_closing import ClosingGroups
from celery_leases.stores.redis import cooldown_group_scripts, lease_scripts
from celery_leases.stores.redis.commands import RedisCommands
from celery_leases.stores.redis.lease_scripts import Script
from celery_leases.stores.redis.values import (
    Keys,
    as_text,
    ask_values,
    gate_of,
    milliseconds,
    room_of,
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

    def slots(
        self, groups: Sequence[str] | None = None, limit: int = 1000
    ) -> Mapping[str, tuple[Slots, float]]:
        """The slots of the groups, and the time of their servers."""
        if groups is None:
            pages = self._commands.scan(self._keys.slots_pattern)
            groups = [*islice((self._keys.group(name) for page in pages for name in page), limit)]
        found = self._run_each(cooldown_group_scripts.READ_SLOTS, dict.fromkeys(groups, ()))
        return {
            group: (load(as_text(text) if text else None).at(now), float(now))
            for group, (text, now) in found.items()
        }

    def room(self, asked: Mapping[str, Ask]) -> Mapping[str, Room]:
        """The room of each group, in one round trip."""
        calls = {group: ask_values(ask) for group, ask in asked.items()}
        found = self._run_each(cooldown_group_scripts.ROOM, calls)
        return {group: room_of(reply) for group, reply in found.items()}

    def release_slot(self, group: str, token: str) -> None:
        """Free the slot of *token* without waiting for Redis."""
        self._commands.run_unawaited(
            cooldown_group_scripts.RELEASE_SLOT, self._keys.slots(group), token
        )

    def _run_each(self, script: Script, calls: Mapping[str, tuple[Any, ...]]) -> Mapping[str, Any]:
        """The reply of *script* on the slots of each group; the first error is raised."""
        replies = self._commands.run_many(
            script, [(self._keys.slots(group), *given) for group, given in calls.items()]
        )
        for reply in replies:
            if isinstance(reply, Exception):
                raise self._commands.unavailable(reply) from None
        return dict(zip(calls, replies, strict=True))

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
