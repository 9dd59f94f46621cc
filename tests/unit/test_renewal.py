"""The renewer with a fake store and clock: deadlines, losses, re-assertion, and what ``drop``
waits for.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from celery_leases import events
from celery_leases.attempt.held_lease import DEADLINE, HELD_TOO_LONG, NOT_EXTENDED, HeldLease
from celery_leases.attempt.renewal import HELD_BY_OTHER, RELEASED, SUPERSEDED, Renewer, Stores
from celery_leases.call import Call
from celery_leases.concurrency import os_threads
from celery_leases.decide.answers import Renewal, RenewalResult
from celery_leases.errors import LeaseLost, StoreUnavailable
from celery_leases.events import LeaseRenewed, RenewalFailed
from celery_leases.record import (
    Record,
    State,
)
from celery_leases.testing.contracts.calls import make_call
from tests.unit.memory_stores import ManualClock, Seen

TTL = 6.0
HARD = TTL - TTL * 0.01 - 0.002
STOP = HARD - 1.0
SOON = 5.0
OURS = "token"


class FakeClock(ManualClock):
    """Its time is set by the test alone."""

    def sleep(self, seconds: float) -> None:
        threading.Event().wait(0.001)


class RealClock(FakeClock):
    """The real one, for the threads."""

    def now(self) -> float:
        return time.monotonic()


@dataclass
class FakeLeases:
    """Answers renewals as the test wants, and stores all requests."""

    answer: Callable[[Renewal], RenewalResult | StoreUnavailable] = lambda _: RenewalResult.OURS
    reasserts: bool = True
    in_records: bool = False
    name: str = "fake"
    renewed: list[Renewal] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    reasserted: list[str] = field(default_factory=list)
    #: For how long the latest lost lease was written again.
    lasts: float = 0.0

    def renew(self, renewals: Sequence[Renewal]) -> list[RenewalResult | StoreUnavailable]:
        self.renewed += renewals
        return [self.answer(renewal) for renewal in renewals]

    def reassert(self, call: Call, ttl: float) -> bool:
        self.reasserted.append(call.token)
        self.lasts = ttl
        return self.reasserts

    def release(self, stored_key: str, token: str) -> bool:
        self.released.append(token)
        return True


@dataclass
class Row:
    """The fields of a record that the renewer reads."""

    state: State
    fence: int
    owner: str

    is_attempt = Record.is_attempt


THEIRS = Row(State.RUNNING, 8, "other")


@dataclass
class FakeRecords:
    """One row for all keys."""

    row: Row | None = None

    def read(self, stored_key: str) -> Any:
        return self.row

    def purge_in_turn(self, limit: int, every: float) -> bool:
        return False


@dataclass
class Bench:
    """A renewer on fakes."""

    leases: FakeLeases = field(default_factory=FakeLeases)
    records: FakeRecords = field(default_factory=FakeRecords)
    seen: Seen = field(default_factory=Seen)
    clock: FakeClock = field(default_factory=FakeClock)

    def __post_init__(self) -> None:
        records: Any = self.records
        leases: Any = self.leases
        stores = Stores(leases, records)
        self.renewer = Renewer(stores, stores, self.seen, self.clock, records)

    def held_lease(self, token: str = OURS, ttl: float = TTL, **options: Any) -> HeldLease:
        """A lease sent for just now, known to the renewer but not to its threads."""
        call = make_call("t:task|key", token, task="task", key="key", call_id="call", ttl=ttl)
        made = HeldLease(call, self.clock.now(), self.clock, **options)
        made.fence = 7
        self.renewer._held_leases[token] = made
        self.records.row = Row(State.RUNNING, 7, token)
        return made

    def renew(self, *held_leases: HeldLease) -> None:
        """What the renewal thread does once they are due."""
        self.renewer._renew(list(held_leases))


@pytest.fixture
def bench() -> Bench:
    """The renewer's own code, step by step, under a clock that stands still."""
    return Bench()


def until(seen: Callable[[], Any], what: str) -> None:
    """Wait for what a thread does."""
    over = time.monotonic() + SOON
    while not seen():
        assert time.monotonic() < over, f"waited {SOON} s for {what}"
        threading.Event().wait(0.001)


# -- arithmetic ------------------------------------------------------------------------------------


def test_a_lease_counts_until_the_stop_deadline_and_not_a_moment_longer(bench: Bench) -> None:
    held_lease = bench.held_lease()
    assert held_lease.hard_deadline == pytest.approx(1000 + HARD)
    assert held_lease.stop_deadline == pytest.approx(1000 + STOP)
    assert held_lease.remaining() == pytest.approx(STOP)
    bench.clock.time = 1000 + STOP - 0.001
    assert held_lease.held
    held_lease.check()
    bench.clock.time = 1000 + STOP
    assert not held_lease.held
    assert held_lease.remaining() == 0
    with pytest.raises(LeaseLost, match=DEADLINE):
        held_lease.check()


def test_a_renewal_counts_from_when_it_was_sent(bench: Bench) -> None:
    held_lease = bench.held_lease()
    bench.clock.time = 1002.0

    def slow(_: Renewal) -> RenewalResult:
        bench.clock.time = 1004.0
        return RenewalResult.OURS

    bench.leases.answer = slow
    bench.renew(held_lease)
    assert held_lease.hard_deadline == pytest.approx(1002 + HARD)
    assert held_lease.due == pytest.approx(1002 + TTL / 3)
    assert [event.remaining for event in bench.seen.of(LeaseRenewed)] == [pytest.approx(STOP - 2)]


def test_the_event_of_a_renewal_has_its_lateness(bench: Bench) -> None:
    held_lease = bench.held_lease()
    bench.clock.time = held_lease.due + 3.0
    bench.renew(held_lease)
    bench.renew(held_lease)
    assert [event.late for event in bench.seen.of(LeaseRenewed)] == [pytest.approx(3.0), 0.0]


def test_a_renewal_never_shortens_what_extend_has_granted(bench: Bench) -> None:
    held_lease = bench.held_lease()
    bench.renewer.extend(held_lease, 60)
    assert bench.leases.renewed[-1].ttl == 60
    far = held_lease.hard_deadline
    assert far > 1000 + 59
    bench.clock.time = 1001.0
    bench.renew(held_lease)
    assert held_lease.hard_deadline == far
    assert held_lease.due == pytest.approx(1001 + TTL / 3)


def test_extend_of_a_lost_lease_sends_no_command(bench: Bench) -> None:
    held_lease = bench.held_lease()
    bench.clock.time = 1000 + STOP
    with pytest.raises(LeaseLost):
        bench.renewer.extend(held_lease, 60)
    assert not bench.leases.renewed


def test_extend_finds_another_owner(bench: Bench) -> None:
    held_lease = bench.held_lease()
    bench.records.row = THEIRS
    bench.leases.answer = lambda _: RenewalResult.OTHER
    with pytest.raises(LeaseLost, match=HELD_BY_OTHER):
        bench.renewer.extend(held_lease, 60)
    assert held_lease.lost == HELD_BY_OTHER


@pytest.mark.parametrize("slot", [None, ("openai:large", 0)])
def test_a_probes_slot_is_renewed_along_with_its_lease(bench: Bench, slot: Any) -> None:
    """By the renewal thread and by ``extend`` alike: a long probe must not be taken for dead."""
    held_lease = bench.held_lease()
    if slot is not None:
        held_lease.call = replace(held_lease.call, group=slot[0])
        held_lease.probe()
    bench.renew(held_lease)
    bench.renewer.extend(held_lease, 60)
    assert [(renewal.slot, renewal.ttl) for renewal in bench.leases.renewed] == [
        (slot, TTL),
        (slot, 60),
    ]


# -- losing ----------------------------------------------------------------------------------------


def test_another_owner_means_lost_at_once(bench: Bench) -> None:
    held_lease, nudged = bench.held_lease(), []
    held_lease.interrupt = lambda: nudged.append(1)
    bench.records.row = THEIRS
    bench.leases.answer = lambda _: RenewalResult.OTHER
    bench.renew(held_lease)
    assert (held_lease.lost, held_lease.held, nudged) == (HELD_BY_OTHER, False, [1])
    assert held_lease.remaining() == 0.0
    assert [event.reason for event in bench.seen.of(events.LeaseLost)] == [HELD_BY_OTHER]
    assert not bench.leases.released


def test_a_late_success_does_not_revive_a_lost_lease(bench: Bench) -> None:
    held_lease = bench.held_lease()

    def late(_: Renewal) -> RenewalResult:
        bench.renewer.lose(held_lease, DEADLINE)
        return RenewalResult.OURS

    bench.leases.answer = late
    bench.renew(held_lease)
    assert held_lease.lost == DEADLINE
    assert not held_lease.held
    assert held_lease.hard_deadline == pytest.approx(1000 + HARD)
    assert len(bench.seen.of(events.LeaseLost)) == 1


def test_a_body_that_has_just_begun_has_done_nothing(bench: Bench) -> None:
    state = bench.held_lease().body_state
    assert (state.goes_on, state.lease, state.progressed, state.completing) == (
        None, None, False, False,
    )  # fmt: skip


def test_a_lease_is_lost_once_and_not_after_it_was_dropped(bench: Bench) -> None:
    lost, dropped = bench.held_lease("lost"), bench.held_lease("dropped")
    bench.renewer.drop(dropped)
    for reason in (RELEASED, HELD_BY_OTHER):
        bench.renewer.lose(lost, reason)
        bench.renewer.lose(dropped, reason)
    assert (lost.lost, dropped.lost) == (RELEASED, None)
    assert [event.reason for event in bench.seen.of(events.LeaseLost)] == [RELEASED]


def test_a_lost_lease_is_not_renewed_any_more(bench: Bench) -> None:
    held_lease = bench.held_lease()
    assert held_lease.renewable(1000.0)
    bench.renewer.lose(held_lease, HELD_BY_OTHER)
    assert not held_lease.renewable(1000.0)


def test_one_lost_lease_leaves_the_others_alone(bench: Bench) -> None:
    mine, theirs = bench.held_lease("mine"), bench.held_lease("theirs")
    bench.records.row = THEIRS
    bench.leases.answer = lambda renewal: (
        RenewalResult.OURS if renewal.token == "mine" else RenewalResult.OTHER
    )
    bench.clock.time = 1001.0
    bench.renew(mine, theirs)
    assert (mine.lost, theirs.lost) == (None, HELD_BY_OTHER)
    assert mine.hard_deadline == pytest.approx(1001 + HARD)


@pytest.mark.parametrize("error", [StoreUnavailable("away", None), ValueError("a bug")])
def test_a_store_that_raises_moves_no_deadline_and_is_asked_again_sooner(bench, error) -> None:
    held_lease = bench.held_lease()
    bench.clock.time = 1002.0

    def fail(_: Renewal) -> RenewalResult:
        raise error

    bench.leases.answer = fail
    bench.renew(held_lease)
    assert held_lease.lost is None
    assert held_lease.hard_deadline == pytest.approx(1000 + HARD)
    assert held_lease.due == pytest.approx(1002 + TTL / 12)
    assert [event.error for event in bench.seen.of(RenewalFailed)] == [str(error)]


def test_one_lease_that_fails_does_not_fail_the_others(bench: Bench) -> None:
    before, down, forgotten, after = held_leases = [
        bench.held_lease(token) for token in ("a", "b", "c", "d")
    ]
    bench.clock.time = 1002.0
    answers: dict[str, RenewalResult | StoreUnavailable] = {
        "b": StoreUnavailable("node away", None),
        "c": RenewalResult.MISSING,
    }
    bench.leases.answer = lambda renewal: answers.get(renewal.token, RenewalResult.OURS)

    def refuse(call: Call, ttl: float) -> bool:
        raise StoreUnavailable("cannot be asserted", None)

    bench.leases.reassert = refuse  # type: ignore[method-assign]
    bench.renew(*held_leases)
    assert before.hard_deadline == after.hard_deadline == pytest.approx(1002 + HARD)
    assert down.hard_deadline == forgotten.hard_deadline == pytest.approx(1000 + HARD)
    assert [held_lease.lost for held_lease in held_leases] == [None] * 4
    assert [event.error for event in bench.seen.of(RenewalFailed)] == [
        "node away",
        "cannot be asserted",
    ]


def test_leases_that_are_nearly_due_are_renewed_along_with_one_that_is_due(bench: Bench) -> None:
    early = bench.held_lease("early")
    bench.clock.time += TTL / 30
    soon = bench.held_lease("soon")
    bench.clock.time += 0.001
    later = bench.held_lease("later")
    assert bench.renewer._take_due(early.due - 0.001) == []
    bench.clock.time = early.due
    assert bench.renewer._take_due(bench.clock.now()) == [early, soon]
    assert [each.in_flight for each in (early, soon, later)] == [True, True, False]
    bench.renew(early, soon)
    assert early.due == soon.due


def test_a_lease_that_needs_no_renewal_is_not_due_again_until_its_row_is_locked(bench) -> None:
    """Otherwise the renewal thread would not sleep."""
    other = bench.held_lease("other")
    completed = bench.held_lease("completed")
    completed.completed()
    bench.clock.time = completed.due
    assert bench.renewer._take_due(bench.clock.now()) == [other]
    assert completed.due == math.inf
    bench.renewer._renewal_wakeup = woken = Waits(bench)  # type: ignore[assignment]
    bench.renewer.row_locked(completed, bench.clock.now())
    assert (completed.due < math.inf, woken.notified) == (True, 1)


def test_the_slot_of_a_completed_body_is_renewed_until_the_body_ends(bench: Bench) -> None:
    """Its key is free, and may be run by another attempt."""
    held_lease = bench.held_lease()
    held_lease.slot = ("openai", 1)
    held_lease.body_state.completing = True
    bench.records.row = Row(State.DONE, 7, OURS)
    bench.leases.answer = lambda _: RenewalResult.MISSING
    for _ in range(3):
        bench.clock.time = held_lease.due
        assert bench.renewer._take_due(bench.clock.now()) == [held_lease]
        bench.renew(held_lease)
        bench.records.row = THEIRS
        bench.leases.answer = lambda _: RenewalResult.OTHER
    assert [renewal.slot for renewal in bench.leases.renewed] == [("openai", 1)] * 3
    assert held_lease.due == pytest.approx(bench.clock.time + TTL / 3)
    assert held_lease.lost is None
    assert bench.leases.reasserted == []


def test_a_row_that_the_body_sees_locked_meanwhile_is_checked_again(bench, monkeypatch) -> None:
    held_lease = bench.held_lease(renew=False)
    bench.leases.answer = lambda _: RenewalResult.LOCKED
    body = threading.Thread(target=bench.renewer.confirm, args=[held_lease])

    def needs_renewer(now: float) -> bool:
        body.start()
        body.join(0.2)
        return False

    bench.clock.time = held_lease.due
    monkeypatch.setattr(held_lease, "needs_renewer", needs_renewer)
    with bench.renewer._lock:
        assert bench.renewer._take_due(bench.clock.now()) == []
    body.join()
    assert held_lease.due < math.inf


def test_an_event_without_a_receiver_is_not_built(bench, monkeypatch) -> None:
    held_lease = bench.held_lease()
    monkeypatch.setattr(bench.seen, "wants", lambda _: False, raising=False)
    bench.renew(held_lease)
    assert not bench.seen
    assert held_lease.due == pytest.approx(1000 + TTL / 3)


def test_a_lease_without_renewal_is_left_to_extend(bench: Bench) -> None:
    held_lease = bench.held_lease(renew=False)
    assert not held_lease.renewable(1000.0)
    bench.renewer.extend(held_lease, 60)
    bench.clock.time = 1050.0
    assert held_lease.held


def test_max_hold_ends_renewal_with_its_reason(bench: Bench) -> None:
    held_lease = bench.held_lease(max_hold=10.0)
    bench.clock.time = 1009.0
    assert held_lease.renewable(1009.0)
    bench.renew(held_lease)
    bench.clock.time = 1010.0
    assert not held_lease.renewable(1010.0)
    assert held_lease.held
    assert held_lease.overdue(1009 + STOP - 0.01) is None
    assert held_lease.overdue(1009 + STOP) == HELD_TOO_LONG


def test_a_lease_that_was_not_extended_has_its_own_reason(bench: Bench) -> None:
    held_lease = bench.held_lease(renew=False)
    bench.clock.time = 1000 + STOP
    assert held_lease.overdue(bench.clock.time) == NOT_EXTENDED
    with pytest.raises(LeaseLost, match=r"lease_renew=False: call self\.lease\.extend") as caught:
        held_lease.check()
    assert caught.value.reason == NOT_EXTENDED
    extended = bench.held_lease(renew=False, max_hold=5.0)
    extended.extended(1000.0, 60.0)
    assert extended.overdue(1000.0 + 60.0) == HELD_TOO_LONG


@pytest.mark.parametrize(
    ("reason", "moved"),
    [
        (DEADLINE, []), (HELD_TOO_LONG, []), (NOT_EXTENDED, []), (HELD_BY_OTHER, [1000.0]),
        (RELEASED, [1000.0]),
    ],
)  # fmt: skip
def test_a_body_that_is_to_be_killed_is_killed_at_once_where_its_key_is_free(bench, reason, moved):
    """Otherwise it may run until the end of its lease, during which no other call gets the key."""
    held_lease, told = bench.held_lease(), []
    held_lease.move_kill_timer = told.append
    bench.renewer.lose(held_lease, reason)
    assert (held_lease.lost, told) == (reason, moved)


def test_the_kill_timer_follows_the_end_of_the_lease(bench: Bench) -> None:
    held_lease, told = bench.held_lease(max_hold=60.0), []
    held_lease.move_kill_timer = told.append
    held_lease.extended(1001.0, TTL)
    held_lease.completed()
    assert told == pytest.approx([1001.0 + HARD, 1060.0])


@pytest.mark.parametrize(
    ("wait", "seconds"), [(Renewer.drop, 5.0), (Renewer.wait_for_renewal, TTL / 10)]
)
def test_a_renewal_without_an_answer_is_waited_for_so_long(wait: Any, seconds: float) -> None:
    bench = Bench(clock=ManualClock())  # type: ignore[arg-type]
    held_lease = bench.held_lease()
    wait(bench.renewer, held_lease)
    assert bench.clock.time == 1000.0
    held_lease.in_flight = True
    wait(bench.renewer, held_lease)
    assert bench.clock.time == pytest.approx(1000.0 + seconds, abs=0.005)


def test_a_deletion_without_an_answer_is_waited_for_so_long() -> None:
    bench = Bench(clock=ManualClock())  # type: ignore[arg-type]
    bench.renewer._purging = True
    bench.renewer.close()
    assert bench.clock.time == pytest.approx(1005.0, abs=0.005)


# -- a store that forgot ---------------------------------------------------------------------------


def test_a_missing_lease_is_asserted_again_and_compared_with_the_record(bench: Bench) -> None:
    held_lease = bench.held_lease()
    bench.leases.answer = lambda _: RenewalResult.MISSING
    bench.clock.time = 1002.0
    bench.renew(held_lease)
    assert bench.leases.reasserted == ["token"]
    assert held_lease.held
    assert held_lease.hard_deadline == pytest.approx(1002 + HARD)
    assert [event.reasserted for event in bench.seen.of(LeaseRenewed)] == [True]
    assert not bench.leases.released


@pytest.mark.parametrize(("extension", "lasts"), [(0.0, TTL), (60.0, 58.0)])
def test_a_missing_lease_is_written_again_until_its_holder_stops(
    bench: Bench, extension: float, lasts: float
) -> None:
    """Not only for its ttl, if the body has extended it."""
    held_lease = bench.held_lease()
    held_lease.extended(1000.0, extension)
    bench.leases.answer = lambda _: RenewalResult.MISSING
    bench.clock.time = 1002.0
    bench.renew(held_lease)
    assert bench.leases.lasts == pytest.approx(lasts, rel=0.01)
    assert bench.clock.time + bench.leases.lasts >= held_lease.hard_deadline


@pytest.mark.parametrize(
    "row",
    [
        Row(State.RUNNING, 8, "other"),
        Row(State.RUNNING, 8, "token"),
        Row(State.DONE, 7, "token"),
        None,
    ],
    ids=["taken over", "a higher fence", "closed", "gone"],
)
def test_a_lease_that_cannot_be_asserted_again_is_lost(bench: Bench, row: Row | None) -> None:
    held_lease = bench.held_lease()
    bench.records.row = row
    bench.leases.answer = lambda _: RenewalResult.MISSING
    bench.renew(held_lease)
    assert held_lease.lost == SUPERSEDED
    assert bench.leases.released == ["token"]


@pytest.mark.parametrize("answer", [RenewalResult.MISSING, RenewalResult.OTHER])
def test_a_lease_that_its_own_outcome_has_ended_is_not_lost(bench: Bench, answer) -> None:
    """The reply to the outcome is on its way; the deadline does not move."""
    held_lease = bench.held_lease()
    before = held_lease.stop_deadline
    bench.leases.reasserts = False
    bench.records.row = Row(State.DONE, 7, "token")
    bench.leases.answer = lambda _: answer
    bench.clock.time = 1002.0
    bench.renew(held_lease)
    assert (held_lease.lost, held_lease.stop_deadline) == (None, before)
    assert held_lease.due == pytest.approx(1002 + TTL / 3)
    assert not bench.seen.of(events.LeaseLost)


def test_a_lease_that_another_attempt_has_acquired_is_lost(bench: Bench) -> None:
    held_lease = bench.held_lease()
    bench.records.row = THEIRS
    bench.leases.answer = lambda _: RenewalResult.MISSING
    bench.leases.reasserts = False
    bench.renew(held_lease)
    assert held_lease.lost == HELD_BY_OTHER
    assert not bench.leases.released


@pytest.mark.parametrize("answer", [RenewalResult.OTHER, RenewalResult.MISSING])
def test_a_lease_that_another_call_has_while_it_reads_the_record_is_not_lost(bench, answer) -> None:
    held_lease = bench.held_lease()
    bench.leases.answer = lambda _: answer
    bench.leases.reasserts = False
    bench.clock.time = 1002.0
    bench.renew(held_lease)
    assert held_lease.lost is None
    assert held_lease.hard_deadline == pytest.approx(1000 + HARD)
    assert held_lease.due == pytest.approx(1002 + TTL / 12)
    assert len(bench.seen.of(RenewalFailed)) == 1
    with pytest.raises(
        StoreUnavailable, match="another call holds the lease while it reads the record"
    ) as caught:
        bench.renewer.extend(held_lease, 60)
    assert caught.value.executed is False
    bench.leases.answer, bench.leases.reasserts = (lambda _: RenewalResult.MISSING), True
    bench.renew(held_lease)
    assert held_lease.hard_deadline == pytest.approx(1002 + HARD)


def test_a_lease_that_another_has_is_lost_after_the_deadline(bench: Bench) -> None:
    held_lease = bench.held_lease()
    bench.clock.time = 1000 + STOP
    bench.leases.answer = lambda _: RenewalResult.OTHER
    bench.renew(held_lease)
    assert held_lease.lost == HELD_BY_OTHER


def test_a_missing_lease_is_not_asserted_again_after_the_deadline(bench: Bench) -> None:
    held_lease = bench.held_lease()
    bench.clock.time = 1000 + STOP
    bench.leases.answer = lambda _: RenewalResult.MISSING
    bench.renew(held_lease)
    assert not bench.leases.reasserted
    assert not held_lease.held
    assert held_lease.due == pytest.approx(bench.clock.time + TTL / 12)


def test_a_lease_asserted_again_without_a_record_to_compare_does_not_count(bench: Bench) -> None:
    held_lease = bench.held_lease()
    answers = iter([RenewalResult.MISSING, RenewalResult.OURS, RenewalResult.OURS])
    bench.leases.answer = lambda _: next(answers)
    reads = iter([True, True, False])

    def read(_: str) -> Any:
        if next(reads):
            raise StoreUnavailable("away", None)
        return Row(State.RUNNING, 8, "other")

    bench.records.read = read  # type: ignore[method-assign]
    bench.clock.time = 1001.0
    bench.renew(held_lease)
    bench.renew(held_lease)
    assert held_lease.hard_deadline == pytest.approx(1000 + HARD)
    bench.renew(held_lease)
    assert held_lease.lost == SUPERSEDED
    assert bench.leases.released == ["token"]


@pytest.mark.parametrize("reads", [[], [True], [False, True]])
def test_a_lease_that_was_not_forgotten_since_is_renewed_without_its_record(bench, reads) -> None:
    held_lease, row, left = bench.held_lease(), bench.records.row, list(reads)

    def read(_: str) -> Any:
        if not left.pop(0):
            raise StoreUnavailable("away", None)
        return row

    bench.records.read = read
    for answer in [*[RenewalResult.MISSING] * bool(reads), *[RenewalResult.OURS] * 2]:
        bench.leases.answer = lambda _: answer  # noqa: B023 - called at once
        bench.clock.time += 1.0
        bench.renew(held_lease)
    assert (held_lease.hard_deadline, left) == (pytest.approx(bench.clock.time + HARD), [])


# -- the threads, one after the other --------------------------------------------------------------


class Waits:
    """Instead of the wakeup of a thread: each wait lets its time pass, and does the next of
    *steps*; after the last one no lease is held and the renewer is closed, so the thread ends.
    """

    def __init__(self, bench: Bench, *steps: Callable[[], object]) -> None:
        self.bench, self.steps = bench, list(steps)
        self.timeouts: list[float | None] = []
        self.notified = 0

    def notify(self) -> None:
        self.notified += 1

    def wait(self, timeout: float | None) -> None:
        self.timeouts.append(timeout)
        self.bench.clock.time += timeout if timeout not in (None, math.inf) else 0.0
        if self.steps:
            self.steps.pop(0)()
        else:
            self.bench.renewer._held_leases.clear()
            self.bench.renewer._closed = True


def nothing() -> None:
    """Let time pass."""


def watch(bench: Bench, *steps: Callable[[], object]) -> list[float | None]:
    """What the deadline thread waits for."""
    bench.renewer._deadline_wakeup = waits = Waits(bench, *steps)  # type: ignore[assignment]
    bench.renewer._watch_deadlines()
    return waits.timeouts


def renew_all(bench: Bench, *steps: Callable[[], object]) -> list[float | None]:
    """What the renewal thread waits for."""
    bench.renewer._renewal_wakeup = waits = Waits(bench, *steps)  # type: ignore[assignment]
    bench.renewer._renew_leases()
    return waits.timeouts


def test_the_deadline_thread_interrupts_a_lost_body_again_at_growing_intervals(bench) -> None:
    held_lease, told = bench.held_lease(), []
    held_lease.interrupt = lambda: told.append(bench.clock.time - 1000 - STOP)
    waits = watch(bench, *[nothing] * 7)
    assert waits == pytest.approx([STOP, 0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0])
    assert told == pytest.approx([0.0, 0.5, 1.5, 3.5, 7.5, 15.5, 25.5])
    assert (held_lease.lost, len(bench.seen.of(events.LeaseLost))) == (DEADLINE, 1)


def test_the_deadline_thread_interrupts_a_lost_body_that_nobody_has_interrupted_yet(bench) -> None:
    held_lease, told = bench.held_lease(), []
    held_lease.lost, held_lease.interrupt = RELEASED, lambda: told.append(bench.clock.time)
    watch(bench)
    assert told == [1000.0]


def test_the_deadline_thread_sleeps_until_the_first_deadline_or_another_lease(bench) -> None:
    assert watch(bench) == [None]
    bench = Bench()
    bench.held_lease("long", ttl=60.0)
    bench.held_lease("short")
    assert watch(bench, bench.renewer._held_leases.clear) == [pytest.approx(STOP), None]
    assert bench.renewer._unstarted[2:] == [bench.renewer._watch_deadlines]


def test_an_added_lease_wakes_a_thread_only_if_it_is_the_first_to_be_due(bench, monkeypatch):
    started: list[Any] = []
    monkeypatch.setattr(os_threads, "start_thread", started.append)
    renewer = bench.renewer
    threads = [renewer._renew_leases, renewer._watch_deadlines]
    renewer._renewal_wakeup = due = Waits(bench)
    renewer._deadline_wakeup = stop = Waits(bench)
    held_lease = bench.held_lease()
    for moment, woken in ((0.0, 0), (0.001, 1)):
        renewer._renewal_wakes_at = held_lease.due + moment
        renewer._deadline_wakes_at = held_lease.own_stop + moment
        renewer.add(held_lease)
        assert (due.notified, stop.notified) == (woken, woken)
    assert started == threads
    renewer.lose(held_lease, DEADLINE)
    assert stop.notified == 2, "to interrupt the body again"
    renewer.close()
    assert (due.notified, stop.notified) == (2, 3)


def test_the_renewal_thread_renews_what_is_due_and_then_waits_for_the_next(bench) -> None:
    bench.renewer._purge_at = math.inf
    bench.held_lease("long", ttl=60.0)
    held_lease = bench.held_lease()

    def check() -> None:
        assert not held_lease.in_flight
        assert bench.renewer._renewal_wakes_at == held_lease.due

    assert renew_all(bench, check, check) == pytest.approx([TTL / 3] * 3)
    assert len(bench.leases.renewed) == 2
    assert bench.renewer._unstarted[2:] == [bench.renewer._renew_leases]


def test_expired_records_are_deleted_at_once_and_then_every_minute(bench, monkeypatch) -> None:
    begun: list[tuple[float, Callable[[], None]]] = []
    monkeypatch.setattr(
        os_threads, "start_thread", lambda purge: begun.append((bench.clock.time, purge))
    )
    bench.held_lease(ttl=86_400.0)

    def end() -> None:
        begun[-1][1]()

    def end_all() -> None:
        end()
        bench.renewer.close()

    assert renew_all(bench, end, nothing, end, end_all, nothing) == [60.0] * 4 + [
        pytest.approx(86_400.0 / 3 - 240.0),
        pytest.approx(86_400.0 / 3),
    ]
    assert [at for at, _ in begun] == [1000.0, 1060.0, 1180.0], (
        "one at a time, and none after close()"
    )


def test_a_deletion_goes_on_in_small_batches_until_nothing_is_left(bench, monkeypatch) -> None:
    answers: list[Any] = [True, True, False, ValueError("away")]
    asked: list[Any] = []
    monkeypatch.setattr(os_threads, "Wakeup", lambda: SimpleNamespace(wait=asked.append))

    def purge_in_turn(*given: Any) -> bool:
        asked.append(given)
        if isinstance(answer := answers.pop(0), Exception):
            raise answer
        return bool(answer)

    bench.records.purge_in_turn = purge_in_turn
    for calls in ([(500, 60.0), 0.05, (500, 60.0), 0.05, (500, 60.0)], [(500, 60.0)]):
        bench.renewer._purging = True
        bench.renewer._purge()
        assert (asked, bench.renewer._purging) == (calls, False)
        asked.clear()
    bench.renewer._closed = True
    bench.renewer._purge()
    assert asked == []


def test_a_deletion_for_which_no_thread_can_be_started_is_tried_again(bench, monkeypatch) -> None:
    tries: list[float] = []

    def refuse(_: Callable[[], None]) -> None:
        tries.append(bench.clock.time)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(os_threads, "start_thread", refuse)
    renew_all(bench, nothing, nothing)
    assert tries == [1000.0, 1060.0, 1120.0]
    assert not bench.renewer._purging


# -- the threads -----------------------------------------------------------------------------------


@pytest.fixture
def running() -> Iterator[Bench]:
    """A renewer with its threads and the real clock; a store that hangs is resumed at the end."""
    yield (bench := Bench(clock=RealClock()))
    bench.leases.answer = lambda _: RenewalResult.OURS
    for token in list(bench.renewer._held_leases):
        bench.renewer._held_leases.pop(token)


def start(bench: Bench, ttl: float, **options: Any) -> HeldLease:
    """A held lease that the threads take care of."""
    held_lease = bench.held_lease(ttl=ttl, **options)
    bench.renewer.add(held_lease)
    return held_lease


def test_the_renewal_thread_renews_every_third_of_the_ttl(running: Bench) -> None:
    began = time.monotonic()
    held_lease = start(running, 0.3)
    until(lambda: len(running.leases.renewed) >= 4, "four renewals")
    assert time.monotonic() - began >= 0.39
    assert held_lease.held


def test_a_store_that_hangs_does_not_delay_the_interruption_of_the_body(running: Bench) -> None:
    let_go, nudges = threading.Event(), []

    def hang(_: Renewal) -> RenewalResult:
        let_go.wait(SOON)
        return RenewalResult.OURS

    running.leases.answer = hang
    held_lease = running.held_lease(ttl=0.6)
    held_lease.interrupt = lambda: nudges.append(time.monotonic())
    running.renewer.add(held_lease)
    stop = held_lease.stop_deadline
    until(lambda: nudges, "the interruption")
    assert stop <= nudges[0] < stop + 0.2
    assert held_lease.lost == DEADLINE
    until(lambda: len(nudges) >= 2, "the second interruption")
    let_go.set()
    until(lambda: not held_lease.in_flight, "the late reply")
    assert held_lease.lost == DEADLINE
    assert not held_lease.held


def test_a_store_that_raises_leads_to_loss_at_the_stop_deadline(running: Bench) -> None:
    def fail(_: Renewal) -> RenewalResult:
        raise StoreUnavailable("away", None)

    running.leases.answer = fail
    held_lease = start(running, 0.6)
    until(lambda: held_lease.lost, "the loss")
    assert time.monotonic() >= held_lease.stop_deadline
    assert len(running.seen.of(RenewalFailed)) >= 3
    assert [event.reason for event in running.seen.of(events.LeaseLost)] == [DEADLINE]
    sent = len(running.leases.renewed)
    running.renewer.drop(held_lease)
    other = start(running, 0.3)
    running.leases.answer = lambda _: RenewalResult.OURS
    until(lambda: len(running.leases.renewed) > sent, "another lease's renewal")
    assert all(renewal.ttl == 0.3 for renewal in running.leases.renewed[sent:])
    assert other.held


def test_drop_waits_for_the_renewal_in_flight(running: Bench) -> None:
    """Else it could set a lease again that has been released meanwhile."""
    let_go, entered = threading.Event(), threading.Event()

    def hang(_: Renewal) -> RenewalResult:
        entered.set()
        let_go.wait(SOON)
        return RenewalResult.OURS

    running.leases.answer = hang
    held_lease = start(running, 3.0)
    held_lease.due = 0.0
    running.renewer._renewal_wakeup.notify()
    assert entered.wait(SOON)
    dropped = threading.Event()
    thread = threading.Thread(target=lambda: (running.renewer.drop(held_lease), dropped.set()))
    thread.start()
    assert not dropped.wait(0.1)
    let_go.set()
    assert dropped.wait(SOON)
    thread.join()


def test_the_threads_enforce_max_hold(running: Bench) -> None:
    held_lease = start(running, 0.3, max_hold=0.5)
    until(lambda: held_lease.lost, "the loss")
    assert held_lease.lost == HELD_TOO_LONG
    assert len(running.leases.renewed) >= 3


def test_close_waits_for_the_deletion_in_progress_and_begins_no_other(running: Bench) -> None:
    """Otherwise it would open a connection that is never closed."""
    let_go, entered = threading.Event(), threading.Event()
    batches = []

    def purge(*_: Any) -> bool:
        batches.append(1)
        entered.set()
        let_go.wait(SOON)
        return True  # there is more to delete

    running.records.purge_in_turn = purge  # type: ignore[method-assign]
    held_lease = start(running, 3.0)
    assert entered.wait(SOON)
    closed = threading.Event()
    thread = threading.Thread(target=lambda: (running.renewer.close(), closed.set()))
    thread.start()
    assert not closed.wait(0.1)
    let_go.set()
    assert closed.wait(SOON)
    thread.join()
    assert batches == [1]
    running.renewer.drop(held_lease)


def test_the_threads_end_once_it_is_closed_and_begin_again_with_another_lease(running) -> None:
    held_lease = start(running, 3.0)
    running.renewer.close()
    assert not running.renewer._unstarted  # the lease that is held is renewed as before
    running.renewer.drop(held_lease)
    running.renewer.close()
    until(lambda: len(running.renewer._unstarted) == 2, "the end of both threads")
    start(running, 0.3)
    until(lambda: len(running.leases.renewed) >= 2, "a renewal")
