"""Leases, marks and groups in Redis 6.2 or later, or in Valkey. Each step is one Lua script, called
by its SHA.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, Final, Self

from redis.exceptions import ResponseError
from redis.sentinel import SentinelConnectionPool

from celery_leases.call import Call
from celery_leases.concurrency.resource_pool import Permit, ResourcePool
from celery_leases.deadlines import LONGEST_CONNECTION_TIMEOUT
from celery_leases.decide.answers import (
    Acquired,
    Holder,
    Refusal,
    Refused,
    Renewal,
    RenewalResult,
)
from celery_leases.decide.copies import waiting_call
from celery_leases.decide.latest import NEWEST, ORDER_TTL, Burst
from celery_leases.errors import LeaseConfigurationError, LeaseStoreMismatch, StoreUnavailable
from celery_leases.groups.slots import NOTHING
from celery_leases.keys import bounded
from celery_leases.stores.interfaces import MarkedLeaseStore
from celery_leases.stores.redis import cooldown_group_scripts, lease_scripts
from celery_leases.stores.redis.clients import ClusterAddress, redis_address
from celery_leases.stores.redis.cluster import Cluster
from celery_leases.stores.redis.commands import ClusterCommands, RedisCommands
from celery_leases.stores.redis.cooldown_groups import RedisGroups
from celery_leases.stores.redis.direct import DirectClient, DirectCommands
from celery_leases.stores.redis.errors import REDIS_ERRORS, advice_for
from celery_leases.stores.redis.values import (
    Keys,
    as_text,
    ask_values,
    holder_of,
    milliseconds,
    room_of,
    slots_of,
    token_prefix,
    value_of,
)

CONNECTIONS: Final = 10
PREFIX: Final = "celery_leases"
"""The default of ``leases_prefix``. Each running record has the name of its lease store, so the
name leaves the default out.
"""


class RedisLeaseStore(MarkedLeaseStore):
    """A :class:`~celery_leases.stores.interfaces.LeaseStore` with marks and groups in Redis.

    *client* is a redis-py client of one server, or a :class:`Cluster`. It must not retry commands,
    because ``StoreUnavailable.executed`` would be wrong. Every key begins with *prefix*. *name*
    identifies the store in rows and messages. *reopen* makes a client with its own connections and
    another timeout in seconds. A server has at most so many *connections*, for one of which a call
    waits *longest_wait* seconds. Every method raises ``StoreUnavailable`` if Redis does not answer
    or refuses the command.
    """

    def __init__(
        self,
        client: Any,
        prefix: str,
        name: str,
        *,
        reopen: Callable[[float], Any] | None = None,
        connections: int = CONNECTIONS,
        longest_wait: float = LONGEST_CONNECTION_TIMEOUT,
    ) -> None:
        clustered = isinstance(client, Cluster)
        kind = (
            ClusterCommands
            if clustered
            else DirectCommands
            if isinstance(client, DirectClient)
            else RedisCommands
        )
        make = client.make_connection if isinstance(client, DirectClient) else Permit
        pool = ResourcePool[Any](connections, make, longest_wait, name)
        self._commands = kind(client, name, prefix, pool)
        self._keys = Keys(prefix, clustered=clustered)
        self.groups = RedisGroups(self._commands, self._keys)
        self.name = name
        self.prefix = prefix
        self._client = client
        self._reopen = reopen
        #: Whether Sentinels name the server.
        self.behind_sentinel = isinstance(
            getattr(client, "connection_pool", None), SentinelConnectionPool
        )
        self._asks_sentinels = False

    @classmethod
    def from_url(
        cls,
        url: str,
        *,
        prefix: str = PREFIX,
        timeout: float = 2.0,
        options: Mapping[str, Any] | None = None,
        connections: int = CONNECTIONS,
        longest_wait: float = LONGEST_CONNECTION_TIMEOUT,
    ) -> Self:
        """The store at *url*, which connects at its first call. Connecting and reading take at most
        *timeout* seconds each, and nothing is retried.

        :func:`~celery_leases.stores.redis.clients.redis_address` says which URLs and which of
        kombu's transport *options* are supported. The name of the store is shortened to the length
        of its column in the records. The option ``global_keyprefix`` is put before
        *prefix*. A server has at most so many *connections*, for one of which a call waits
        *longest_wait* seconds. Raises ``LeaseConfigurationError`` for an unsupported URL or option.
        """
        address = redis_address(url, options)
        prefix = f"{(options or {}).get('global_keyprefix') or ''}{prefix}"
        if isinstance(address, ClusterAddress) and re.match(r"[^{]*\{(\}|[^}]*$)", prefix):
            raise LeaseConfigurationError(
                f"leases_prefix={prefix!r} has a brace that is not a hash tag, so a cluster would store the keys of "
                "one lease on different nodes: leave it out"
            )
        return cls(
            address.client(timeout),
            prefix,
            bounded(address.name if prefix == PREFIX else f"{address.name}/{prefix}"),
            reopen=address.client,
            connections=connections,
            longest_wait=longest_wait,
        )

    def bounded(self, timeout: float, longest_wait: float = LONGEST_CONNECTION_TIMEOUT) -> Self:
        """The same store over a separate connection, on which connecting and reading take at most
        *timeout* seconds each. Behind Sentinel each renewal first asks for the primary, because an
        old one may still answer.

        Calls wait for that connection for *longest_wait* seconds, or less if their leases end
        earlier. A store that was made without *reopen* returns itself.
        """
        if self._reopen is None:
            return self
        found = type(self)(
            self._reopen(timeout),
            self.prefix,
            self.name,
            reopen=self._reopen,
            connections=1,
            longest_wait=longest_wait,
        )
        found._asks_sentinels = found.behind_sentinel  # noqa: SLF001 - of this class
        return found

    def check(self) -> str | None:
        """Run a script that writes; returns warnings.

        Raises ``LeaseConfigurationError``, with advice, for an error that would repeat.
        """
        try:
            self.swap_mark("celery_leases", "started", None, "checked", 0.001)  # leaves nothing
        except StoreUnavailable as error:
            if (line := advice_for(error.__context__)) is not None:
                raise LeaseConfigurationError(f"{error}{line}") from None
            raise
        evicting = [policy for policy in self.eviction_policies() if policy != "noeviction"]
        if not evicting:
            return None
        return (
            f"the lease store {self.name} has maxmemory-policy {evicting[0]}: when its memory is full it deletes "
            "leases, cooldowns and marks, so a held key looks free and a copy of a call may be rescheduled "
            "twice; write maxmemory-policy noeviction in redis.conf, or give leases_url a server of its own"
        )

    def eviction_policies(self) -> list[str]:
        """The ``maxmemory-policy`` of each server that shows it to this user."""
        return self._commands.eviction_policies()

    def servers(self) -> Sequence[Any]:
        """The redis-py clients of all servers that have keys, for facts about the servers."""
        return self._commands.servers()

    def close(self) -> None:
        """Close all connections, also those that other threads use. The next call opens new
        ones.
        """
        self._commands.close()

    def share_trips(self, running: Callable[[], int]) -> None:
        """Send leases that are taken and freed at the same moment in one pipeline, to a server that
        is neither behind Sentinel nor in a cluster.
        """
        self._commands.share_trips(running)

    # -- leases ------------------------------------------------------------------------------------

    def acquire(self, call: Call) -> Acquired | Refused:
        """Take the lease in one round trip; see
        :class:`~celery_leases.stores.interfaces.LeaseStore`.

        The first of these that exists decides: the call's own lease, another lease, a cooldown,
        the group, its limit, its rate. On a cluster the group may be on another node: a
        second round trip asks it, and another one releases the lease if the group does not let the
        body start.
        """
        key = self._keys.lease(call.key.stored)
        given = (
            *(key, self._keys.epoch(call.key.stored)),
            *(token_prefix(call.token), value_of(call), milliseconds(call.options.ttl)),
        )
        if call.group is None:
            reply = self._commands.run_together(lease_scripts.ACQUIRE, *given)
        else:
            reply = self._acquire_in_group(call, call.group, given)
        if isinstance(reply, int):
            return Acquired()
        word, *details = reply
        match as_text(word):
            case "acquired" | "taken":
                return Acquired(probe=bool(details[1]), starts_in=details[0] / 1000)
            case "full":
                return Refused(Refusal.FULL, room=room_of(details))
            case "held":
                return Refused(Refusal.HELD, self._ours(call, key, holder_of(*details)))
            case "cooling":
                left = self._ours(call, key, holder_of(*details)).remaining
                return Refused(Refusal.COOLING, remaining=left)
            case _:
                slots, now = slots_of(details)
                return Refused(
                    Refusal.CLOSED, closed_group=slots.closed_group(call.group or "", now)
                )

    def _acquire_in_group(self, call: Call, group: str, given: Sequence[Any]) -> Any:
        """The reply of the script that takes a lease and what it needs of its group."""
        slots, asked = self._keys.slots(group), ask_values(call.ask or NOTHING)
        if not self._commands.clustered:
            keys, asks = given[:2], given[2:]
            script = lease_scripts.ACQUIRE_IN_GROUP
            return self._commands.run(script, *keys, slots, *asks, *asked)
        reply = self._commands.run(lease_scripts.ACQUIRE, *given)
        word, *details = reply if not isinstance(reply, int) else ("acquired", 0, 0, 0)
        if as_text(word) != "acquired":
            return reply
        who = call.token, details[2], milliseconds(call.options.ttl)
        answer = self._commands.run(cooldown_group_scripts.TAKE, slots, *who, *asked)
        if as_text(answer[0]) != "taken":
            self.release(call.key.stored, call.token)
        return answer

    def _ours(self, call: Call, key: str, holder: Holder) -> Holder:
        """*holder*, after checking that celery_leases wrote its value, and that its worker has its
        records in the same database.
        """
        if not holder.call_id:
            raise StoreUnavailable(
                f"lease store {self.name}: the value of the Redis key {key!r} was not written by celery_leases; "
                "delete it (DEL), or give the application that writes it, or leases_prefix, another prefix",
                False,
            )
        if call.database and holder.database and call.database != holder.database:
            raise LeaseStoreMismatch(
                f"{call.key.key} is held in {self.name} by {holder.host} "
                f"(call {holder.call_id}), whose records are in the database {holder.database}; "
                f"those of this worker ({call.host}) are in the database "
                f"{call.database}: "
                "give each application a leases_prefix of its own, or all workers of one leases_database_url",
                call.key.key,
                call.database,
                holder.database,
            )
        return holder

    def age(self, stored_key: str) -> float:
        """Seconds since the server of this key has had its data: since it was first used after it
        was emptied, restarted or replaced.
        """
        return int(self._commands.run(lease_scripts.AGE, self._keys.epoch(stored_key))) / 1000

    def may_have_lost_leases(self, stored_key: str, seconds: float) -> bool:
        """Whether the server of this key lost its data within the last *seconds*, or evicts keys
        and has evicted some.
        """
        epoch = self._keys.epoch(stored_key)
        return (
            self.age(stored_key) < seconds
            or int(self._commands.run(lease_scripts.EVICTED, epoch)) > 0
        )

    def renew(self, renewals: Sequence[Renewal]) -> list[RenewalResult | StoreUnavailable]:
        """Renew many leases in one round trip, with a result for each. A longer remaining time is
        never shortened.

        If a lease's server does not answer or refuses the command, for example by its ACL, the
        result is the error. If all leases fail, the first error is raised.
        """
        if self._asks_sentinels:
            with suppress(*REDIS_ERRORS):  # without an answer the known primary counts
                # Closes the connection to a former primary.
                self._client.connection_pool.get_master_address()
        in_groups = [place for place, renewal in enumerate(renewals) if renewal.slot is not None]
        calls: list[tuple[Any, ...]] = [
            self._renewal_of_slot(renewals[place]) for place in in_groups
        ]
        calls += [
            (
                lease_scripts.RENEW,
                self._keys.lease(renewal.stored_key),
                token_prefix(renewal.token),
                milliseconds(renewal.ttl),
            )
            for renewal in renewals
        ]
        found = self._commands.run_all(calls)
        replies = found[len(in_groups) :]
        for place, reply in zip(in_groups, found, strict=False):
            if isinstance(reply, Exception):  # the body would outlive its slot
                replies[place] = reply
        errors = [reply for reply in replies if isinstance(reply, Exception)]
        if errors and len(errors) == len(replies):
            raise self._commands.unavailable(errors[0]) from None
        return [
            self._commands.unavailable(reply)
            if isinstance(reply, Exception)
            else RenewalResult(as_text(reply))
            for reply in replies
        ]

    def _renewal_of_slot(self, renewal: Renewal) -> tuple[Any, ...]:
        group, limit = renewal.slot or ("", 0)
        key, ttl = self._keys.slots(group), milliseconds(renewal.ttl)
        return cooldown_group_scripts.RENEW_SLOT, key, renewal.token, ttl, limit

    def reassert(self, call: Call, ttl: float) -> bool:
        """Write a lease again that the server has lost, unless another attempt holds the key
        now.
        """
        key = self._keys.lease(call.key.stored)
        return bool(
            self._commands.run(
                lease_scripts.REASSERT,
                key,
                token_prefix(call.token),
                value_of(call),
                milliseconds(ttl),
            )
        )

    def release(self, stored_key: str, token: str) -> bool:
        """Free the lease if *token* still holds it."""
        return bool(
            self._commands.run(
                lease_scripts.RELEASE, self._keys.lease(stored_key), token_prefix(token)
            )
        )

    def end(self, stored_key: str, token: str) -> None:
        """Free the lease without waiting for Redis, which does so before it handles any later
        command of this process on the same connection.
        """
        self._commands.run_unawaited(
            lease_scripts.RELEASE, self._keys.lease(stored_key), token_prefix(token)
        )

    def cool(self, stored_key: str, token: str, seconds: float) -> bool:
        """Replace the lease by a cooldown of *seconds* if *token* still holds it. A late renewal
        does not extend a cooldown.
        """
        return bool(
            self._commands.run(
                lease_scripts.COOL,
                self._keys.lease(stored_key),
                token_prefix(token),
                milliseconds(seconds),
            )
        )

    def end_cooldown(self, stored_key: str) -> bool:
        """Free the key if it is cooling down."""
        return bool(self._commands.run(lease_scripts.END_COOLDOWN, self._keys.lease(stored_key)))

    def holder(self, stored_key: str) -> Holder | None:
        """The holder of the key; ``None`` while it is cooling down.

        If celery_leases did not write the value, the holder has no ``call_id``.
        """
        return self._look([self._keys.lease(stored_key)])[0]

    def held(self, stored_keys: Sequence[str]) -> set[str]:
        """The keys that are held; one round trip."""
        found = self._look([self._keys.lease(stored_key) for stored_key in stored_keys])
        return {
            stored_key
            for stored_key, holder in zip(stored_keys, found, strict=True)
            if holder is not None
        }

    def live_holders(self, limit: int = 1000) -> Iterator[Holder]:
        """The holders of at most *limit* leases under this prefix; scans the database with
        ``SCAN``.
        """
        names = self._commands.scan(self._keys.lease_pattern)
        found = (holder for page in names for holder in self._look(page) if holder is not None)
        return islice(found, limit)

    # -- marks -------------------------------------------------------------------------------------

    def mark(self, stored_key: str, name: str) -> str | None:
        """Read a mark."""
        found = self._commands.execute("GET", self._keys.mark(stored_key, name))
        return None if found is None else as_text(found)

    def waiting(self, stored_key: str) -> list[str]:
        """The ids of the calls of the key that wait, as their marks say; scans the database with
        ``SCAN``.
        """
        names = [
            name
            for page in self._commands.scan(self._keys.marks_pattern(stored_key))
            for name in page
        ]
        values = [self._commands.execute("GET", name) for name in names]
        calls = (
            waiting_call(self._keys.mark_name(name), as_text(value))
            for name, value in zip(names, values, strict=True)
            if value is not None
        )
        return sorted({call for call in calls if call is not None})

    def swap_mark(
        self, stored_key: str, name: str, expected: str | None, value: str, ttl: float
    ) -> bool:
        """Set a mark for *ttl* seconds if it is absent, equals *expected*, or has this value
        already.
        """
        key = self._keys.mark(stored_key, name)
        given = int(expected is not None), expected or ""
        return bool(
            self._commands.run(lease_scripts.SWAP_MARK, key, *given, value, milliseconds(ttl))
        )

    def new_order(self, stored_key: str) -> int:
        """The order of a new call, by the clock of the server."""
        return self._order(stored_key, 0)

    def note_order(self, stored_key: str, order: int, missing: int = 0) -> None:
        """Note a call, unless a newer one is noted than the missing one."""
        self._order(stored_key, order, missing)

    def _order(self, stored_key: str, order: int, missing: int = 0) -> int:
        key, ttl = self._keys.mark(stored_key, NEWEST), milliseconds(ORDER_TTL)
        return int(self._commands.run(lease_scripts.NEW_ORDER, key, order, ttl, missing))

    def burst(self, stored_key: str) -> Burst:
        """The newest call, and the first one of its burst."""
        key = self._keys.mark(stored_key, NEWEST)
        return Burst(*map(int, self._commands.run(lease_scripts.READ_BURST, key)))

    def end_burst(self, stored_key: str, order: int) -> None:
        """Note that a run begins."""
        key = self._keys.mark(stored_key, NEWEST)
        self._commands.run(lease_scripts.END_BURST, key, order, milliseconds(ORDER_TTL))

    def _look(self, keys: Sequence[str]) -> list[Holder | None]:
        replies = self._commands.pipelined(
            [command for key in keys for command in (("GET", key), ("PTTL", key))]
        )
        holders: list[Holder | None] = []
        for value, left in zip(replies[::2], replies[1::2], strict=True):
            foreign = isinstance(value, ResponseError) and "WRONGTYPE" in str(value)
            for reply in (left, None if foreign else value):
                if isinstance(reply, Exception):
                    raise self._commands.unavailable(reply) from None
            gone = value is None or left == -2
            free = gone or (not foreign and as_text(value).startswith(lease_scripts.COOLING))
            holders.append(None if free else holder_of("" if foreign else value, left))
        return holders
