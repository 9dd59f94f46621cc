"""Two calls that claim one key, step by step: all states that the steps of both and of others can
lead to.

A claim runs in the code of the record store. It is stopped before each step in the store but the
first that it has not taken yet, and begun again with the replies of before. So a state is a value:
the row, and the replies of each claim.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from celery_leases.call import Call
from celery_leases.decide.answers import Refused
from celery_leases.decide.claim import claimed, decide
from celery_leases.options import DATABASE
from celery_leases.record import (
    Ended,
    Record,
    State,
)
from celery_leases.stores.sql.cooldown_groups import SeenSlots
from celery_leases.stores.sql.records import SqlRecordStore
from celery_leases.stores.sql.rows import COMPARED
from celery_leases.testing.contracts.calls import make_call
from tests.unit.memory_stores import EPOCH, SECOND, FixedAvailability

TTL = 15.0
KEY = "t:task|key"


KEPT = ("created_at", "resumes", "progress", "publish_at", "published_at", "finished_results")
"""The fields of a record that no claim writes."""


Look = tuple[int, bool, Record | None, SeenSlots | None]
"""The reply of ``insert_or_read``."""


class Paused(Exception):
    """The claim has taken its step, and is about to take the next one."""


@dataclass(frozen=True)
class Caller:
    """One call: the replies that its claim has got so far, and its state."""

    call: Call
    replies: tuple[Look | bool, ...] = ()
    won: Record | None = None
    refused: Any = None
    closed: bool = False

    @property
    def claims(self) -> bool:
        return self.won is None and self.refused is None

    @property
    def runs(self) -> bool:
        """Whether its body may be running."""
        return self.won is not None and not self.closed


@dataclass(frozen=True)
class World:
    """A state. ``fence``: the highest one that the key ever had. ``accidents``: how many more may
    happen.
    """

    row: Record | None
    callers: tuple[Caller, Caller]
    now: int = EPOCH
    fence: int = 0
    accidents: int = 0

    def seen(self) -> Record | None:
        """The row as a statement sees it now."""
        return replace(self.row, now=self.now) if self.row is not None else None


def swapped(row: Record | None, seen: Record, new: Record) -> Record | None:
    """The row after a swap, as in SQL: what no claim writes stays. ``None`` if the row is not as it
    was seen.
    """
    if row is None or any(getattr(row, name) != getattr(seen, name) for name in COMPARED):
        return None
    return replace(new, **{name: getattr(row, name) for name in KEPT})


def is_ours(row: Record, call: Call) -> bool:
    """Whether the attempt of *call* runs in the row."""
    return row.is_attempt(State.RUNNING, call.token)


class Broken(AssertionError):
    """A promise does not hold."""


class _Claim(SqlRecordStore):
    """The claim of one caller, up to its next step in the store."""

    def __init__(self, world: World, caller: Caller) -> None:
        self.availability: Any = FixedAvailability()
        self.world = world
        self.replies = list(caller.replies)
        self._known = iter(caller.replies)
        self._stepped = False

    def insert_or_read(self, new: Record, group: str | None) -> Look:
        met: Look = self._step(lambda: self._look_now(new))
        return met

    def swap(self, seen: Record, new: Record) -> bool:
        written: bool = self._step(lambda: self._swap_now(seen, new))
        return written

    def await_lock(self, row: Record) -> None:
        """A look locks nothing."""

    def _step(self, do: Any) -> Any:
        for reply in self._known:
            return reply
        if self._stepped:
            raise Paused
        self._stepped = True
        self.replies.append(do())
        return self.replies[-1]

    def _look_now(self, new: Record) -> Look:
        row, now = self.world.seen(), self.world.now
        if row is not None:
            return now, False, row, None
        assert new.lease_until is not None
        moments: dict[str, Any] = dict.fromkeys(("fence", "created_at", "started_at", "now"), now)
        self._save(replace(new, lease_until=now + new.lease_until, **moments))
        return now, True, None, None

    def _swap_now(self, seen: Record, new: Record) -> bool:
        written = swapped(self.world.row, seen, new)
        if written is None:
            return False
        self._expect(seen.now, written)
        self._save(written)
        return True

    def _expect(self, looked: int, written: Record) -> None:
        """A look and its write are one step: the row is what the rule makes of the one that was
        there at the write.
        """
        assert self.world.row is not None
        before = replace(self.world.row, now=looked)
        caller = next(one for one in self.world.callers if one.call.token == written.owner)
        why = decide(before, caller.call, DATABASE)
        if is_ours(before, caller.call) or why is not None:
            raise Broken(f"claimed in spite of {why}: {before}")
        if written != claimed(before, caller.call, DATABASE, looked):
            raise Broken(f"{written} is not made of {before}")

    def _save(self, row: Record) -> None:
        if row.fence <= self.world.fence:
            raise Broken(f"the fence did not grow: {row.fence} after {self.world.fence}")
        self.world = replace(self.world, row=row, fence=row.fence)


def steps(world: World) -> Iterator[tuple[str, World]]:
    """What can happen next, by name."""
    for place, caller in enumerate(world.callers):
        if caller.claims:
            yield f"{place} goes on", _going_on(world, place)
        if caller.runs:
            yield from ((f"{place} {name}", after) for name, after in _running(world, place))
    if world.row is not None:
        yield "forget", _forgotten(world)
    yield "time passes", replace(world, now=world.now + round(TTL * SECOND))
    if world.accidents:
        less = replace(world, accidents=world.accidents - 1)
        yield from ((name, after) for name, after in _accidents(less))


def _accidents(world: World) -> Iterator[tuple[str, World]]:
    row = world.row
    for place, caller in enumerate(world.callers):
        if caller.claims:
            yield f"{place} loses a reply", _losing(world, place)
        if row is not None and caller.runs and is_ours(row, caller.call):
            yield (
                f"{place} saves progress",
                replace(world, row=replace(row, progress="saved", crashes=0)),
            )
    if row is not None and row.publish_at is None:
        sent = replace(row, publish_at=world.now, message="sent")
        yield "a message is to be published", replace(world, row=sent)
    if row is not None and row.state is State.PENDING:
        yield (
            "the call is given up",
            replace(world, row=replace(row, resumes=False, ended=Ended.FAILED)),
        )
        yield (
            "the call is called off",
            replace(world, row=replace(row, resumes=False, ended=Ended.TERMINATED)),
        )
    if row is not None and row.state is not State.RUNNING and row.fence < world.now:
        yield (
            "purge",
            replace(world, row=None, accidents=0),
        )  # a key without a row has no fence but the clock
    yield "the clock jumps back", replace(world, now=world.now - 60 * SECOND)


def _going_on(world: World, place: int) -> World:
    caller = world.callers[place]
    claim = _Claim(world, caller)
    try:
        answer = claim.claim(caller.call, DATABASE)
    except Paused:
        return _with(claim.world, place, replies=tuple(claim.replies))
    if isinstance(answer, Refused):
        return _with(claim.world, place, replies=(), refused=answer.why)
    assert answer.record is not None
    after = claim.world.row
    if after is None or not is_ours(after, caller.call):
        # Its row was there once, and went on while the reply was on its way.
        assert answer.record.fence < claim.world.fence or after is None
    return _with(claim.world, place, replies=(), won=answer.record)


def _losing(world: World, place: int) -> World:
    """The step is executed, its reply is lost, and the claim starts again with the same token."""
    caller = world.callers[place]
    claim = _Claim(world, caller)
    with suppress(Paused):
        claim.claim(caller.call, DATABASE)
    return _with(claim.world, place, replies=())


def _running(world: World, place: int) -> Iterator[tuple[str, World]]:
    """What a holder does: each fenced by state, fence and owner, as in the stores, a renewal by
    state and owner.
    """
    caller, row = world.callers[place], world.row
    assert caller.won is not None
    done = _with(world, place, closed=True)
    ours = row is not None and is_ours(row, caller.call)
    if row is not None and ours:
        assert row.lease_until is not None
        until = max(row.lease_until, world.now + round(TTL * SECOND))
        yield "renews", replace(world, row=replace(row, lease_until=until))
    if row is None or not ours or row.fence != caller.won.fence:
        return
    closed = replace(row, lease_until=None, finished_at=world.now)
    yield (
        "is done",
        replace(done, row=replace(closed, state=State.DONE, ended=Ended.RETURNED, result="1")),
    )
    yield (
        "gives back",
        replace(done, row=replace(closed, state=State.PENDING, ended=Ended.LOST, resumes=True)),
    )


def _forgotten(world: World) -> World:
    row = world.row
    assert row is not None
    fence = max(row.fence + 1, world.now)
    empty: dict[str, Any] = {
        "state": State.PENDING, "owner": "", "call_id": "", "holder": "", "ended": None,
    }  # fmt: skip
    empty |= {
        "attempt": 0, "crashes": 0, "generation": row.generation + 1, "lease_until": None,
        "result": None,
    }  # fmt: skip
    return replace(
        world, row=replace(row, fence=fence, previous=None, crashed_at=None, **empty), fence=fence
    )


def _with(world: World, place: int, **changes: Any) -> World:
    callers = list(world.callers)
    callers[place] = replace(callers[place], **changes)
    return replace(world, callers=(callers[0], callers[1]))


# -- searching -------------------------------------------------------------------------------------


def beginnings(accidents: int) -> Iterator[tuple[str, World]]:
    """No row, a row whose call resumes by itself, a dead holder's row, and one whose retention is
    over.
    """
    call = make_call(
        KEY, "token-one", task="task", key="key", call_id="call-one", repeat=True, message="of one"
    )
    callers = (
        Caller(call),
        Caller(replace(call, token="token-two", call_id="call-two", message="of two")),
    )
    dead = claimed(None, replace(call, token="dead"), DATABASE, EPOCH - 60 * SECOND)
    closed = replace(dead, lease_until=None)
    rows = {
        "no row": None,
        "pending": replace(closed, state=State.PENDING, ended=Ended.FAILED, resumes=True),
        "running, lapsed": replace(dead, call_id="call-dead", crashes=1),
        "done, over": replace(
            closed, state=State.DONE, ended=Ended.RETURNED, expires_at=EPOCH - SECOND
        ),
    }
    for name, row in rows.items():
        yield (
            name,
            World(row, callers, fence=row.fence if row is not None else 0, accidents=accidents),
        )


def search(begin: World, depth: int) -> int:
    """Walk through all states within *depth* steps; how many there are. Raises :class:`Broken` with
    the way there.
    """
    known: dict[World, tuple[World, str] | None] = {begin: None}
    edge = [begin]
    for _ in range(depth):
        reached: list[World] = []
        for world in edge:
            try:
                for name, after in steps(world):
                    if after not in known:
                        known[after] = (world, name)
                        reached.append(after)
            except Broken as error:
                raise Broken(f"{error} after {_way(known, world)}") from None
        edge = reached
    return len(known)


def walk(begin: World, seed: int, length: int) -> None:
    """A random walk of that many steps. Raises :class:`Broken` with the way and the seed."""
    world, way, rand = begin, [], random.Random(seed)
    for _ in range(length):
        try:
            name, world = rand.choice(list(steps(world)))
        except Broken as error:
            raise Broken(f"{error} after {way} (seed {seed})") from None
        way.append(name)


def _way(known: dict[World, tuple[World, str] | None], world: World) -> list[str]:
    way: list[str] = []
    while (before := known[world]) is not None:
        world, name = before
        way.insert(0, name)
    return way
