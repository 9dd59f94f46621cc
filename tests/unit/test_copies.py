"""All schedules of the copies of one waiting call: none of them may end without a copy.

A broker delivers messages at least once, a store keeps the mark, and :meth:`Publisher.reschedule`
runs unchanged, one step at a time. Between two steps its process may be killed, another delivery
may take any number of steps, and the mark may be lost or return to an earlier value. Known states
are not explored again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from celery_leases.decide.copies import Copy, waiter_mark
from celery_leases.errors import StoreUnavailable
from celery_leases.text.notices import logger
from celery_leases.worker import publisher
from celery_leases.worker.headers import Header
from celery_leases.worker.publisher import Publisher

TASK: Any = SimpleNamespace(name="billing.send", request=SimpleNamespace(retries=0, id="call"))
NONCES = "0123456789abcdef"


class Step(BaseException):
    """The process under :meth:`Publisher.reschedule` has come to a step that has not been taken
    yet.
    """

    def __init__(self, name: str, *what: Any) -> None:
        super().__init__(name)
        self.name = name
        self.what = what


@dataclass(frozen=True, order=True)
class Message:
    """What the broker has: which copy, and how often it may still have to wait."""

    copy: str | None = None


@dataclass(frozen=True, order=True)
class Process:
    """A delivery: its message, the replies to the steps it has taken, and the nonce it makes."""

    message: Message
    ran: bool
    nonce: int
    replies: tuple[Any, ...] = ()


@dataclass(frozen=True)
class World:
    """The whole state. ``past`` are earlier values of the mark; the other numbers bound what may
    still happen.
    """

    queue: tuple[Message, ...] = (Message(),)
    processes: tuple[Process, ...] = ()
    mark: str | None = None
    past: frozenset[str | None] = frozenset()
    nonces: frozenset[int] = frozenset()
    hops: int = 3
    faults: int = 2
    doubles: int = 0
    runs: int = 0
    kills: int = 1
    abreast: int = 2


class Played(Publisher):
    """The real logic over replies that were given before."""

    def __init__(self, replies: tuple[Any, ...]) -> None:
        super().__init__(SimpleNamespace())  # type: ignore[arg-type]
        self._replies = list(replies)

    def _take(self, name: str, *what: Any) -> Any:
        if not self._replies:
            raise Step(name, *what)
        reply = self._replies.pop(0)
        if reply == "away":
            raise StoreUnavailable(f"{name}: away", None)
        if reply == "broken":
            raise RuntimeError(name)
        return reply

    def mark(self, stored_key: str, name: str) -> str | None:
        return self._take("read")  # type: ignore[no-any-return]

    def swap_mark(
        self, stored_key: str, name: str, expected: str | None, value: str, ttl: float
    ) -> bool:
        return bool(self._take("swap", expected, value))

    def _publish(self, task: Any, header: Any, delay: float) -> None:
        self._take("publish", str(header.copy))


@cache
def played(process: Process) -> Step | bool | Exception:
    """The next step of *process*, or how its reschedule has ended."""
    copies: Any = Played(process.replies)
    setattr(publisher, "uuid4", lambda: SimpleNamespace(hex=NONCES[process.nonce] * 32))  # noqa: B010 - not exported
    try:
        header = Header("billing.send", "call", copy=Copy.read(process.message.copy) or Copy())
        return bool(
            copies.reschedule(
                TASK, header, 1.0, copies, "t:billing.send|7", 15.0, newest=process.ran
            )
        )
    except Step as step:
        return step
    except RuntimeError as error:
        return error


def without(items: tuple[Any, ...], item: Any) -> tuple[Any, ...]:
    at = items.index(item)
    return items[:at] + items[at + 1 :]


def successors(world: World) -> Iterator[tuple[str, World]]:
    for message in set(world.queue):
        yield from delivered(world, message)
    for process in set(world.processes):
        yield from stepped(world, process)
        if world.kills:
            yield "kill", gone(replace(world, kills=world.kills - 1), process, back=True)
        if world.doubles:
            redelivered = replace(
                world, queue=sorted_(world.queue, process.message), doubles=world.doubles - 1
            )
            yield "redeliver what still runs", redelivered
    if world.faults:
        for earlier in world.past - {world.mark}:
            yield (
                f"the mark goes back to {earlier}",
                replace(world, mark=earlier, faults=world.faults - 1),
            )


def delivered(world: World, message: Message) -> Iterator[tuple[str, World]]:
    """A worker gets *message*, whose call must wait once more, perhaps after another run of its
    body.
    """
    free = [number for number in range(len(NONCES)) if number not in world.nonces]
    if not world.hops or len(world.processes) >= world.abreast:
        return
    # Which of two nonces is the greater one is chance: one from the middle, one below it, one
    # above.
    chosen = {free[len(free) // 2]} if len(free) == len(NONCES) else {free[0], free[-1]}
    for nonce in sorted(chosen):
        for ran in (False, True) if world.runs else (False,):
            process = Process(message, ran, nonce)
            yield (
                f"deliver {message.copy}, {ran=}",
                replace(
                    world,
                    queue=without(world.queue, message),
                    processes=sorted_(world.processes, process),
                    nonces=world.nonces | {nonce},
                    hops=world.hops - 1,
                    runs=world.runs - ran,
                ),
            )


def stepped(world: World, process: Process) -> Iterator[tuple[str, World]]:
    """One step of *process*: done, failed, or done with a reply that is lost."""
    step = played(process)
    if not isinstance(step, Step):
        # A reschedule that raises rejects its message, which the broker queues again; every other
        # one acks it.
        yield f"end with {step}", gone(world, process, back=isinstance(step, Exception))
        return

    def after(reply: Any, **changes: Any) -> World:
        went_on = replace(process, replies=(*process.replies, reply))
        others = without(world.processes, process)
        return replace(world, **{"processes": sorted_(others, went_on), **changes})

    failed = {"faults": world.faults - 1}
    if step.name == "read":
        yield f"read {world.mark}", after(world.mark)
        if world.faults:
            yield "read fails", after("away", **failed)
    elif step.name == "publish":
        more = {"queue": sorted_(world.queue, Message(*step.what))}
        yield f"publish {step.what[0]}", after(None, **more)
        if world.faults:
            yield "publish fails", after("broken", **failed)
            yield f"publish {step.what[0]}, reply lost", after("broken", **failed, **more)
    else:
        expected, value = step.what
        if world.mark in (None, expected, value):
            done = {"mark": value, "past": world.past | {world.mark}}
            yield f"swap to {value}", after(True, **done)
            if world.faults:
                yield f"swap to {value}, reply lost", after("away", **failed, **done)
        else:
            yield "swap refused", after(False)
        if world.faults:
            yield "swap fails", after("away", **failed)
            yield "swap breaks", after("broken", **failed)


def gone(world: World, process: Process, *, back: bool) -> World:
    """The world without *process*; *back*: its message is queued again."""
    queue = sorted_(world.queue, process.message) if back else world.queue
    return replace(world, queue=queue, processes=without(world.processes, process))


def sorted_(items: tuple[Any, ...], item: Any) -> tuple[Any, ...]:
    """*items* with one more *item*, in an order of their own, as theirs makes no difference."""
    return tuple(sorted((*items, item), key=hash))


def explore(world: World) -> tuple[int, list[str] | None]:
    """How many states there are, and the way to one that has lost the call."""
    came: dict[World, tuple[World, str] | None] = {world: None}
    waiting = deque([world])
    while waiting:
        here = waiting.popleft()
        if not here.queue and not here.processes:
            return len(came), list(way_to(here, came))[::-1]
        for what, there in successors(here):
            if there not in came:
                came[there] = here, what
                waiting.append(there)
    return len(came), None


def way_to(world: World, came: dict[World, tuple[World, str] | None]) -> Iterator[str]:
    before = came[world]
    while before is not None:
        world, what = before
        yield what
        before = came[world]


@pytest.fixture(autouse=True)
def _nonces_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore what :func:`played` replaces; what is logged of each fault is not looked at
    here.
    """
    monkeypatch.setattr("celery_leases.worker.publisher.uuid4", uuid4)
    monkeypatch.setattr(logger.logger, "disabled", True)


@pytest.mark.parametrize(
    "world",
    [
        World(hops=4, faults=2, abreast=1),
        World(hops=3, faults=1),
        pytest.param(World(hops=3, faults=2), marks=pytest.mark.nightly),
        World(hops=3, faults=1, kills=0, doubles=1),
        World(hops=3, faults=1, kills=0, runs=1, queue=(Message(), Message())),
    ],
    ids=["one by one", "side by side", "two faults", "redelivered while it runs", "two messages"],
)
def test_no_schedule_loses_a_waiting_call(world: World) -> None:
    states, lost = explore(world)
    print(f"{states} states")
    assert lost is None, " -> ".join(lost)
    assert states > 10_000


def drained(world: World) -> World:
    """Deliver each message that is queued now once, one after the other, without a fault."""
    for message in world.queue:
        free = min(set(range(len(NONCES))) - world.nonces)
        world = replace(world, queue=without(world.queue, message), nonces=world.nonces | {free})
        world = replace(world, processes=(Process(message, ran=False, nonce=free),))
        while world.processes:
            _, world = next(stepped(world, world.processes[0]))
    return world


def test_without_faults_one_copy_waits() -> None:
    world = World(queue=(Message(),) * 5, faults=0)
    for _ in range(3):
        world = drained(world)
        assert len(world.queue) == 1


def test_two_copies_that_were_published_side_by_side_become_one() -> None:
    world = World(faults=0, doubles=1)
    for nonces in ((3, 9), (9, 3)):
        first, second = (
            Process(Message(), ran=False, nonce=nonce, replies=(None,)) for nonce in nonces
        )
        both = replace(world, queue=(), processes=(first, second), nonces=frozenset(nonces))
        for nonce in nonces:
            while now := [process for process in both.processes if process.nonce == nonce]:
                both = next(world for _, world in stepped(both, now[0]))
        assert len(both.queue) == 2
        assert len(drained(drained(both)).queue) == 1


@pytest.mark.parametrize(
    "error",
    [StoreUnavailable("away", None), RuntimeError("value too long for type"), OSError(24, "x")],
)
@pytest.mark.parametrize("step", ["mark", "swap_mark"])
def test_a_mark_that_fails_in_any_way_undoes_no_publish(monkeypatch, step, error) -> None:
    published: list[Any] = []

    def fail(*_: Any) -> None:
        raise error

    marks: Any = SimpleNamespace(mark=lambda *_: None, swap_mark=lambda *_: True)
    setattr(marks, step, fail)
    copies = Publisher(SimpleNamespace())  # type: ignore[arg-type]
    monkeypatch.setattr(copies, "_publish", lambda *given: published.append(given))
    assert copies.reschedule(
        TASK, Header("billing.send", "call"), 1.0, marks, "t:billing.send|7", 15.0
    )
    assert len(published) == 1


@pytest.mark.parametrize(
    "text", [None, "", "x", "1", "0 " + "a" * 32, f"1 {'g' * 32}", f"{10**18} {'a' * 32}", 1, {}]
)
def test_what_is_no_copy_is_no_evidence_of_one(text: object) -> None:
    assert Copy.read(text) is None


def test_a_copy_is_read_as_it_was_written() -> None:
    first = Copy().after("f" * 32)
    second = first.after("0" * 32)
    assert Copy.read(str(second)) == second
    assert Copy() < first < second


@pytest.mark.parametrize("length", [200, 240, 247, 255, 300, 100_000])
def test_marks_have_names_of_bounded_length(length: int) -> None:
    one, other = "x" * (length - 1) + "1", "x" * (length - 1) + "2"
    names = {waiter_mark(call, retries) for call in (one, other) for retries in (0, 1)}
    assert len(names) == 4
    assert all(len(name) <= 255 for name in names)
