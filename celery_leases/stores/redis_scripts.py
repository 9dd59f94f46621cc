"""Talking to one Redis server: scripts by their SHA, pipelines, scans, and what errors become."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from redis.exceptions import NoScriptError

from celery_leases.core.errors import StoreUnavailable
from celery_leases.stores.lua import Script
from celery_leases.stores.redis_errors import REDIS_ERRORS, unavailable
from celery_leases.stores.redis_values import as_text

_SCAN_COUNT = 500


class RedisScripts:
    """Sends commands by *client* for the store called *name*; every method raises ``StoreUnavailable``."""

    def __init__(self, client: Any, name: str) -> None:
        self._client = client
        self._name = name

    def run(self, script: Script, *keys_and_args: Any) -> Any:
        """Run one script; a second round trip only when the server lost it."""
        try:
            try:
                return self._client.evalsha(script.sha, script.keys, *keys_and_args)
            except NoScriptError:
                return self._client.eval(script.text, script.keys, *keys_and_args)
        except REDIS_ERRORS as error:
            raise self.unavailable(error) from None

    def run_many(self, script: Script, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
        """One reply or ``ResponseError`` per call; a second round trip only when the server lost the script."""
        replies = self.pipelined([("EVALSHA", script.sha, script.keys, *call) for call in calls])
        unknown = [place for place, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
        if unknown:
            again = self.pipelined([("EVAL", script.text, script.keys, *calls[place]) for place in unknown])
            for place, reply in zip(unknown, again, strict=True):
                replies[place] = reply
        return replies

    def pipelined(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """One reply or ``ResponseError`` per command."""
        if not commands:
            return []
        try:
            with self._client.pipeline(transaction=False) as pipeline:
                for command in commands:
                    pipeline.execute_command(*command)
                return list(pipeline.execute(raise_on_error=False))
        except REDIS_ERRORS as error:
            raise self.unavailable(error) from None

    def scan(self, pattern: str) -> Iterator[list[str]]:
        """The names of keys in batches, none of them twice."""
        seen: set[str] = set()
        cursor = 0
        while True:
            try:
                cursor, found = self._client.scan(cursor, match=pattern, count=_SCAN_COUNT)
            except REDIS_ERRORS as error:
                raise self.unavailable(error) from None
            names = [name for name in dict.fromkeys(map(as_text, found)) if name not in seen]
            seen.update(names)
            yield names
            if not int(cursor):
                return

    def unavailable(self, error: Exception) -> StoreUnavailable:
        """What to raise for *error*."""
        return unavailable(self._name, error, self._client.connection_pool.connection_kwargs.get("password"))
