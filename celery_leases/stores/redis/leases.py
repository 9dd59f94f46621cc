"""Leases, marks and gates in Redis or Valkey, 6.2 or later: one Lua script per step, called by its
SHA.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final, Self

from redis.exceptions import ResponseError

from celery_leases.concurrency.resource_pool import ResourcePool, Turn
from celery_leases.errors import LeaseConfigurationError, LeaseStoreMismatch, StoreUnavailable
from celery_leases.protocol.deadlines import LONGEST_WAIT
from celery_leases.protocol.ports import (
    Acquired,
    Cooling,
    Held,
    Holder,
    Renewal,
    RenewalResult,
    Shut,
)
from celery_leases.protocol.records import ClaimRequest
from celery_leases.stores.redis import group_scripts, lease_scripts
from celery_leases.stores.redis.clients import ClusterAddress, redis_address
from celery_leases.stores.redis.cluster import Cluster
from celery_leases.stores.redis.direct_client import DirectClient
from celery_leases.stores.redis.errors import line_to_write
from celery_leases.stores.redis.groups import RedisGates
from celery_leases.stores.redis.scripts import ClusterScripts, DirectScripts, RedisScripts
from celery_leases.stores.redis.values import (
    Keys,
    as_text,
    begin,
    gate_of,
    holder_of,
    milliseconds,
    value_of,
)

TURNS: Final = 10


class RedisLeaseStore(RedisGates):
    """A :class:`~celery_leases.protocol.ports.LeaseStore`, ``MarkStore`` and ``GateStore`` in
    Redis.

    *client* is a redis-py client of one server, or a :class:`Cluster`. It must not repeat commands,
    because that makes ``StoreUnavailable.executed`` wrong. *prefix* begins every key, *name*
    identifies the store in rows and messages. *reopen* makes a client with its own connections and
    another timeout in seconds. Each call uses one of *turns*, which limit the connections. Every
    method raises ``StoreUnavailable`` when Redis does not answer or refuses.
    """

    in_records = False

    def __init__(
        self,
        client: Any,
        prefix: str,
        name: str,
        *,
        reopen: Callable[[float], Any] | None = None,
        turns: ResourcePool[Turn] | None = None,
    ) -> None:
        clustered = isinstance(client, Cluster)
        kind = (
            ClusterScripts
            if clustered
            else DirectScripts
            if isinstance(client, DirectClient)
            else RedisScripts
        )
        scripts = kind(client, name, prefix, turns or ResourcePool(TURNS, Turn, LONGEST_WAIT))
        super().__init__(scripts, Keys(prefix, clustered=clustered))
        self.name = name
        self.prefix = prefix
        self._client = client
        self._reopen = reopen

    @classmethod
    def from_url(
        cls,
        url: str,
        *,
        prefix: str = "celery_leases",
        timeout: float = 2.0,
        options: Mapping[str, Any] | None = None,
        turns: ResourcePool[Turn] | None = None,
    ) -> Self:
        """The store at *url*; connecting and reading take at most *timeout* seconds each, nothing
        is retried.

        *url* and *options*, which are kombu's transport options, are read by
        :func:`~celery_leases.stores.redis.clients.redis_address`; ``global_keyprefix`` comes before
        *prefix*. Each call uses one of *turns*, so a server has no more connections than there are
        turns. Raises ``LeaseConfigurationError`` for any other URL. No connection is made before
        the first call.
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
            f"{address.name}/{prefix}",
            reopen=address.client,
            turns=turns,
        )

    def bounded(self, timeout: float, longest_wait: float = LONGEST_WAIT) -> Self:
        """The same store over one connection of its own, which connects and reads for at most
        *timeout* seconds.

        Callers wait for it for *longest_wait* seconds, unless their leases allow less. A store made
        around a given client without *reopen* cannot do that, and returns itself.
        """
        if self._reopen is None:
            return self
        turns = ResourcePool(1, Turn, longest_wait)
        return type(self)(
            self._reopen(timeout), self.prefix, self.name, reopen=self._reopen, turns=turns
        )

    def check(self) -> str | None:
        """Run a script that writes; returns warnings.

        Raises ``LeaseConfigurationError``, with advice, for an error that repetition does not cure.
        """
        try:
            self.swap_mark("celery_leases", "started", None, "checked", 1.0)
        except StoreUnavailable as error:
            if (line := line_to_write(error.__context__)) is not None:
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
        return self._scripts.eviction_policies()

    def servers(self) -> Sequence[Any]:
        """redis-py clients of all servers that have keys, for questions about the servers."""
        return self._scripts.servers()

    def close(self) -> None:
        """Close all connections, those in use by other threads too; the next call would open new
        ones.
        """
        self._scripts.close()

    # -- leases ------------------------------------------------------------------------------------

    def acquire(self, claim_request: ClaimRequest) -> Acquired | Held | Cooling | Shut:
        """Take the lease in one round trip; see :class:`~celery_leases.protocol.ports.LeaseStore`.

        The first match decides: the request's own lease, another lease, a cooldown, the group's
        gate. On a cluster the gate is on another node: a second round trip reads it, and if it is
        closed a third one gives the lease back.
        """
        keys = (
            self._keys.lease(claim_request.stored_key),
            self._keys.epoch(claim_request.stored_key),
        )
        asked = begin(claim_request.token), value_of(claim_request), milliseconds(claim_request.ttl)
        gate = self._keys.gate(claim_request.group) if claim_request.group is not None else ()
        in_two_trips = bool(gate) and self._scripts.clustered
        if gate and not in_two_trips:
            reply = self._scripts.run(lease_scripts.ACQUIRE_IN_GROUP, *keys, *gate, *asked)
        else:
            reply = self._scripts.run(lease_scripts.ACQUIRE, *keys, *asked)
        if isinstance(reply, int) and not in_two_trips:
            return Acquired()
        word, *details = reply if not isinstance(reply, int) else ("acquired", 0, 0)
        if as_text(word) == "acquired" and in_two_trips:
            word, *details = self._scripts.run(group_scripts.ENTER, *gate, *asked, details[1])
            if as_text(word) == "shut":
                self.release(claim_request.stored_key, claim_request.token)
        match as_text(word):
            case "acquired":
                return Acquired(bool(details[0]))
            case "open" | "probe" as passed:
                return Acquired(passed == "probe")
            case "held":
                return Held(self._ours(claim_request, keys[0], holder_of(*details)))
            case "cooling":
                return Cooling(self._ours(claim_request, keys[0], holder_of(*details)).remaining)
            case _:
                return Shut(gate_of(claim_request.group or "", details))

    def _ours(self, claim_request: ClaimRequest, key: str, holder: Holder) -> Holder:
        """*holder*, unless celery_leases did not write its value, or it belongs to a worker with
        other records.
        """
        if not holder.call_id:
            raise StoreUnavailable(
                f"lease store {self.name}: the value of the Redis key {key!r} was not written by celery_leases; "
                "delete it (DEL), or give the application that writes it, or leases_prefix, another prefix",
                False,
            )
        if claim_request.database and holder.database and claim_request.database != holder.database:
            raise LeaseStoreMismatch(
                f"{claim_request.key} is held in {self.name} by {holder.host} "
                f"(call {holder.call_id}), whose records are in the database {holder.database}; "
                f"those of this worker ({claim_request.holder}) are in the database "
                f"{claim_request.database}: "
                "give each application a leases_prefix of its own, or all workers of one leases_database_url",
                claim_request.key,
                claim_request.database,
                holder.database,
            )
        return holder

    def age(self, stored_key: str) -> float:
        """Seconds since the server of this key was first seen in its present state: not emptied,
        restarted or replaced.
        """
        return int(self._scripts.run(lease_scripts.AGE, self._keys.epoch(stored_key))) / 1000

    def renew(self, renewals: Sequence[Renewal]) -> list[RenewalResult | StoreUnavailable]:
        """Renew many leases in one round trip, with a result for each; a longer remaining time is
        never shortened.

        If the server of one lease does not answer, or refuses it (an ACL, for example), its result
        is the error; if all fail, that error is raised. A probe's slot has the form of a lease and
        is renewed like one.
        """
        leases = [(self._keys.lease(renewal.stored_key), renewal) for renewal in renewals]
        slots = [
            (self._keys.gate(renewal.probe)[2], renewal)
            for renewal in renewals
            if renewal.probe is not None
        ]
        calls = [
            (key, begin(renewal.token), milliseconds(renewal.ttl))
            for key, renewal in leases + slots
        ]
        replies = self._scripts.run_many(lease_scripts.RENEW, calls)[: len(leases)]
        errors = [reply for reply in replies if isinstance(reply, Exception)]
        if errors and len(errors) == len(replies):
            raise self._scripts.unavailable(errors[0]) from None
        return [
            self._scripts.unavailable(reply)
            if isinstance(reply, Exception)
            else RenewalResult(as_text(reply))
            for reply in replies
        ]

    def reassert(self, claim_request: ClaimRequest) -> bool:
        """Restore a lease that the store has lost, unless another attempt holds the key now."""
        key = self._keys.lease(claim_request.stored_key)
        return bool(
            self._scripts.run(
                lease_scripts.REASSERT,
                key,
                begin(claim_request.token),
                value_of(claim_request),
                milliseconds(claim_request.ttl),
            )
        )

    def release(self, stored_key: str, token: str) -> bool:
        """Free the lease if *token* still holds it."""
        return bool(
            self._scripts.run(lease_scripts.RELEASE, self._keys.lease(stored_key), begin(token))
        )

    def cool(self, stored_key: str, token: str, seconds: float) -> bool:
        """Replace the lease by a cooldown of *seconds* if *token* still holds it. A late renewal
        does not match a cooldown.
        """
        return bool(
            self._scripts.run(
                lease_scripts.COOL,
                self._keys.lease(stored_key),
                begin(token),
                milliseconds(seconds),
            )
        )

    def end_cooldown(self, stored_key: str) -> bool:
        """Free the key if it is cooling down."""
        return bool(self._scripts.run(lease_scripts.END_COOLDOWN, self._keys.lease(stored_key)))

    def holder(self, stored_key: str) -> Holder | None:
        """The holder of the key; ``None`` while it is cooling down.

        A value that celery_leases did not write gives a holder without ``call_id``.
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
        """The holders of leases under this prefix, at most *limit*; walks the database with
        ``SCAN``.
        """
        names = self._scripts.scan(self._keys.every_lease)
        found = (holder for page in names for holder in self._look(page) if holder is not None)
        return islice(found, limit)

    # -- marks -------------------------------------------------------------------------------------

    def mark(self, stored_key: str, name: str) -> str | None:
        """Read a mark."""
        return self._scripts.read(self._keys.mark(stored_key, name))

    def swap_mark(
        self, stored_key: str, name: str, expected: str | None, value: str, ttl: float
    ) -> bool:
        """Set a mark for *ttl* seconds if it is absent or equals *expected*; having that value
        already counts.
        """
        key = self._keys.mark(stored_key, name)
        given = int(expected is not None), expected or ""
        return bool(
            self._scripts.run(lease_scripts.SWAP_MARK, key, *given, value, milliseconds(ttl))
        )

    def _look(self, keys: Sequence[str]) -> list[Holder | None]:
        replies = self._scripts.pipelined(
            [command for key in keys for command in (("GET", key), ("PTTL", key))]
        )
        holders: list[Holder | None] = []
        for value, left in zip(replies[::2], replies[1::2], strict=True):
            foreign = isinstance(value, ResponseError) and "WRONGTYPE" in str(value)
            for reply in (left, None if foreign else value):
                if isinstance(reply, Exception):
                    raise self._scripts.unavailable(reply) from None
            gone = value is None or left == -2
            free = gone or (not foreign and as_text(value).startswith(lease_scripts.COOLING))
            holders.append(None if free else holder_of("" if foreign else value, left))
        return holders
