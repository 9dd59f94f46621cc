"""Status from an event loop: reads that never block it, waiting for a state, and changes as they
come.
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
from celery_leases.common.durations import Duration, seconds
from celery_leases.errors import LeaseMisuse
from celery_leases.http import public
from celery_leases.protocol.records import State
from celery_leases.protocol.status import ABANDONED, ABSENT, UNREADABLE, LeaseStatus

if TYPE_CHECKING:
    from celery import Celery

__all__ = ["ENDED", "AsyncLeaseClient", "version_of"]

T = TypeVar("T")
ENDED: Final = (State.DONE.value, State.FAILED.value, State.UNCERTAIN.value, UNREADABLE)
"""States that no worker changes: the work is done, or a person must look."""
THREADS: Final = 4
"""How many reads of one client go on at once by default."""
FIRST_LOOK: Final = 0.1
"""Seconds between two looks at a key that has just changed; it doubles while nothing changes."""
SLOWEST: Final = 2.0
"""Seconds between two looks at a key that has not changed for long."""


class AsyncLeaseClient:
    """A :class:`~celery_leases.LeaseClient` for an event loop: each read is done in a thread of its
    own few.

    *client*, or what gives it, stays its owner's to close, unless *owned*. *threads* read at once;
    more reads wait their turn. While a store does not answer, reads wait for it and the loop goes
    on. Use it as an ``async with``, or call :meth:`close`.
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
        """A client of its own on the two URLs, with the *options* of
        :class:`~celery_leases.LeaseClient`.
        """
        return cls(LeaseClient(leases_url, database_url, **options), threads=threads, owned=True)

    @classmethod
    def from_app(cls, app: Celery, *, threads: int = THREADS) -> Self:
        """On the stores that the settings of a Celery *app* name when it is asked, over its
        connections.
        """
        return cls(lambda: LeaseClient.from_app(app), threads=threads)

    async def close(self) -> None:
        """Wait for the reads that go on, and let the connections go that are its own."""
        await asyncio.get_running_loop().run_in_executor(None, self._close)

    async def __aenter__(self) -> Self:
        """Itself."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close it."""
        await self.close()

    async def status(
        self,
        key: str,
        *,
        task: str | None = None,
        namespace: str | None = None,
        group: str | None = None,
    ) -> LeaseStatus:
        """Where *key* stands; as :meth:`celery_leases.LeaseClient.status`, with what it raises."""
        return await self.run(
            lambda: self._client().status(key, task=task, namespace=namespace, group=group)
        )

    async def wait_for(
        self,
        key: str,
        *states: str,
        task: str | None = None,
        namespace: str | None = None,
        timeout: Duration | None = None,  # noqa: ASYNC109 - durations as everywhere, and said in the error
    ) -> LeaseStatus:
        """Wait until *key* is in one of *states*, by default one that no worker changes
        (:data:`ENDED`).

        Raises ``TimeoutError`` after *timeout* (seconds, ``"5m"``, a timedelta),
        :class:`~celery_leases.errors.LeaseMisuse` for a state that does not exist, and
        :class:`~celery_leases.errors.StoreUnavailable` when the records do not answer.
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
                async for last in self.changes(key, task=task, namespace=namespace, until=wanted):
                    if last.state in wanted:
                        return last
        except TimeoutError:
            if limit is None:  # somebody else's
                raise
            state = last.state if last is not None else "not known"
            raise TimeoutError(
                f"{key} is {state} after {limit:g} s, and not {' or '.join(wanted)}"
            ) from None
        raise AssertionError(f"{key}: changes() has ended without {wanted}")

    async def changes(
        self,
        key: str,
        *,
        task: str | None = None,
        namespace: str | None = None,
        until: Sequence[str] = ENDED,
        slowest: float = SLOWEST,
    ) -> AsyncGenerator[LeaseStatus]:
        """The status of *key* now, and again each time something of it has changed that a client
        may see.

        Ends after a status in one of the states *until*; ``until=()`` never ends. The stores are
        looked at soon after a change, then more and more rarely, at least every *slowest* seconds;
        what comes and goes in between is not seen. Raises what :meth:`status` does.
        """
        seen, pause = None, FIRST_LOOK
        while True:
            status = await self.status(key, task=task, namespace=namespace)
            if (version := version_of(status)) != seen:
                seen, pause = version, FIRST_LOOK
                yield status
            if status.state in until:
                return
            await asyncio.sleep(min(pause, slowest))
            pause *= 2

    async def run(self, read: Callable[[], T]) -> T:
        """What *read* gives, called in one of the threads."""
        # A forked process has none of its parent's threads.
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
    """A short text that is another one for each status that a client can tell apart; time that
    passes is no change.
    """
    body = public(status)
    del body["retry_after"], body["message"]
    # The end of a wait is known by its code, and its time is read anew each time, a few
    # microseconds off.
    body["retry_at"] = status.retry_at is not None and round(status.retry_at.timestamp())
    text = json.dumps([status.fence, body], sort_keys=True, allow_nan=False, default=str)
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16]
