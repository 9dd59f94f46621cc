"""The state of groups in Redis."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final

from redis.exceptions import ResponseError

from celery_leases.errors import StoreUnavailable
from celery_leases.groups.group import ClosedGroup
from celery_leases.groups.history import RETENTION
from celery_leases.groups.slots import Ask, Room, Slots
from celery_leases.stores.group_closing import Change, ClosingGroups, noted
from celery_leases.stores.redis import cooldown_group_scripts
from celery_leases.stores.redis.commands import RedisCommands
from celery_leases.stores.redis.lease_scripts import Script
from celery_leases.stores.redis.values import (
    Keys,
    as_text,
    ask_values,
    milliseconds,
    room_of,
    slots_of,
)

CHANGE_TRIES: Final = 10
"""How often a compare-and-set is retried when other workers change the same group concurrently."""


class RedisGroups(ClosingGroups):
    """A :class:`~celery_leases.stores.interfaces.GroupStore` in Redis.

    If the server loses its data, all groups are open. The next failure of a group closes it
    again.
    """

    def __init__(self, commands: RedisCommands, keys: Keys) -> None:
        self._commands = commands
        self._keys = keys

    def all(self, limit: int = 1000) -> Iterator[ClosedGroup]:
        """At most *limit* groups that are not open; scans the database with ``SCAN``."""
        closed_groups = (slots.closed_group(group, now) for group, slots, now in self._all_slots())
        return islice(
            (closed_group for closed_group in closed_groups if closed_group is not None), limit
        )

    def slots(
        self, groups: Sequence[str] | None = None, limit: int = 1000
    ) -> Mapping[str, tuple[Slots, float]]:
        """The slots of the groups, and the time of their servers."""
        if groups is None:
            return {group: (slots, now) for group, slots, now in islice(self._all_slots(), limit)}
        found = self._run_each(cooldown_group_scripts.READ_SLOTS, dict.fromkeys(groups, ()))
        return {group: slots_of(reply) for group, reply in found.items()}

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

    def _change_group(self, group: str, token: str, change: Change) -> tuple[Slots, float] | None:
        keys = self._keys.slots(group), self._keys.past(group)
        for _ in range(CHANGE_TRIES):
            *seen, past = self._commands.run(cooldown_group_scripts.READ_WITH_HISTORY, *keys)
            before, now = slots_of(seen)
            after = change(before, now)
            if after is None:
                return None
            known = as_text(past) if past else None
            note = noted(known, before, after, group, now)
            if note is None:  # it stays closed for as long
                if token in before.held:
                    self.release_slot(group, token)
                return after, now
            if self._swap_group(keys, token, before, after, now, note):
                return after, now
        raise StoreUnavailable(
            f"the group {group} changed {CHANGE_TRIES} times while it was being changed", False
        )

    def _swap_group(
        self,
        keys: tuple[str, str],
        token: str,
        before: Slots,
        after: Slots,
        now: float,
        past: str,
    ) -> bool:
        history, closed = (past, milliseconds(RETENTION)), after.closed
        if closed is None:
            who = token if before.probes(token, now) else ""
            return bool(self._commands.run(cooldown_group_scripts.OPEN, *keys, who, *history))
        as_seen = (0, 0)
        if before.closed is not None:
            as_seen = before.closed.in_a_row, int(before.closed.ends > now)
        times = (math.ceil(until - now) for until in (closed.ends, closed.counts))
        given = (
            token,
            *as_seen,
            int(before.probes(token, now)),
            closed.in_a_row,
            *times,
            closed.why,
        )
        return bool(self._commands.run(cooldown_group_scripts.CLOSE, *keys, *given, *history))

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

    def _all_slots(self) -> Iterator[tuple[str, Slots, float]]:
        for names in self._commands.scan(self._keys.slots_pattern):
            groups = [self._keys.group(name) for name in names]
            found = self._run_each(cooldown_group_scripts.READ_SLOTS, dict.fromkeys(groups, ()))
            for group, reply in found.items():
                yield group, *slots_of(reply)
