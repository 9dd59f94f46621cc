"""Resources that threads or greenlets share: never more than allowed, in the order of asking,
and none is lost.
"""

import gc
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import pytest

from celery_leases.concurrency import resource_pool as resource_pools
from celery_leases.concurrency.resource_pool import Permit, ResourcePool, max_wait
from celery_leases.errors import StoreUnavailable
from celery_leases.testing.waits import wait_until
from tests.unit.test_forked_leases import in_a_fork


class Thing:
    """A resource."""


@contextmanager
def allowed(seconds: float) -> Iterator[None]:
    """This thread may wait for so long."""
    before = max_wait.set(lambda: seconds)
    try:
        yield
    finally:
        max_wait.reset(before)


def waiting(resource_pool: ResourcePool[Any], number: int) -> None:
    """Return when so many callers wait."""
    wait_until(lambda: len(resource_pool._waiting) == number, 10, f"{number} to wait")


def in_threads(*calls: Callable[[], None]) -> list[threading.Thread]:
    """Each call in a thread of its own."""
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    return threads


# -- who gets what ---------------------------------------------------------------------------------


def test_there_are_never_more_than_allowed_and_no_two_users_share_one() -> None:
    resource_pool, users, seen = ResourcePool(3, Thing, 30.0), dict[int, int](), set[int]()

    def touch(thing: Thing) -> None:
        users[id(thing)] = users.get(id(thing), 0) + 1
        seen.add(users[id(thing)])
        time.sleep(0)
        users[id(thing)] -= 1

    def use() -> None:
        for _ in range(200):
            resource_pool.use(touch)
            thing = resource_pool.acquire()
            touch(thing)
            resource_pool.release(thing)

    for thread in in_threads(*[use] * 30):
        thread.join(60)
        assert not thread.is_alive()
    assert (len(users), seen) == (3, {1})


def test_the_one_that_was_used_last_is_used_next() -> None:
    """So that a quiet process keeps few connections warm, and opens no second one for one call
    after the other.
    """
    resource_pool = ResourcePool(3, Thing, 1.0)
    first, second = resource_pool.acquire(), resource_pool.acquire()
    resource_pool.release(first)
    resource_pool.release(second)
    assert resource_pool.acquire() is second
    assert len(resource_pool.all()) == 2


def test_it_comes_back_after_a_use_that_failed_too() -> None:
    resource_pool = ResourcePool(1, Thing, 0.0)
    first, *given = resource_pool.use(lambda *given: given, 1, 2)
    assert given == [1, 2]
    with pytest.raises(ZeroDivisionError):
        resource_pool.use(lambda _: 1 / 0)
    with pytest.raises(StoreUnavailable):
        resource_pool.use(lambda _: resource_pool.acquire())
    assert resource_pool.acquire() is first


def test_one_in_use_is_closed_after_its_use_if_all_are() -> None:
    resource_pool, closed = ResourcePool(1, Thing, 0.0), list[Thing]()
    used = resource_pool.use(lambda thing: (resource_pool.discard(closed.append), thing)[1])
    assert closed == [used]


def test_who_has_waited_longest_comes_first() -> None:
    resource_pool, came = ResourcePool(1, Thing, 30.0), list[int]()
    thing = resource_pool.acquire()

    def ask(number: int) -> None:
        resource_pool.use(lambda _: came.append(number))

    threads: list[threading.Thread] = []
    for number in range(5):
        threads += in_threads(lambda number=number: ask(number))  # type: ignore[misc]
        waiting(resource_pool, number + 1)
    resource_pool.release(thing)
    assert resource_pool.acquire() is thing
    assert came == list(range(5))
    for thread in threads:
        thread.join(10)


@pytest.mark.parametrize(
    ("longest", "own", "waits"), [(0.3, None, 0.3), (30.0, 0.2, 0.2), (0.0, 0.3, 0.3)]
)
def test_a_wait_ends_when_the_caller_may_wait_no_longer(longest, own, waits) -> None:
    resource_pool = ResourcePool(2, Thing, longest)
    things = [resource_pool.acquire(), resource_pool.acquire()]
    began = time.monotonic()
    with (
        pytest.raises(StoreUnavailable, match="all 2 were in use"),
        allowed(own if own is not None else longest),
    ):
        resource_pool.acquire()
    assert waits <= time.monotonic() - began < waits + 5
    assert not resource_pool._waiting
    resource_pool.release(things.pop())
    assert resource_pool.acquire() is not things[0]


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_without_time_nothing_is_waited_for_and_what_is_there_is_given(seconds: float) -> None:
    resource_pool = ResourcePool(1, Thing, 30.0)
    with allowed(seconds):
        thing = resource_pool.acquire()
        with pytest.raises(StoreUnavailable):
            resource_pool.acquire()
    resource_pool.release(thing)


def test_what_one_thread_may_wait_is_nothing_to_another() -> None:
    resource_pool, got = ResourcePool(1, Thing, 30.0), list[Thing]()
    thing = resource_pool.acquire()
    with allowed(0.0):
        threads = in_threads(lambda: got.append(resource_pool.acquire()))
        waiting(resource_pool, 1)
        resource_pool.release(thing)
        threads[0].join(10)
    assert got == [thing]


# -- what is cut short -----------------------------------------------------------------------------


class Interrupted(Exception):
    """What a signal raises."""


def test_a_wait_that_is_interrupted_takes_nothing() -> None:
    """The next in the queue gets what would have been its own."""

    def raises(_: int, __: FrameType | None) -> None:
        raise Interrupted

    resource_pool = ResourcePool(1, Thing, 30.0)
    thing = resource_pool.acquire()
    before = signal.signal(signal.SIGALRM, raises)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(Interrupted):
            resource_pool.acquire()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not resource_pool._waiting
    resource_pool.release(thing)
    with allowed(0.0):
        assert resource_pool.acquire() is thing


@pytest.mark.parametrize(
    "raised", [Interrupted, KeyboardInterrupt, None], ids=["error", "exit", "too late"]
)
def test_what_comes_in_the_moment_in_which_a_wait_ends_is_not_lost(monkeypatch, raised) -> None:
    resource_pool = ResourcePool(1, Thing, 30.0)
    thing = resource_pool.acquire()

    class Late(resource_pools._Waiter[Thing]):
        """One whose thing comes just as it gives up."""

        def __init__(self) -> None:
            super().__init__()
            self.wakeup: Any = self

        def acquire(self, *, timeout: float) -> bool:
            """Be given up, one way or another."""
            self.wakeup = threading.Lock()
            self.wakeup.acquire()
            resource_pool.release(thing)
            if raised is not None:
                raise raised
            return False

    monkeypatch.setattr(resource_pools, "_Waiter", Late)
    if raised is None:
        assert resource_pool.acquire() is thing
        resource_pool.release(thing)
    else:
        with pytest.raises(raised):
            resource_pool.acquire()
    monkeypatch.undo()
    with allowed(0.0):
        assert resource_pool.acquire() is thing


def test_what_is_lost_with_its_frame_is_replaced() -> None:
    """An exception may come between the lending and the first line that would give it back."""
    resource_pool = ResourcePool(1, Thing, 0.0)
    resource_pool.acquire()
    gc.collect()
    assert isinstance(resource_pool.acquire(), Thing)


def test_nothing_is_lost_whatever_happens() -> None:
    resource_pool = ResourcePool(4, Thing, 30.0)

    def use(seed: int) -> None:
        rand = random.Random(seed)
        for _ in range(100):
            with (
                allowed(rand.choice([0.0, 0.0005, 0.002, 30.0])),
                suppress(StoreUnavailable),
            ):
                resource_pool.use(lambda _: time.sleep(rand.choice([0, 0, rand.random() / 500])))

    for thread in in_threads(*[lambda seed=seed: use(seed) for seed in range(24)]):  # type: ignore[misc]
        thread.join(60)
        assert not thread.is_alive()
    with allowed(0.0):
        assert len({resource_pool.acquire() for _ in range(4)}) == 4
    assert not resource_pool._waiting


# -- processes and greenlets -----------------------------------------------------------------------


def test_a_forked_process_has_things_of_its_own() -> None:
    resource_pool = ResourcePool(1, Thing, 0.0)
    thing, held, forked = resource_pool.acquire(), threading.Event(), threading.Event()

    def hold() -> None:
        with resource_pool._lock:
            held.set()
            forked.wait(30)

    (thread,) = in_threads(hold)
    held.wait(10)
    assert in_a_fork(lambda: type(resource_pool.acquire()).__name__) == "Thing"
    assert in_a_fork(lambda: resource_pool.use(lambda thing: type(thing).__name__)) == "Thing"
    forked.set()
    thread.join(10)
    with pytest.raises(StoreUnavailable):
        resource_pool.acquire()
    assert resource_pool.all() == [thing]


GREEN = """
import sys
if sys.argv[1] == "gevent":
    from gevent import monkey, spawn, sleep
    monkey.patch_all()
else:
    import eventlet
    eventlet.monkey_patch()
    from eventlet import spawn, sleep
from celery_leases.concurrency.resource_pool import ResourcePool, Permit, max_wait
from celery_leases.errors import StoreUnavailable

resource_pool, busy, most, late = ResourcePool(3, Permit, 30.0), 0, 0, 0

def use():
    global busy, most
    for _ in range(5):
        permit = resource_pool.acquire()
        busy += 1
        most = max(most, busy)
        sleep(0.002)
        busy -= 1
        resource_pool.release(permit)

def hurry():
    global late
    max_wait.set(lambda: 0.001)
    try:
        resource_pool.release(resource_pool.acquire())
    except StoreUnavailable:
        late += 1

for greenlet in [spawn(use) for _ in range(50)] + [spawn(hurry) for _ in range(10)]:
    greenlet.get() if hasattr(greenlet, "get") else greenlet.wait()
print(most, late, len(resource_pool.all()), len(resource_pool._waiting))
"""


@pytest.mark.parametrize("library", ["gevent", "eventlet"])
def test_greenlets_wait_for_one_another(library: str) -> None:
    pytest.importorskip(library)
    done = subprocess.run(
        [sys.executable, "-c", GREEN, library],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.split() == ["3", "10", "3", "0"]


def test_turns_are_distinguished() -> None:
    resource_pool = ResourcePool(2, Permit, 0.0)
    one, other = resource_pool.acquire(), resource_pool.acquire()
    assert one is not other
