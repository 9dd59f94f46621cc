"""Leases, marks and gates in Redis or Valkey, 6.2 or later: one Lua script per step, called by its SHA."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final, Self

from redis.exceptions import ResponseError

from celery_leases.core.errors import LeaseConfigurationError, LeaseStoreMismatch, StoreUnavailable
from celery_leases.core.ports import Acquired, Cooling, Held, Holder, Kept, Renewal, Shut
from celery_leases.core.records import Bid
from celery_leases.core.validity import LONGEST_WAIT
from celery_leases.process.lending import Lender, Turn
from celery_leases.stores import lua, lua_gates
from celery_leases.stores.redis_address import ClusterAddress, redis_address
from celery_leases.stores.redis_cluster import Cluster
from celery_leases.stores.redis_direct import DirectClient
from celery_leases.stores.redis_errors import line_to_write
from celery_leases.stores.redis_gates import RedisGates
from celery_leases.stores.redis_scripts import ClusterScripts, DirectScripts, RedisScripts
from celery_leases.stores.redis_values import (
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
    """A :class:`~celery_leases.core.ports.LeaseStore`, ``MarkStore`` and ``GateStore`` in Redis.

    *client* is a redis-py client of one server, or something like it, that must not repeat commands by itself (a
    repeated command makes ``StoreUnavailable.executed`` wrong), or the nodes of a cluster. *prefix* begins every key,
    *name* is the store's identity in rows and messages. *reopen* makes a client over connections of its own with
    another timeout in seconds. Each call takes one of *turns*.
    Every method raises ``StoreUnavailable`` when Redis does not answer or refuses.
    """

    in_records = False

    def __init__(
        self,
        client: Any,
        prefix: str,
        name: str,
        *,
        reopen: Callable[[float], Any] | None = None,
        turns: Lender[Turn] | None = None,
    ) -> None:
        clustered = isinstance(client, Cluster)
        kind = ClusterScripts if clustered else DirectScripts if isinstance(client, DirectClient) else RedisScripts
        scripts = kind(client, name, prefix, turns or Lender(TURNS, Turn, LONGEST_WAIT))
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
        turns: Lender[Turn] | None = None,
    ) -> Self:
        """The store at *url*; connecting and reading take at most *timeout* seconds each, nothing is retried.

        *url* and *options*, which are kombu's transport options, are read by
        :func:`~celery_leases.stores.redis_address.redis_address`; ``global_keyprefix`` comes before *prefix*.
        Of *turns* each call takes one, so that a server has no more connections than those.
        Raises ``LeaseConfigurationError`` for any other URL.
        No connection is made before the first call.
        """
        address = redis_address(url, options)
        prefix = f"{(options or {}).get('global_keyprefix') or ''}{prefix}"
        if isinstance(address, ClusterAddress) and re.match(r"[^{]*\{(\}|[^}]*$)", prefix):
            raise LeaseConfigurationError(
                f"leases_prefix={prefix!r} has a brace that is no hash tag, so that a cluster would part the keys of "
                "one lease: leave it out"
            )
        return cls(address.client(timeout), prefix, f"{address.name}/{prefix}", reopen=address.client, turns=turns)

    def bounded(self, timeout: float, longest_wait: float = LONGEST_WAIT) -> Self:
        """The same store over one connection of its own, which connects and reads for at most *timeout* seconds.

        Callers wait for it for *longest_wait* seconds, unless their leases allow less. A store made around a given
        client without *reopen* cannot do that, and returns itself.
        """
        if self._reopen is None:
            return self
        turns = Lender(1, Turn, longest_wait)
        return type(self)(self._reopen(timeout), self.prefix, self.name, reopen=self._reopen, turns=turns)

    def check(self) -> None:
        """Run a script that writes. Raises ``LeaseConfigurationError`` for what the server will always refuse."""
        try:
            self.swap_mark("celery_leases", "started", None, "checked", 1.0)
        except StoreUnavailable as error:
            if (line := line_to_write(error.__context__)) is not None:
                raise LeaseConfigurationError(f"{error}{line}") from None
            raise

    def eviction_policies(self) -> list[str]:
        """The ``maxmemory-policy`` of each server that says so to this user."""
        return self._scripts.eviction_policies()

    def close(self) -> None:
        """Close all connections, those in use by other threads too; the next call would open new ones."""
        self._scripts.close()

    # -- leases --------------------------------------------------------------------------------------------

    def acquire(self, bid: Bid) -> Acquired | Held | Cooling | Shut:
        """Take the lease in one round trip; see :class:`~celery_leases.core.ports.LeaseStore`.

        What comes first decides: our own lease, another's, a cooldown, the group's gate.
        On a cluster the gate is on another node: it is asked in a second trip, and where it is shut a third one gives
        the lease back.
        """
        keys = self._keys.lease(bid.stored_key), self._keys.epoch(bid.stored_key)
        asked = begin(bid.token), value_of(bid), milliseconds(bid.ttl)
        gate = self._keys.gate(bid.group) if bid.group is not None else ()
        in_two_trips = bool(gate) and self._scripts.clustered
        if gate and not in_two_trips:
            reply = self._scripts.run(lua.ACQUIRE_IN_GROUP, *keys, *gate, *asked)
        else:
            reply = self._scripts.run(lua.ACQUIRE, *keys, *asked)
        if isinstance(reply, int) and not in_two_trips:
            return Acquired()
        word, *told = reply if not isinstance(reply, int) else ("acquired", 0, 0)
        if as_text(word) == "acquired" and in_two_trips:
            word, *told = self._scripts.run(lua_gates.ENTER, *gate, *asked, told[1])
            if as_text(word) == "shut":
                self.release(bid.stored_key, bid.token)
        match as_text(word):
            case "acquired":
                return Acquired(bool(told[0]))
            case "open" | "probe" as passed:
                return Acquired(passed == "probe")
            case "held":
                return Held(self._ours(bid, keys[0], holder_of(*told)))
            case "cooling":
                return Cooling(self._ours(bid, keys[0], holder_of(*told)).remaining)
            case _:
                return Shut(gate_of(bid.group or "", told))

    def _ours(self, bid: Bid, key: str, holder: Holder) -> Holder:
        """*holder*, unless the value that names it is not of our making, or of a worker with other records."""
        if not holder.call_id:
            raise StoreUnavailable(
                f"lease store {self.name}: the value of the Redis key {key!r} was not written by celery_leases; "
                "delete it (DEL), or give the application that writes it, or leases_prefix, another prefix",
                False,
            )
        if bid.database and holder.database and bid.database != holder.database:
            raise LeaseStoreMismatch(
                f"{bid.key} is held in {self.name} by {holder.host} (call {holder.call_id}), whose records are in the "
                f"database {holder.database}; those of this worker ({bid.holder}) are in the database {bid.database}: "
                "give each application a leases_prefix of its own, or all workers of one leases_database_url",
                bid.key,
                bid.database,
                holder.database,
            )
        return holder

    def age(self, stored_key: str) -> float:
        """Seconds since the server of this key was first seen as it is now: not emptied, restarted or replaced."""
        return int(self._scripts.run(lua.AGE, self._keys.epoch(stored_key))) / 1000

    def renew(self, renewals: Sequence[Renewal]) -> list[Kept | StoreUnavailable]:
        """Renew many leases in one round trip, with a result for each; a longer remaining time is never cut.

        Where the server of one lease does not answer, or refuses that one (an ACL, say), its result is the error; when
        all fail, that is raised. A probe's slot is written like a lease, and renewed like one.
        """
        leases = [(self._keys.lease(renewal.stored_key), renewal) for renewal in renewals]
        slots = [(self._keys.gate(renewal.probe)[2], renewal) for renewal in renewals if renewal.probe is not None]
        calls = [(key, begin(renewal.token), milliseconds(renewal.ttl)) for key, renewal in leases + slots]
        replies = self._scripts.run_many(lua.RENEW, calls)[: len(leases)]
        errors = [reply for reply in replies if isinstance(reply, Exception)]
        if errors and len(errors) == len(replies):
            raise self._scripts.unavailable(errors[0]) from None
        return [
            self._scripts.unavailable(reply) if isinstance(reply, Exception) else Kept(as_text(reply))
            for reply in replies
        ]

    def reassert(self, bid: Bid) -> bool:
        """Set a lease again that the store forgot, unless somebody else holds the key now."""
        key = self._keys.lease(bid.stored_key)
        return bool(self._scripts.run(lua.REASSERT, key, begin(bid.token), value_of(bid), milliseconds(bid.ttl)))

    def release(self, stored_key: str, token: str) -> bool:
        """Free the lease if *token* still holds it."""
        return bool(self._scripts.run(lua.RELEASE, self._keys.lease(stored_key), begin(token)))

    def cool(self, stored_key: str, token: str, seconds: float) -> bool:
        """Turn the lease that *token* still holds into a cooldown of so many seconds, which no renewal matches."""
        return bool(self._scripts.run(lua.COOL, self._keys.lease(stored_key), begin(token), milliseconds(seconds)))

    def end_cooldown(self, stored_key: str) -> bool:
        """Free the key if it is cooling."""
        return bool(self._scripts.run(lua.END_COOLDOWN, self._keys.lease(stored_key)))

    def holder(self, stored_key: str) -> Holder | None:
        """Who holds the key, where nobody does while it is cooling.

        A value that is not of our making gives a holder without ``call_id``.
        """
        return self._look([self._keys.lease(stored_key)])[0]

    def held(self, stored_keys: Sequence[str]) -> set[str]:
        """Those of the keys that somebody holds; one round trip."""
        found = self._look([self._keys.lease(stored_key) for stored_key in stored_keys])
        return {stored_key for stored_key, holder in zip(stored_keys, found, strict=True) if holder is not None}

    def holders(self, limit: int = 1000) -> Iterator[tuple[str, Holder]]:
        """The live leases, at most *limit*, as pairs of stored key and holder. Walks the database with ``SCAN``."""
        return islice(self._live(), limit)

    # -- marks ---------------------------------------------------------------------------------------------

    def mark(self, stored_key: str, name: str) -> str | None:
        """Read a mark."""
        return self._scripts.read(self._keys.mark(stored_key, name))

    def swap_mark(self, stored_key: str, name: str, expected: str | None, value: str, ttl: float) -> bool:
        """Set a mark for *ttl* seconds if it is absent or equals *expected*; having that value already counts."""
        key = self._keys.mark(stored_key, name)
        given = int(expected is not None), expected or ""
        return bool(self._scripts.run(lua.SWAP_MARK, key, *given, value, milliseconds(ttl)))

    def _live(self) -> Iterator[tuple[str, Holder]]:
        for names in self._scripts.scan(self._keys.every_lease):
            for name, holder in zip(names, self._look(names), strict=True):
                if holder is not None:
                    yield self._keys.stored_key(name), holder

    def _look(self, keys: Sequence[str]) -> list[Holder | None]:
        replies = self._scripts.pipelined([command for key in keys for command in (("GET", key), ("PTTL", key))])
        holders: list[Holder | None] = []
        for value, left in zip(replies[::2], replies[1::2], strict=True):
            foreign = isinstance(value, ResponseError) and "WRONGTYPE" in str(value)
            for reply in (left, None if foreign else value):
                if isinstance(reply, Exception):
                    raise self._scripts.unavailable(reply) from None
            gone = value is None or left == -2
            free = gone or (not foreign and as_text(value).startswith(lua.COOLING))
            holders.append(None if free else holder_of("" if foreign else value, left))
        return holders
