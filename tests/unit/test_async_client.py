"""Status from an event loop, on records in a file and a fake clock's worth of states."""

import asyncio
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from celery_leases import LeaseClient, LeaseStatus
from celery_leases.errors import LeaseMisuse, StoreUnavailable
from celery_leases.web.async_client import AsyncLeaseClient, version_of

KEY = "order:7"
LONG = 30.0


class Scripted:
    """A client whose key has one status after the other; the last one stays."""

    def __init__(self, *states: LeaseStatus | Exception) -> None:
        self.states = list(states)
        self.asked = 0
        self.threads: set[int] = set()

    def status(self, key: str, **_: Any) -> LeaseStatus:
        """The next status, or its error."""
        self.asked += 1
        self.threads.add(threading.get_ident())
        found = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        if isinstance(found, Exception):
            raise found
        return found


def a_status(state: str, **given: Any) -> LeaseStatus:
    """A status with no more than that."""
    return LeaseStatus(KEY, "shop.order", state, **given)


def on(client: Any, **options: Any) -> AsyncLeaseClient:
    """The client under test on another one."""
    return AsyncLeaseClient(client, **options)


@pytest.fixture
def urls(tmp_path: Path) -> tuple[str, str]:
    """Leases and records in one file."""
    return "database", f"sqlite:///{tmp_path / 'records.db'}"


def test_it_reads_what_a_client_reads(urls: tuple[str, str]) -> None:
    async def ask() -> LeaseStatus:
        async with AsyncLeaseClient.from_urls(*urls) as client:
            return await client.status(KEY, task="shop.order")

    with LeaseClient(*urls) as client:
        assert asyncio.run(ask()) == client.status(KEY, task="shop.order")


def test_the_loop_goes_on_while_a_store_does_not_answer() -> None:
    answered, turns = threading.Event(), []

    class Silent:
        def status(self, key: str, **_: Any) -> LeaseStatus:
            assert answered.wait(LONG)
            return a_status("done")

    async def both() -> None:
        async with on(Silent()) as client:
            asked = asyncio.ensure_future(client.status(KEY))
            for _ in range(100):
                await asyncio.sleep(0)
                turns.append(asked.done())
            answered.set()
            assert (await asked).state == "done"

    asyncio.run(both())
    assert not any(turns)


def test_each_change_is_yielded_once_and_the_last_one_is_the_end_of_the_work() -> None:
    running = a_status("running", attempt=1, fence=1)
    cooling = a_status("cooling", attempt=1, fence=1, retry_after=9.0)
    client = Scripted(
        *(a_status("absent"), a_status("absent"), running, replace(running, lease_remaining=3.0)),
        *(
            replace(running, progress={"items": 1}),
            cooling,
            replace(cooling, retry_after=8.0),
            a_status("done"),
        ),
    )

    async def all_of_them() -> list[tuple[str, Any]]:
        async with on(client) as reads:
            return [
                (status.state, status.progress)
                async for status in reads.changes(KEY, slowest=0.001)
            ]

    assert asyncio.run(all_of_them()) == [
        ("absent", None), ("running", None), ("running", {"items": 1}), ("cooling", None),
        ("done", None),
    ]  # fmt: skip


def test_a_key_that_does_not_change_is_looked_at_more_and_more_rarely() -> None:
    client, slept = Scripted(a_status("running")), []

    async def sleep(span: float) -> None:
        slept.append(span)
        if len(slept) == 7:
            raise KeyboardInterrupt

    async def watch(monkeypatch: pytest.MonkeyPatch) -> None:
        async with on(client) as reads:
            with monkeypatch.context() as patch:
                patch.setattr("celery_leases.web.async_client.asyncio.sleep", sleep)
                try:
                    async for _ in reads.changes(KEY):
                        pass
                except KeyboardInterrupt:
                    pass

    with pytest.MonkeyPatch.context() as monkeypatch:
        asyncio.run(watch(monkeypatch))
    assert slept == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]


def test_waiting_for_a_state_ends_with_it_and_by_default_with_the_work() -> None:
    async def wait(client: Any, *states: str) -> str:
        async with on(client) as reads:
            return (await reads.wait_for(KEY, *states, timeout=LONG)).state

    assert (
        asyncio.run(
            wait(Scripted(a_status("pending"), a_status("running"), a_status("done")), "running")
        )
        == "running"
    )
    for end in ("done", "failed", "uncertain", "unreadable"):
        assert asyncio.run(wait(Scripted(a_status("running"), a_status(end)))) == end


def test_a_timeout_while_waiting_names_the_state_of_the_key() -> None:
    async def wait(span: Any) -> None:
        async with on(Scripted(a_status("running"))) as reads:
            await reads.wait_for(KEY, timeout=span)

    with pytest.raises(
        TimeoutError, match=r"order:7 is (running|not known) after 0.05 s, and not done or failed"
    ):
        asyncio.run(wait("50ms"))

    async def outer() -> None:
        async with asyncio.timeout(0.05):
            await wait(None)

    with pytest.raises(TimeoutError) as told:
        asyncio.run(outer())
    assert "order:7" not in str(told.value)


def test_a_state_that_does_not_exist_is_refused() -> None:
    """A slip would wait for ever."""

    async def wait() -> None:
        async with on(Scripted(a_status("running"))) as reads:
            await reads.wait_for(KEY, "finished")

    with pytest.raises(LeaseMisuse, match="'finished' is no state; write one of abandoned, absent"):
        asyncio.run(wait())


def test_a_store_that_does_not_answer_raises_in_the_waiting_caller() -> None:
    async def wait() -> None:
        async with on(Scripted(a_status("running"), StoreUnavailable("away", False))) as reads:
            await reads.wait_for(KEY, timeout=LONG)

    with pytest.raises(StoreUnavailable):
        asyncio.run(wait())


def test_a_read_whose_caller_was_cancelled_ends_by_itself() -> None:
    began, answered = threading.Event(), threading.Event()

    class Slow:
        def status(self, key: str, **_: Any) -> LeaseStatus:
            began.set()
            assert answered.wait(LONG)
            return a_status("done")

    async def leave() -> None:
        async with on(Slow()) as reads:
            asked = asyncio.ensure_future(reads.status(KEY))
            await asyncio.get_running_loop().run_in_executor(None, began.wait, LONG)
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
            answered.set()

    began_at = time.monotonic()
    asyncio.run(leave())
    assert time.monotonic() - began_at < LONG


def test_as_many_reads_go_on_at_once_as_there_are_threads() -> None:
    client = Scripted(a_status("done"))

    async def many() -> None:
        async with on(client, threads=2) as reads:
            await asyncio.gather(*(reads.status(KEY) for _ in range(50)))

    asyncio.run(many())
    assert client.asked == 50
    assert len(client.threads) <= 2


def test_a_version_changes_with_what_a_client_sees() -> None:
    """And with nothing else."""
    one = a_status("running", attempt=1, holder="a", lease_remaining=3.0, retry_after=None)
    assert version_of(one) == version_of(replace(one, holder="b", lease_remaining=1.0))
    for change in (
        {"attempt": 2},
        {"state": "done"},
        {"progress": 1},
        {"fence": 9},
        {"result": [1]},
    ):
        assert version_of(replace(one, **change)) != version_of(one)


def test_the_stores_of_an_app_are_those_that_its_settings_name_when_it_is_asked() -> None:
    first, second = Scripted(a_status("running")), Scripted(a_status("done"))
    clients: list[Any] = [first, second]

    async def twice() -> list[str]:
        async with on(lambda: clients.pop(0)) as reads:
            return [(await reads.status(KEY)).state for _ in range(2)]

    assert asyncio.run(twice()) == ["running", "done"]


def test_a_forked_process_reads_in_threads_of_its_own() -> None:
    """Those of its parent are not there: a read would wait for ever."""
    script = """
import asyncio, os
from celery_leases import LeaseStatus
from celery_leases.web.async_client import AsyncLeaseClient


class Client:
    def status(self, key, **_):
        return LeaseStatus(key, None, "done")


reads = AsyncLeaseClient(Client())
print(asyncio.run(reads.status("a")).state, flush=True)
if child := os.fork():
    raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(asyncio.run(asyncio.wait_for(reads.status("a"), 30)).state, flush=True)
os._exit(0)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stdout) == (0, "done\ndone\n"), done.stderr


def test_it_needs_neither_celery_nor_a_framework() -> None:
    script = """
import sys
import celery_leases.web.async_client, celery_leases.web.http
print({"celery", "fastapi", "flask", "sqlalchemy", "redis"} & {*sys.modules})
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"
