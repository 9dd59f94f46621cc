"""The main process never blocks for long after the exit of a child, whatever stores or tasks do."""

import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from celery_leases.decide.endings import ExitCause
from celery_leases.testing.waits import wait_until
from celery_leases.worker import child_exit
from celery_leases.worker.child_exit import EndedDelivery

PATIENCE = 0.2


@pytest.fixture
def dead() -> int:
    """The pid of a process that is gone."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


class Stores:
    """Fake stores, which answer when the test allows it."""

    def __init__(self) -> None:
        self.answer = threading.Event()
        self.closed: list[str] = []

    def close(self, dead_child: EndedDelivery, call: Any) -> None:
        self.answer.wait(10)
        self.closed.append(dead_child.token)


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stores]:
    """In the place of the real ones."""
    made = Stores()
    monkeypatch.setattr(child_exit, "_close", made.close)
    monkeypatch.setattr(child_exit, "CLOSE_TIMEOUT", PATIENCE)
    yield made
    made.answer.set()
    wait_until(
        lambda: all(each.ended for each in child_exit._unfinished), 10, "all exits to be handled"
    )


def dead_child(
    pid: int, token: str, call: Any = lambda: None, cause: ExitCause = ExitCause.KILLED
) -> EndedDelivery:
    """One delivery of a dead child; *call* makes its key."""

    class Known(EndedDelivery):
        def call(self) -> Any:
            return call()

    return Known(SimpleNamespace(name="work"), "id", token, None, (), {}, 0, pid, cause, False)


def took(pid: int, token: str, **given: Any) -> float:
    """How long the main process stood still for one dead child."""
    began = time.monotonic()
    child_exit.close_dead(dead_child(pid, token, **given))
    return time.monotonic() - began


def test_an_attempt_is_closed_before_its_message_goes_back(stores: Stores, dead: int) -> None:
    """Else the next child would find the key held, and come again when the lease has ended."""
    stores.answer.set()
    child_exit.close_dead(dead_child(dead, "one"))
    assert stores.closed == ["one"]


def test_stores_that_do_not_answer_delay_only_the_first_child_exit(stores, dead) -> None:
    """A hundred children killed at once would stop the worker for a hundred patiences."""
    assert took(dead, "one") >= PATIENCE
    assert sum(took(dead, f"number {number}") for number in range(20)) < 10 * PATIENCE
    stores.answer.set()
    wait_until(lambda: len(stores.closed) == 21, 10, "all to be closed nevertheless")
    wait_until(
        lambda: all(each.ended for each in child_exit._unfinished), 10, "all exits to be handled"
    )
    child_exit.close_dead(dead_child(dead, "the next"))
    assert stores.closed[-1] == "the next"


@pytest.mark.parametrize(
    "error", [SystemExit(3), RuntimeError("no such customer")], ids=["exit", "error"]
)
def test_a_key_that_cannot_be_made_here_does_not_affect_others(stores, dead, error, caplog) -> None:
    stores.answer.set()

    def raising() -> None:
        raise error

    child_exit.close_dead(dead_child(dead, "odd", raising))
    assert f"died, but its key could not be released: {error!r}" in caplog.text
    child_exit.close_dead(dead_child(dead, "one"))
    assert stores.closed == ["one"]


def test_a_key_function_that_hangs_does_not_affect_others(stores: Stores, dead: int) -> None:
    stores.answer.set()
    go_on = threading.Event()
    assert took(dead, "hangs", call=lambda: go_on.wait(10)) >= PATIENCE
    child_exit.close_dead(dead_child(dead, "one"))
    assert stores.closed == ["one"]
    go_on.set()
    wait_until(lambda: stores.closed == ["one", "hangs"], 10, "the slow one to be closed")


def test_a_child_that_lives_is_left_alone(stores: Stores) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert took(child.pid, "lives") < PATIENCE
        assert stores.closed == []
    finally:
        child.communicate(b"\n", timeout=10)


def test_only_the_handling_of_the_exit_waits_for_a_child_that_celery_kills(stores: Stores) -> None:
    stores.answer.set()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert took(child.pid, "limited", cause=ExitCause.TIME_LIMIT) < PATIENCE
    assert stores.closed == []
    child.communicate(b"\n", timeout=10)
    wait_until(lambda: stores.closed == ["limited"], 10, "the attempt to be closed")


class Hub:
    """As much of kombu's as a watch needs."""

    def __init__(self) -> None:
        self.readers: dict[int, Any] = {}

    def add_reader(self, handle: int, callback: Any) -> None:
        """Call *callback* once the handle can be read."""
        self.readers[handle] = callback

    def remove(self, handle: int) -> None:
        self.readers.pop(handle, None)


def test_a_child_is_watched_by_one_handle_however_often_the_loop_forgets_it(monkeypatch) -> None:
    hub, reaped = Hub(), []
    pool = SimpleNamespace(maintain_pool=lambda: reaped.append(True))
    monkeypatch.setattr(
        "celery_leases.worker.processes.current_worker",
        lambda: SimpleNamespace(hub=hub, pool=pool),
    )
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    child_exit.watch(child.pid)
    child_exit.watch(child.pid)
    (handle,) = hub.readers
    hub.readers.clear()
    child_exit.watch_again()
    child_exit.watch(child.pid)
    assert list(hub.readers) == [handle]
    assert not select.select([handle], [], [], 0)[0]
    child.communicate(b"\n", timeout=10)
    assert select.select([handle], [], [], 10)[0]
    hub.readers[handle]()
    assert (reaped, hub.readers) == ([True], {})
    assert child.pid not in child_exit._watched
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(handle)
