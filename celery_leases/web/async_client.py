"""A lease client for an event loop: reads that do not block it, waiting for a state, and a stream
of changes.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from celery_leases.client import LeaseClient
from celery_leases.errors import LeaseMisuse
from celery_leases.record import State
from celery_leases.status import ABANDONED, ABSENT, UNREADABLE, LeaseStatus
from celery_leases.text.durations import Duration, seconds
from celery_leases.web.http import public

if TYPE_CHECKING:
    from celery import Celery

__all__ = ["ENDED", "AsyncLeaseClient", "version_of"]

T = TypeVar("T")
ENDED: Final = (State.DONE.value, State.FAILED.value, State.UNCERTAIN.value, UNREADABLE)
"""States in which no worker changes a key: the work is done, or a person must act."""
THREADS: Final = 4
"""How many reads of one client run at the same time by default."""
SHORTEST_POLL: Final = 0.1
"""Seconds between two reads of a key that has just changed; doubles while it does not change."""
LONGEST_POLL: Final = 2.0
"""Seconds between two reads of a key that has not changed for long."""


class AsyncLeaseClient:
    """A :class:`~celery_leases.LeaseClient` for an event loop: it reads in threads of its own.

    *client* is a client, or a function that returns one. The caller closes that client, unless
    *owned*. At most *threads* reads run at the same time, further ones wait. While a store does not
    answer, the event loop continues. Use this as an ``async with``, or call :meth:`close`.
    """

    def __init__(
        self,
        client: LeaseClient | Callable[[], LeaseClient],
        *,
        threads: int = THREADS,
        owned: bool = False,
    ) -> None:
        self._client: Callable[[], LeaseClient] = client if callable(client) else lambda: client
        self._owned = owned
        self._number = threads
        self._threads: ThreadPoolExecutor | None = None
        self._pid = 0

    @classmethod
    def from_urls(
        cls, leases_url: str, database_url: str, *, threads: int = THREADS, **options: Any
    ) -> Self:
        """A client of the stores at the two URLs; *options* are those of
        :class:`~celery_leases.LeaseClient`.
        """
        return cls(LeaseClient(leases_url, database_url, **options), threads=threads, owned=True)

    @classmethod
    def from_app(cls, app: Celery, *, threads: int = THREADS) -> Self:
        """A client of the stores of a Celery *app*, over the connections of the app. Its settings
        are read on the first use.
        """
        return cls(lambda: LeaseClient.from_app(app), threads=threads)

    async def close(self) -> None:
        """Wait for running reads, and close the client if it is owned."""
        await asyncio.get_running_loop().run_in_executor(None, self._close)

    async def __aenter__(self) -> Self:
        """Return the client."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the client."""
        await self.close()

    async def status(
        self,
        key: str,
        *,
        task: str | None = None,
        group: str | None = None,
        call: str | None = None,
    ) -> LeaseStatus:
        """The status of *key*; see :meth:`celery_leases.LeaseClient.status`."""
        return await self.run(lambda: self._client().status(key, task=task, group=group, call=call))

    async def wait_for(
        self,
        key: str,
        *states: str,
        task: str | None = None,
        timeout: Duration | None = None,  # noqa: ASYNC109 - any form of a duration, and named in the error
    ) -> LeaseStatus:
        """Wait until *key* is in one of *states*; the default is :data:`ENDED`.

        Raises ``TimeoutError`` after *timeout* (seconds, ``"5m"``, a timedelta),
        :class:`~celery_leases.errors.LeaseMisuse` for a state that does not exist, and
        :class:`~celery_leases.errors.StoreUnavailable` if the records database does not answer.
        """
        known = {*State, ABSENT, ABANDONED, UNREADABLE}
        if unknown := set(states) - known:
            raise LeaseMisuse(
                f"wait_for: {min(unknown)!r} is no state; write one of {', '.join(sorted(known))}"
            )
        wanted = states or ENDED
        limit = seconds(timeout, "wait_for: timeout") if timeout is not None else None
        last: LeaseStatus | None = None
        try:
            async with asyncio.timeout(limit):
                async for last in self.changes(key, task=task, until=wanted):
                    if last.state in wanted:
                        return last
        except TimeoutError:
            if limit is None:  # a timeout of the caller
                raise
            state = last.state if last is not None else "not known"
            raise TimeoutError(
                f"{key} is {state} after {limit:g} s, and not {' or '.join(wanted)}"
            ) from None
        raise AssertionError(f"{key}: changes() ended before the key was in one of {wanted}")

    async def changes(
        self,
        key: str,
        *,
        task: str | None = None,
        call: str | None = None,
        until: Sequence[str] = ENDED,
        slowest: float = LONGEST_POLL,
    ) -> AsyncGenerator[LeaseStatus]:
        """The status of *key* now, and again after each change that a client can see.

        Ends after a status in one of the states *until*; with ``until=()`` it does not end. The
        stores are read soon after a change, then less often, but at least every *slowest* seconds;
        states that last less than that may be missed. Raises the errors of :meth:`status`.
        """
        seen, pause = None, SHORTEST_POLL
        while True:
            status = await self.status(key, task=task, call=call)
            if (version := version_of(status)) != seen:
                seen, pause = version, SHORTEST_POLL
                yield status
            if status.state in until:
                return
            await asyncio.sleep(min(pause, slowest))
            pause *= 2

    async def run(self, read: Callable[[], T]) -> T:
        """The result of *read*, which runs in one of the threads."""
        # A forked process does not have the threads of its parent.
        if self._threads is None or self._pid != os.getpid():
            self._threads = ThreadPoolExecutor(
                self._number, thread_name_prefix="celery_leases_status"
            )
            self._pid = os.getpid()
        return await asyncio.get_running_loop().run_in_executor(self._threads, read)

    def _close(self) -> None:
        if self._threads is not None and self._pid == os.getpid():
            self._threads.shutdown()
        if self._owned:
            self._client().close()


def version_of(status: LeaseStatus) -> str:
    """A short hash of what a client can see of a status, without values that change with time."""
    body = public(status)
    del body["retry_after"], body["message"]
    # message_code changes when a wait ends; retry_at differs by microseconds at each read.
    body["retry_at"] = status.retry_at is not None and round(status.retry_at.timestamp())
    text = json.dumps([status.fence, body], sort_keys=True, allow_nan=False, default=str)
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16]
