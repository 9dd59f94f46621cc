"""Sends commands to Redis: scripts by their SHA, pipelines and scans. Converts the errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Final

from redis.exceptions import NoScriptError

from celery_leases.concurrency.resource_pool import ResourcePool
from celery_leases.errors import StoreUnavailable
from celery_leases.stores.redis.cluster import Cluster
from celery_leases.stores.redis.errors import REDIS_ERRORS, is_from_replica, unavailable
from celery_leases.stores.redis.lease_scripts import Script
from celery_leases.stores.redis.values import as_text

SCAN_COUNT: Final = 500
"""How many keys a server looks at for one page of a scan."""


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
        return self._with_permit(self._run, script, keys_and_args)

    def run_unawaited(self, script: Script, *keys_and_args: Any) -> None:
        """Run a script whose reply is not needed. It may still run when this returns, and its
        errors may not be raised.
        """
        self.run(script, *keys_and_args)

    def run_together(self, script: Script, *keys_and_args: Any) -> Any:
        """Run a script that may be repeated, together with those of other callers if they
        :meth:`share_trips`.
        """
        return self.run(script, *keys_and_args)

    def share_trips(self, running: Callable[[], int]) -> None:
        """Let :meth:`run_together` and :meth:`run_unawaited` share round trips, if they can."""

    def execute(self, *command: Any) -> Any:
        """Send one command; returns its reply."""
        return self._with_permit(self._execute, *command)

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
        replies: list[Any] = self._with_permit(self._execute_many, commands)
        return replies

    def scan(self, pattern: str) -> Iterator[list[str]]:
        """The names of the keys that match *pattern*, in batches and without duplicates."""
        seen: set[str] = set()
        try:
            for client in self.servers():
                cursor = -1
                while cursor:
                    cursor, found = self._pool.use(self._scan_page, client, max(cursor, 0), pattern)
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

    def _with_permit(self, work: Callable[..., Any], *args: Any) -> Any:
        try:
            return self._pool.use(work, *args)
        except REDIS_ERRORS as error:
            raise self.unavailable(error) from None

    def _run(self, permit: Any, script: Script, keys_and_args: Sequence[Any]) -> Any:
        try:
            return self._execute(permit, "EVALSHA", script.sha, script.keys, *keys_and_args)
        except NoScriptError:
            return self._execute(permit, "EVAL", script.text, script.keys, *keys_and_args)

    def _scan_page(
        self, permit: Any, client: Any, cursor: int, pattern: str
    ) -> tuple[Any, list[Any]]:
        """The cursor of the next page (0 after the last page), and the names on this page."""
        page: tuple[Any, list[Any]] = client.scan(cursor, match=pattern, count=SCAN_COUNT)
        return page

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
