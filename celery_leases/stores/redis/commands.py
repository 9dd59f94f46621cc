"""Sends commands to Redis: scripts by their SHA, pipelines and scans. Converts the errors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from redis.exceptions import NoScriptError

from celery_leases.concurrency.resource_pool import ResourcePool
from celery_leases.errors import StoreUnavailable
from celery_leases.stores.redis.cluster import Cluster
from celery_leases.stores.redis.connections import (
    DirectClient,
    DirectConnection,
    ScriptCall,
    packed,
)
from celery_leases.stores.redis.errors import REDIS_ERRORS, is_from_replica, unavailable
from celery_leases.stores.redis.lease_scripts import Script
from celery_leases.stores.redis.values import as_text

_SCAN_COUNT = 500


class RedisCommands:
    """The commands of the store *name*, whose keys begin with *prefix*, on a redis-py *client*.
    Each uses a permit of *pool*, or a connection if the client lends them.

    Every method raises ``StoreUnavailable``.
    """

    #: Whether the keys of one script must share a hash tag.
    clustered = False

    def __init__(self, client: Any, name: str, prefix: str, pool: ResourcePool[Any]) -> None:
        self._client = client
        self._name = name
        self._prefix = prefix
        self._pool = pool

    def run(self, script: Script, *keys_and_args: Any) -> Any:
        """Run a script. A second round trip is needed if the server does not have the script."""
        permit = self._pool.acquire()
        try:
            try:
                return self._call(permit, script, keys_and_args)
            except NoScriptError:
                return self._execute(permit, "EVAL", script.text, script.keys, *keys_and_args)
        except REDIS_ERRORS as error:
            raise self.unavailable(error) from None
        finally:
            self._pool.release(permit)

    def run_unawaited(self, script: Script, *keys_and_args: Any) -> None:
        """Run a script whose reply is not needed. It may still run when this returns, and its
        errors may not be raised.
        """
        self.run(script, *keys_and_args)

    def execute(self, *command: Any) -> Any:
        """Send one command; returns its reply."""
        permit = self._pool.acquire()
        try:
            return self._execute(permit, *command)
        except REDIS_ERRORS as error:
            raise self.unavailable(error) from None
        finally:
            self._pool.release(permit)

    def run_many(self, script: Script, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
        """One reply or error per call; see :meth:`run_all`."""
        return self.run_all([(script, *call) for call in calls])

    def run_all(self, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
        """One reply or error per call, which is a script and its keys and arguments. A second round
        trip is needed if the server does not have a script.
        """
        replies = self.pipelined(
            [("EVALSHA", script.sha, script.keys, *call) for script, *call in calls]
        )
        unknown = [place for place, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
        if unknown:
            again = self.pipelined(
                [
                    ("EVAL", calls[place][0].text, calls[place][0].keys, *calls[place][1:])
                    for place in unknown
                ]
            )
            for place, reply in zip(unknown, again, strict=True):
                replies[place] = reply
        return replies

    def pipelined(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """One reply or error per command."""
        if not commands:
            return []
        permit = self._pool.acquire()
        try:
            return self._execute_many(permit, commands)
        except REDIS_ERRORS as error:
            raise self.unavailable(error) from None
        finally:
            self._pool.release(permit)

    def scan(self, pattern: str) -> Iterator[list[str]]:
        """The names of the keys that match *pattern*, in batches and without duplicates."""
        seen: set[str] = set()
        try:
            for client in self.servers():
                cursor = -1
                while cursor:
                    permit = self._pool.acquire()
                    try:
                        cursor, found = self._scan_page(permit, client, max(cursor, 0), pattern)
                    finally:
                        self._pool.release(permit)
                    names = [
                        name for name in dict.fromkeys(map(as_text, found)) if name not in seen
                    ]
                    seen.update(names)
                    yield names
                    cursor = int(cursor)
        except REDIS_ERRORS as error:
            raise self.unavailable(error) from None

    def eviction_policies(self) -> list[str]:
        """The ``maxmemory-policy`` of each server on which this user may call ``INFO`` or
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
        """The error to raise for *error*.

        If the server has become a replica, the connections are closed: the address may lead to the
        new primary now, and a replica leaves connections open.
        """
        if is_from_replica(error):
            self.close()
        pools = [client.connection_pool for client in self._open_clients()]
        secret = pools[0].connection_kwargs.get("password") if pools else None
        return unavailable(self._name, error, secret, self._prefix)

    def close(self) -> None:
        """Close all connections, also those that other threads use. The next call opens new
        ones.
        """
        for client in self._open_clients():
            pool = client.connection_pool
            pool.disconnect()
            for sentinel in getattr(getattr(pool, "sentinel_manager", None), "sentinels", ()):
                sentinel.connection_pool.disconnect()

    def _scan_page(
        self, permit: Any, client: Any, cursor: int, pattern: str
    ) -> tuple[Any, list[Any]]:
        """The cursor of the next page (0 after the last page), and the names on this page."""
        page: tuple[Any, list[Any]] = client.scan(cursor, match=pattern, count=_SCAN_COUNT)
        return page

    def _call(self, permit: Any, script: Script, keys_and_args: Sequence[Any]) -> Any:
        return self._execute(permit, "EVALSHA", script.sha, script.keys, *keys_and_args)

    def _execute(self, permit: Any, *command: Any) -> Any:
        return self._client.execute_command(*command)

    def _execute_many(self, permit: Any, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        with self._client.pipeline(transaction=False) as pipeline:
            for command in commands:
                pipeline.execute_command(*command)
            return list(pipeline.execute(raise_on_error=False))

    def servers(self) -> Sequence[Any]:
        """The clients of all servers that have keys."""
        return [self._client]

    def _open_clients(self) -> Sequence[Any]:
        """The clients that exist, without asking a server."""
        return [self._client]


class DirectCommands(RedisCommands):
    """The same on a :class:`DirectClient`, without redis-py's pool."""

    _client: DirectClient

    def close(self) -> None:
        """Close all connections, also those that other threads use. The next call opens new
        ones.
        """
        self._client.connection_pool.disconnect()
        for direct in self._pool.all():
            direct.connection.disconnect()

    def run_unawaited(self, script: Script, *keys_and_args: Any) -> None:
        """Run a script whose reply is not needed; see :meth:`RedisCommands.run_unawaited`."""

        def with_text() -> bytes:
            return packed(("EVAL", script.text, script.keys, *keys_and_args))

        permit: DirectConnection = self._pool.acquire()
        try:
            by_sha = packed(keys_and_args, script.called, 3)
            permit.send_unawaited(ScriptCall(script.sha, by_sha, with_text))
        except REDIS_ERRORS as error:
            raise self.unavailable(error) from None
        finally:
            self._pool.release(permit)

    def _call(self, permit: Any, script: Script, keys_and_args: Sequence[Any]) -> Any:
        return permit.send(packed(keys_and_args, script.called, 3))

    def _execute(self, permit: Any, *command: Any) -> Any:
        return permit.send(packed(command))

    def _execute_many(self, permit: Any, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        replies: list[Any] = permit.send(b"".join(map(packed, commands)), len(commands))
        return replies

    def _scan_page(
        self, permit: Any, client: Any, cursor: int, pattern: str
    ) -> tuple[Any, list[Any]]:
        after, names = self._execute(permit, "SCAN", cursor, "MATCH", pattern, "COUNT", _SCAN_COUNT)
        return after, names


class ClusterCommands(RedisCommands):
    """The same on a :class:`Cluster`, where a node that is down fails only its own commands."""

    clustered = True

    def __init__(self, cluster: Cluster, name: str, prefix: str, pool: ResourcePool[Any]) -> None:
        super().__init__(None, name, prefix, pool)
        self._cluster = cluster

    def _execute(self, permit: Any, *command: Any) -> Any:
        (reply,) = self._cluster.send([command])
        if isinstance(reply, Exception):
            raise reply
        return reply

    def _execute_many(self, permit: Any, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        return self._cluster.send(commands)

    def servers(self) -> Sequence[Any]:
        """The clients of all primaries."""
        return self._cluster.primaries()

    def _open_clients(self) -> Sequence[Any]:
        return self._cluster.clients()
