"""Talking to Redis: scripts by their SHA, pipelines, scans, and what errors become."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from redis.exceptions import NoScriptError

from celery_leases.core.errors import StoreUnavailable
from celery_leases.stores.lua import Script
from celery_leases.stores.redis_cluster import Cluster
from celery_leases.stores.redis_errors import REDIS_ERRORS, unavailable
from celery_leases.stores.redis_values import as_text

_SCAN_COUNT = 500


class RedisScripts:
    """Sends commands by *client* for the store called *name*, whose keys begin with *prefix*.

    Every method raises ``StoreUnavailable``.
    """

    #: Whether keys of one script must share a hash tag.
    clustered = False

    def __init__(self, client: Any, name: str, prefix: str) -> None:
        self._client = client
        self._name = name
        self._prefix = prefix

    def run(self, script: Script, *keys_and_args: Any) -> Any:
        """Run one script; a second round trip only when the server lost it."""
        try:
            try:
                return self._ask("EVALSHA", script.sha, script.keys, *keys_and_args)
            except NoScriptError:
                return self._ask("EVAL", script.text, script.keys, *keys_and_args)
        except REDIS_ERRORS as error:
            raise self.unavailable(error) from None

    def read(self, key: str) -> str | None:
        """The value of a key."""
        try:
            found = self._ask("GET", key)
        except REDIS_ERRORS as error:
            raise self.unavailable(error) from None
        return None if found is None else as_text(found)

    def run_many(self, script: Script, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
        """One reply or error per call; a second round trip only when the server lost the script."""
        replies = self.pipelined([("EVALSHA", script.sha, script.keys, *call) for call in calls])
        unknown = [place for place, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
        if unknown:
            again = self.pipelined([("EVAL", script.text, script.keys, *calls[place]) for place in unknown])
            for place, reply in zip(unknown, again, strict=True):
                replies[place] = reply
        return replies

    def pipelined(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """One reply or error per command."""
        if not commands:
            return []
        try:
            return self._ask_many(commands)
        except REDIS_ERRORS as error:
            raise self.unavailable(error) from None

    def scan(self, pattern: str) -> Iterator[list[str]]:
        """The names of keys in batches, none of them twice."""
        seen: set[str] = set()
        try:
            for client in self._servers():
                cursor = -1
                while cursor:
                    cursor, found = client.scan(max(cursor, 0), match=pattern, count=_SCAN_COUNT)
                    names = [name for name in dict.fromkeys(map(as_text, found)) if name not in seen]
                    seen.update(names)
                    yield names
                    cursor = int(cursor)
        except REDIS_ERRORS as error:
            raise self.unavailable(error) from None

    def unavailable(self, error: Exception) -> StoreUnavailable:
        """What to raise for *error*."""
        pools = [client.connection_pool for client in self._open()]
        secret = pools[0].connection_kwargs.get("password") if pools else None
        return unavailable(self._name, error, secret, self._prefix)

    def close(self) -> None:
        """Close all connections, those in use by other threads too; the next call would open new ones."""
        for client in self._open():
            pool = client.connection_pool
            pool.disconnect()
            for sentinel in getattr(getattr(pool, "sentinel_manager", None), "sentinels", ()):
                sentinel.connection_pool.disconnect()

    def _ask(self, *command: Any) -> Any:
        return self._client.execute_command(*command)

    def _ask_many(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        with self._client.pipeline(transaction=False) as pipeline:
            for command in commands:
                pipeline.execute_command(*command)
            return list(pipeline.execute(raise_on_error=False))

    def _servers(self) -> Sequence[Any]:
        """The clients of all servers that have keys."""
        return [self._client]

    def _open(self) -> Sequence[Any]:
        """The clients there are, without asking anybody."""
        return [self._client]


class ClusterScripts(RedisScripts):
    """The same over the nodes of a cluster, where a node that is down fails only the commands meant for it."""

    clustered = True

    def __init__(self, cluster: Cluster, name: str, prefix: str) -> None:
        super().__init__(None, name, prefix)
        self._cluster = cluster

    def _ask(self, *command: Any) -> Any:
        (reply,) = self._cluster.send([command])
        if isinstance(reply, Exception):
            raise reply
        return reply

    def _ask_many(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        return self._cluster.send(commands)

    def _servers(self) -> Sequence[Any]:
        return self._cluster.primaries()

    def _open(self) -> Sequence[Any]:
        return self._cluster.clients()
