"""Calls Redis: scripts by their SHA, pipelines, scans, and the translation of errors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from redis.exceptions import NoScriptError

from celery_leases.concurrency.resource_pool import PoolExhausted, ResourcePool, Turn
from celery_leases.errors import StoreUnavailable
from celery_leases.stores.redis.cluster import Cluster
from celery_leases.stores.redis.direct_client import DirectClient, packed
from celery_leases.stores.redis.errors import REDIS_ERRORS, unavailable
from celery_leases.stores.redis.lease_scripts import Script
from celery_leases.stores.redis.values import as_text

_SCAN_COUNT = 500


class RedisScripts:
    """Sends commands by *client* for the store called *name*, whose keys begin with *prefix*.

    Every method raises ``StoreUnavailable``.
    """

    #: Whether keys of one script must share a hash tag.
    clustered = False

    def __init__(self, client: Any, name: str, prefix: str, turns: ResourcePool[Turn]) -> None:
        self._client = client
        self._name = name
        self._prefix = prefix
        self._turns = turns

    def run(self, script: Script, *keys_and_args: Any) -> Any:
        """Run one script; a second round trip only when the server lost it."""
        turn = self._turn()
        try:
            try:
                return self._call(script, keys_and_args)
            except NoScriptError:
                return self._ask("EVAL", script.text, script.keys, *keys_and_args)
        except REDIS_ERRORS as error:
            raise self.unavailable(error) from None
        finally:
            self._turns.take_back(turn)

    def read(self, key: str) -> str | None:
        """The value of a key."""
        turn = self._turn()
        try:
            found = self._ask("GET", key)
        except REDIS_ERRORS as error:
            raise self.unavailable(error) from None
        finally:
            self._turns.take_back(turn)
        return None if found is None else as_text(found)

    def run_many(self, script: Script, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
        """One reply or error per call; a second round trip only when the server lost the script."""
        replies = self.pipelined([("EVALSHA", script.sha, script.keys, *call) for call in calls])
        unknown = [place for place, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
        if unknown:
            again = self.pipelined(
                [("EVAL", script.text, script.keys, *calls[place]) for place in unknown]
            )
            for place, reply in zip(unknown, again, strict=True):
                replies[place] = reply
        return replies

    def pipelined(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """One reply or error per command."""
        if not commands:
            return []
        turn = self._turn()
        try:
            return self._ask_many(commands)
        except REDIS_ERRORS as error:
            raise self.unavailable(error) from None
        finally:
            self._turns.take_back(turn)

    def scan(self, pattern: str) -> Iterator[list[str]]:
        """The names of keys in batches, none of them twice."""
        seen: set[str] = set()
        try:
            for client in self.servers():
                cursor = -1
                while cursor:
                    turn = self._turn()
                    try:
                        cursor, found = self._page(client, max(cursor, 0), pattern)
                    finally:
                        self._turns.take_back(turn)
                    names = [
                        name for name in dict.fromkeys(map(as_text, found)) if name not in seen
                    ]
                    seen.update(names)
                    yield names
                    cursor = int(cursor)
        except REDIS_ERRORS as error:
            raise self.unavailable(error) from None

    def eviction_policies(self) -> list[str]:
        """The ``maxmemory-policy`` of each server that shows it to this user by ``INFO`` or
        ``CONFIG``.
        """
        found: list[str] = []
        for client in self.servers():
            policy: Any = None
            with suppress(*REDIS_ERRORS):
                policy = client.info("memory").get("maxmemory_policy")
            if policy is None:
                with suppress(*REDIS_ERRORS):
                    policy = client.config_get("maxmemory-policy").get("maxmemory-policy")
            if policy is not None:
                found.append(as_text(policy))
        return found

    def unavailable(self, error: Exception) -> StoreUnavailable:
        """The error to raise for *error*."""
        pools = [client.connection_pool for client in self._open()]
        secret = pools[0].connection_kwargs.get("password") if pools else None
        return unavailable(self._name, error, secret, self._prefix)

    def close(self) -> None:
        """Close all connections, those in use by other threads too; the next call would open new
        ones.
        """
        for client in self._open():
            pool = client.connection_pool
            pool.disconnect()
            for sentinel in getattr(getattr(pool, "sentinel_manager", None), "sentinels", ()):
                sentinel.connection_pool.disconnect()

    def _turn(self) -> Turn:
        """The right to use one connection to a server."""
        try:
            return self._turns.lend()
        except PoolExhausted as error:
            shared = f"{self._name}: connections of this process: {error}; see leases_pool_size"
            raise StoreUnavailable(shared, False) from None

    def _page(self, client: Any, cursor: int, pattern: str) -> tuple[Any, list[Any]]:
        """A page of names of keys, and where the next one begins; 0 after the last."""
        page: tuple[Any, list[Any]] = client.scan(cursor, match=pattern, count=_SCAN_COUNT)
        return page

    def _call(self, script: Script, keys_and_args: Sequence[Any]) -> Any:
        return self._ask("EVALSHA", script.sha, script.keys, *keys_and_args)

    def _ask(self, *command: Any) -> Any:
        return self._client.execute_command(*command)

    def _ask_many(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        with self._client.pipeline(transaction=False) as pipeline:
            for command in commands:
                pipeline.execute_command(*command)
            return list(pipeline.execute(raise_on_error=False))

    def servers(self) -> Sequence[Any]:
        """The clients of all servers that have keys."""
        return [self._client]

    def _open(self) -> Sequence[Any]:
        """The existing clients, without a request to a server."""
        return [self._client]


class DirectScripts(RedisScripts):
    """The same, commands sent directly."""

    _client: DirectClient

    def close(self) -> None:
        """Close all connections, those in use by other threads too; the next call would open new
        ones.
        """
        self._client.disconnect()

    def _call(self, script: Script, keys_and_args: Sequence[Any]) -> Any:
        return self._client.ask(packed(keys_and_args, script.called, 3))

    def _ask(self, *command: Any) -> Any:
        return self._client.ask(packed(command))

    def _ask_many(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        replies: list[Any] = self._client.ask(b"".join(map(packed, commands)), len(commands))
        return replies

    def _page(self, client: Any, cursor: int, pattern: str) -> tuple[Any, list[Any]]:
        after, names = self._ask("SCAN", cursor, "MATCH", pattern, "COUNT", _SCAN_COUNT)
        return after, names


class ClusterScripts(RedisScripts):
    """The same over the nodes of a cluster, where a node that is down fails only the commands meant
    for it.
    """

    clustered = True

    def __init__(self, cluster: Cluster, name: str, prefix: str, turns: ResourcePool[Turn]) -> None:
        super().__init__(None, name, prefix, turns)
        self._cluster = cluster

    def _ask(self, *command: Any) -> Any:
        (reply,) = self._cluster.send([command])
        if isinstance(reply, Exception):
            raise reply
        return reply

    def _ask_many(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        return self._cluster.send(commands)

    def servers(self) -> Sequence[Any]:
        """The clients of all primaries."""
        return self._cluster.primaries()

    def _open(self) -> Sequence[Any]:
        return self._cluster.clients()
