"""Steps that go to a server together: who is alone goes at once, and each has its own answer."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from celery_leases.concurrency import shared_trips
from celery_leases.concurrency.shared_trips import SharedTrips
from celery_leases.errors import StoreUnavailable
from celery_leases.testing.waits import wait_until


class Server:
    """Doubles numbers. A trip that begins with a number in *held* waits until it is released; 13
    cannot be doubled, and 7 only alone.
    """

    def __init__(self, *held: int) -> None:
        self.trips: list[Sequence[int]] = []
        self.held = {number: threading.Event() for number in held}

    def double(self, numbers: Sequence[int]) -> list[int | None]:
        self.trips.append(numbers)
        if numbers[0] in self.held:
            assert self.held[numbers[0]].wait(10)
        if 13 in numbers:
            raise ValueError(13)
        return [None if number == 7 else 2 * number for number in numbers]


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
            found[number] = trips.run(number)

        threads.append(threading.Thread(target=answer, daemon=True))
        threads[-1].start()
        wait_until(
            lambda: (
                any(number in trip for trip in server.trips)
                or number in [step.given for step in trips._waiting]
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
    assert [trips.run(1), trips.run(2)] == [2, 4]
    assert server.trips == [[1], [2]]


def test_those_that_come_during_a_trip_go_together_in_the_next_one() -> None:
    server = Server(1)
    with under_way(server, 1, 2, 3, 4) as (_, _, found):
        pass
    assert server.trips == [[1], [2, 3, 4]]
    assert found == {1: 2, 2: 4, 3: 6, 4: 8}


def test_those_that_come_during_the_second_trip_go_in_the_third() -> None:
    server = Server(1, 2)
    with under_way(server, 1, 2, 3) as (_, take, found):
        server.held[1].set()
        wait_until(lambda: len(server.trips) == 2, 10, "the second trip")
        take(4)
    assert server.trips == [[1], [2, 3], [4]]
    assert found == {1: 2, 2: 4, 3: 6, 4: 8}


def test_a_step_without_an_answer_goes_alone_and_the_others_have_theirs() -> None:
    server = Server(1)
    with under_way(server, 1, 2, 7, 3) as (_, _, found):
        pass
    assert found == {1: 2, 2: 4, 7: None, 3: 6}


def test_after_an_error_all_of_the_trip_and_all_that_wait_go_alone() -> None:
    server = Server(1, 2)
    with under_way(server, 1, 2, 13) as (trips, take, found):
        server.held[1].set()
        wait_until(lambda: len(server.trips) == 2, 10, "the second trip")
        take(4)
    assert server.trips == [[1], [2, 13]]
    assert found == {1: 2, 2: None, 13: None, 4: None}
    assert trips.run(5) == 10, "the next one shares again"


def test_a_step_without_a_wait_goes_in_the_next_trip() -> None:
    server = Server(1)
    with under_way(server, 1, 2) as (trips, _, found):
        assert trips.send(5)
    assert server.trips == [[1], [2, 5]]
    assert found == {1: 2, 2: 4}
    assert not trips.send(6), "no trip is under way"


def test_if_nobody_waits_who_made_the_trip_makes_the_next_one_too() -> None:
    server = Server(1)
    with under_way(server, 1) as (trips, _, found):
        assert trips.send(5)
        assert trips.send(6)
    assert server.trips == [[1], [5, 6]]
    assert found == {1: 2}
    assert not trips._under_way


def test_if_nobody_knows_what_was_executed_each_step_of_the_trip_fails() -> None:
    answers: list[object] = []

    def lost(given: Sequence[int]) -> list[int | None]:
        if given == [1]:
            wait_until(lambda: len(trips._waiting) == 2, 10, "the others to wait")
            return [2]
        raise StoreUnavailable("the reply is lost", None)

    def take(number: int) -> None:
        try:
            answers.append(trips.run(number))
        except StoreUnavailable as error:
            answers.append((str(error), error.executed))

    trips = SharedTrips(lost)
    threads = [threading.Thread(target=take, args=[number], daemon=True) for number in (1, 2, 3)]
    threads[0].start()
    wait_until(lambda: trips._under_way, 10, "the first trip")
    for thread in threads[1:]:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert answers.count(("the reply is lost", None)) == 2
    assert 2 in answers


def test_an_interrupt_of_who_makes_the_trip_is_raised_and_lets_the_others_go_alone() -> None:
    trips: SharedTrips[int, int] = SharedTrips(lambda _: pytest.fail("not called"))
    waiting, raised = threading.Event(), threading.Event()

    def interrupted(_: Sequence[int]) -> list[int | None]:
        waiting.set()
        wait_until(lambda: len(trips._waiting) == 1, 10, "the other to wait")
        raise KeyboardInterrupt

    trips._together = interrupted

    def first() -> None:
        with pytest.raises(KeyboardInterrupt):
            trips.run(1)
        raised.set()

    thread = threading.Thread(target=first, daemon=True)
    thread.start()
    assert waiting.wait(10)
    assert trips.run(2) is None
    thread.join(10)
    assert raised.is_set()
    assert not trips._under_way


def test_a_step_does_not_wait_for_a_silent_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_trips, "PATIENCE", 0.05)
    server = Server(1)
    with under_way(server, 1) as (trips, take, found):
        assert trips.run(2) is None
        assert trips._waiting == []
        monkeypatch.setattr(shared_trips, "PATIENCE", 30.0)
        take(3)
    assert server.trips == [[1], [3]]
    assert found == {1: 2, 3: 6}


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
                trips.run(2)
        take(3)
    assert server.trips == [[1], [3]]
    assert found == {1: 2, 3: 6}


def test_an_interrupt_of_who_is_to_begin_the_next_trip_lets_the_others_go_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server, raised = Server(1), threading.Event()
    with under_way(server, 1) as (trips, take, found):

        def interrupted() -> None:
            with pytest.raises(KeyboardInterrupt):
                trips.run(2)
            raised.set()

        with monkeypatch.context() as patched:
            patched.setattr(shared_trips, "threading", SimpleNamespace(Lock=LateInterruptedWait))
            threading.Thread(target=interrupted, daemon=True).start()
            wait_until(lambda: len(trips._waiting) == 1, 10, "the other to wait")
        take(3)
    assert raised.wait(10)
    assert server.trips == [[1]]
    assert found == {1: 2, 3: None}
    assert not trips._under_way
