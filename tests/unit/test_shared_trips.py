"""Steps that go to a server together: who is alone goes at once, and each has its own answer."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest

from celery_leases.concurrency import shared_trips
from celery_leases.concurrency.shared_trips import SharedTrips
from celery_leases.errors import StoreUnavailable
from celery_leases.testing.waits import wait_until


class Server:
    """Doubles numbers. A trip that begins with a number in *held* waits until it is released; 13
    cannot be doubled, and 7 only alone. A number that goes alone is a tuple among the trips.
    """

    def __init__(self, *held: int) -> None:
        self.trips: list[Sequence[int]] = []
        self.held = {number: threading.Event() for number in held}

    def alone(self, number: int) -> int:
        self.trips.append((number,))
        if number in self.held:
            assert self.held[number].wait(10)
        if number == 13:
            raise ValueError(number)
        return 2 * number

    def double(self, numbers: Sequence[int]) -> list[int | None]:
        self.trips.append(numbers)
        if numbers[0] in self.held:
            assert self.held[numbers[0]].wait(10)
        if 13 in numbers:
            raise ValueError(13)
        return [None if number == 7 else 2 * number for number in numbers]


def run(trips: SharedTrips[int, int], server: Server, number: int) -> int | None:
    """What *number* becomes; ``None`` for an error."""
    try:
        return trips.run(number, partial(server.alone, number))
    except ValueError:
        return None


@contextmanager
def under_way(
    server: Server, *first: int
) -> Iterator[tuple[SharedTrips[int, int], Callable[[int], None], dict[int, int | None]]]:
    """The trips, a function that lets another thread take a step and returns once it waits, and
    the answers. The *first* steps are begun one after the other; then all threads end.
    """
    trips, found = SharedTrips(server.double), dict[int, int | None]()
    threads: list[threading.Thread] = []

    def take(number: int) -> None:
        def answer() -> None:
            found[number] = run(trips, server, number)

        threads.append(threading.Thread(target=answer, daemon=True))
        threads[-1].start()
        wait_until(
            lambda: (
                any(number in trip for trip in server.trips)
                or number in [step.given for step in (*trips._under_way, *trips._waiting)]
            ),
            10,
            f"{number} to go or to wait",
        )

    for number in first:
        take(number)
    yield trips, take, found
    for event in server.held.values():
        event.set()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_who_is_alone_goes_at_once() -> None:
    server = Server()
    trips = SharedTrips(server.double)
    assert [run(trips, server, 1), run(trips, server, 2)] == [2, 4]
    assert server.trips == [(1,), (2,)]


def test_the_error_of_who_is_alone_is_its_own() -> None:
    server = Server()
    trips = SharedTrips(server.double)
    with pytest.raises(ValueError, match="13"):
        trips.run(13, partial(server.alone, 13))
    assert server.trips == [(13,)], "it is not repeated"
    assert run(trips, server, 1) == 2


def test_those_that_come_during_a_trip_go_together_in_the_next_one() -> None:
    server = Server(1)
    with under_way(server, 1, 2, 3, 4) as (_, _, found):
        pass
    assert server.trips == [(1,), [2, 3, 4]]
    assert found == {1: 2, 2: 4, 3: 6, 4: 8}


def test_those_that_come_during_the_second_trip_go_in_the_third() -> None:
    server = Server(1, 2)
    with under_way(server, 1, 2, 3) as (_, take, found):
        server.held[1].set()
        wait_until(lambda: len(server.trips) == 2, 10, "the second trip")
        take(4)
        take(5)
    assert server.trips == [(1,), [2, 3], [4, 5]]
    assert found == {1: 2, 2: 4, 3: 6, 4: 8, 5: 10}


class Pause:
    """Stands for the modules of time: each pause lasts until the test ends it."""

    def __init__(self) -> None:
        self.now = 100.0
        self.begun: list[float] = []
        self.over = threading.Event()
        self.interrupt: BaseException | None = None

    def boot_clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.begun.append(seconds)
        assert self.over.wait(10)
        self.now += seconds
        if self.interrupt is not None:
            raise self.interrupt


@pytest.fixture
def pause(monkeypatch: pytest.MonkeyPatch) -> Pause:
    """The pauses before trips."""
    made = Pause()
    monkeypatch.setattr(shared_trips, "time", made)
    monkeypatch.setattr(shared_trips, "os_threads", made)
    return made


def test_a_trip_begins_later_than_the_one_before_the_more_calls_run(pause: Pause) -> None:
    """Those that come meanwhile go together."""
    server = Server()
    with under_way(server) as (trips, take, found):
        trips._running = lambda: 20
        take(1)
        wait_until(lambda: 1 in found, 10, "the first to go at once")
        take(2)
        wait_until(lambda: bool(pause.begun), 10, "the second to wait")
        take(3)
        assert trips.send(4)
        assert server.trips == [(1,)]
        pause.over.set()
    assert server.trips == [(1,), [2, 3, 4]]
    assert found == {1: 2, 2: 4, 3: 6}
    assert pause.begun == [pytest.approx(20 * shared_trips.SPACING)]
    trips._running = lambda: 1000
    assert run(trips, server, 5) == 10
    assert pause.begun[1:] == [pytest.approx(shared_trips.MOST_SPACING)]
    pause.now += shared_trips.MOST_SPACING
    assert run(trips, server, 6) == 12
    assert len(pause.begun) == 2, "who comes later goes at once"


def test_with_few_calls_nobody_waits(pause: Pause) -> None:
    server = Server()
    trips = SharedTrips(server.double, lambda: 4)
    assert [run(trips, server, 1), run(trips, server, 2), trips.send(3)] == [2, 4, False]
    assert (server.trips, pause.begun) == ([(1,), (2,)], [])


def test_a_step_without_a_wait_goes_itself_at_once_or_with_the_next(pause: Pause) -> None:
    server = Server()
    trips = SharedTrips(server.double, lambda: 20)
    assert not trips.send(1), "the caller goes itself"
    pause.over.set()
    assert trips.send(2), "soon after that it goes in a trip"
    assert (server.trips, len(pause.begun)) == ([[2]], 1)
    assert not trips._under_way


def test_an_interrupt_in_the_pause_lets_the_others_go_alone(
    pause: Pause, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_trips, "PATIENCE", 30.0)
    server, raised = Server(), threading.Event()
    pause.interrupt = KeyboardInterrupt()
    with under_way(server) as (trips, take, found):
        trips._running = lambda: 20
        take(1)
        wait_until(lambda: 1 in found, 10, "the first to go at once")

        def interrupted() -> None:
            with pytest.raises(KeyboardInterrupt):
                run(trips, server, 2)
            raised.set()

        threading.Thread(target=interrupted, daemon=True).start()
        wait_until(lambda: bool(pause.begun), 10, "the second to wait")
        take(3)
        trips._running = lambda: 0
        pause.over.set()
        assert raised.wait(10)
    assert server.trips == [(1,), (3,)]
    assert found == {1: 2, 3: 6}
    assert not trips._under_way


def test_a_step_without_an_answer_goes_alone_and_the_others_have_theirs() -> None:
    server = Server(1)
    with under_way(server, 1, 2, 7, 3) as (_, _, found):
        pass
    assert server.trips == [(1,), [2, 7, 3], (7,)]
    assert found == {1: 2, 2: 4, 7: 14, 3: 6}


def test_after_an_error_each_step_of_the_trip_goes_alone() -> None:
    server = Server(1)
    with under_way(server, 1, 2, 13) as (trips, _, found):
        pass
    assert server.trips[:2] == [(1,), [2, 13]]
    assert sorted(map(tuple, server.trips[2:])) == [(2,), (13,)]
    assert found == {1: 2, 2: 4, 13: None}
    assert not trips._under_way


def test_a_step_without_a_wait_goes_in_the_next_trip() -> None:
    server = Server(1)
    with under_way(server, 1, 2) as (trips, _, found):
        assert trips.send(5)
    assert server.trips == [(1,), [2, 5]]
    assert found == {1: 2, 2: 4}
    assert not trips.send(6), "no trip is under way"


def test_who_waits_makes_the_trip_of_a_step_that_came_before() -> None:
    server = Server(1)
    with under_way(server, 1) as (trips, take, found):
        assert trips.send(5)
        take(2)
    assert server.trips == [(1,), [2, 5]]
    assert found == {1: 2, 2: 4}


def test_if_nobody_waits_who_made_the_trip_makes_the_next_one_too() -> None:
    server = Server(1)
    with under_way(server, 1) as (trips, _, found):
        assert trips.send(5)
        assert trips.send(6)
    assert server.trips == [(1,), [5, 6]]
    assert found == {1: 2}
    assert not trips._under_way


def test_if_nobody_knows_what_was_executed_each_step_of_the_trip_fails() -> None:
    server, answers = Server(1), list[object]()

    def lost(_: Sequence[int]) -> list[int | None]:
        raise StoreUnavailable("the reply is lost", None)

    def take(trips: SharedTrips[int, int], number: int) -> None:
        try:
            answers.append(run(trips, server, number))
        except StoreUnavailable as error:
            answers.append((str(error), error.executed))

    with under_way(server, 1) as (trips, _, _):
        trips._together = lost
        threads = [threading.Thread(target=take, args=[trips, number]) for number in (2, 3)]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(trips._waiting) == 2, 10, "the others to wait")
    for thread in threads:
        thread.join(10)
    assert answers == [("the reply is lost", None)] * 2
    assert server.trips == [(1,)]


def test_who_waits_for_a_late_trip_begins_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(1)
    with under_way(server, 1) as (trips, take, found):
        monkeypatch.setattr(shared_trips, "PATIENCE", 0.05)
        assert run(trips, server, 2) == 4
        assert not trips._under_way
        assert run(trips, server, 3) == 6
        server.held[4] = threading.Event()
        take(4)
        monkeypatch.setattr(shared_trips, "PATIENCE", 30.0)
        take(5)
        server.held[1].set()
        wait_until(lambda: 1 in found, 10, "the late trip to end")
        assert [step.given for step in trips._waiting] == [5], "it waits for the trip of 4"
    assert server.trips == [(1,), (2,), (3,), (4,), (5,)]
    assert found == {1: 2, 4: 8, 5: 10}


def test_an_interrupt_of_who_makes_the_trip_is_raised_and_the_others_go_alone() -> None:
    server, raised = Server(1), threading.Event()

    def interrupted(_: Sequence[int]) -> list[int | None]:
        raise KeyboardInterrupt

    with under_way(server, 1) as (trips, take, found):
        trips._together = interrupted

        def lead() -> None:
            with pytest.raises(KeyboardInterrupt):
                run(trips, server, 2)
            raised.set()

        threading.Thread(target=lead, daemon=True).start()
        wait_until(lambda: len(trips._waiting) == 1, 10, "the first to wait")
        take(3)
    assert raised.wait(10)
    assert server.trips == [(1,), (3,)]
    assert found == {1: 2, 3: 6}
    assert not trips._under_way


class InterruptedWait:
    """The lock of a caller that is interrupted while it waits: at once, or when its turn comes."""

    at_once = True

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def acquire(self, timeout: float = -1) -> bool:
        if timeout == -1:
            return self._lock.acquire()
        if not self.at_once:
            self._lock.acquire(timeout=timeout)
        raise KeyboardInterrupt

    def release(self) -> None:
        self._lock.release()


class LateInterruptedWait(InterruptedWait):
    at_once = False


def test_an_interrupt_of_who_waits_does_not_hold_up_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Server(1)
    with under_way(server, 1) as (trips, take, found):
        with monkeypatch.context() as patched:
            patched.setattr(shared_trips, "threading", SimpleNamespace(Lock=InterruptedWait))
            with pytest.raises(KeyboardInterrupt):
                run(trips, server, 2)
        take(3)
    assert server.trips == [(1,), (3,)]
    assert found == {1: 2, 3: 6}


def test_an_interrupt_of_who_is_to_begin_the_next_trip_lets_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server, raised = Server(1), threading.Event()
    with under_way(server, 1) as (trips, take, found):

        def interrupted() -> None:
            with pytest.raises(KeyboardInterrupt):
                run(trips, server, 2)
            raised.set()

        with monkeypatch.context() as patched:
            patched.setattr(shared_trips, "threading", SimpleNamespace(Lock=LateInterruptedWait))
            threading.Thread(target=interrupted, daemon=True).start()
            wait_until(lambda: len(trips._waiting) == 1, 10, "the other to wait")
        take(3)
    assert raised.wait(10)
    assert server.trips == [(1,), (3,)]
    assert found == {1: 2, 3: 6}
    assert not trips._under_way
