"""A lease whose row a transaction of the body's own has locked: how long that counts, and what
comes after it.
"""

import os
import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from celery_leases import events
from celery_leases.attempt.held_lease import (
    DEADLINE,
    HELD_TOO_LONG,
    NOT_EXTENDED,
    BodyState,
    HeldLease,
)
from celery_leases.attempt.renewal import HELD_BY_OTHER, RELEASED
from celery_leases.deadlines import lock_counts_for, renewal_retry
from celery_leases.decide.answers import Renewal, RenewalResult
from celery_leases.errors import LeaseLost, StoreUnavailable
from celery_leases.events import LeaseRenewed
from celery_leases.lease import Lease
from celery_leases.record import State
from tests.unit.decision_inputs import NOW, a_call, a_record
from tests.unit.test_renewal import HARD, STOP, THEIRS, TTL, Bench, Row, running, until

__all__ = ["running"]

START = 1000.0
BELIEVED = TTL / 3
AGAIN = TTL / 12


class Transaction:
    """A transaction that is open until the test ends it."""

    open = True

    def is_open(self) -> bool:
        return self.open

    def is_over(self) -> bool:
        return not self.open

    def is_of(self, given: Any) -> bool:
        return given in (None, self)

    def roll_back(self) -> bool:
        was_open, self.open = self.open, False
        return was_open

    def join(self, key: str) -> None:
        """Nothing to begin."""

    def guard(self, record: Any) -> None:
        """The row is locked."""


@pytest.fixture
def bench() -> Bench:
    """The renewer's own code, step by step, under a clock that stands still."""
    return Bench()


def guard(bench: Bench, held_lease: HeldLease, lease_until: int | None = NOW) -> Transaction:
    """The body locks the row just now; with *lease_until* the row is the lease."""
    transaction: Any = Transaction()
    process: Any = SimpleNamespace(renewer=bench.renewer, transaction=lambda _: transaction)
    record = a_record(State.RUNNING, lease_until=lease_until)
    Lease(process, a_call(), held_lease, record, nullcontext, os.getpid()).guard(None)
    locked: Transaction = transaction
    return locked


def guarded(bench: Bench, **options: Any) -> tuple[HeldLease, Transaction]:
    """A database lease whose row the body has locked at once."""
    held_lease = bench.held_lease(**options)
    bench.clock.time += 0.0001
    return held_lease, guard(bench, held_lease)


def see(bench: Bench, held_lease: HeldLease, kept: RenewalResult, at: float) -> None:
    """The renewal thread looks *at* so many seconds after the start, and gets this answer."""
    bench.clock.time = START + at
    bench.leases.answer = lambda _: kept
    bench.renew(held_lease)


# -- what the body uses ----------------------------------------------------------------------------


def test_a_body_knows_which_of_its_transactions_has_locked_its_row() -> None:
    state = BodyState()
    locking: Any = Transaction()
    other: Any = Transaction()
    assert not state.holds_row_lock()
    assert not state.locked_by_another(other)
    with state.locking(locking):
        locking.open = False
        assert state.guarded, "before the statement has begun the transaction"
        locking.open = True
    assert state.holds_row_lock()
    assert (state.locked_by_another(other), state.locked_by_another(locking)) == (True, False)
    locking.open = False
    assert not state.locked_by_another(other)
    assert not state.holds_row_lock()
    locking.open = True
    assert not state.guarded, "a transaction that is over is forgotten"


def test_what_a_body_leaves_open_is_rolled_back_once() -> None:
    state = BodyState()
    first: Any = Transaction()
    last: Any = Transaction()
    state.join(first)
    state.join(last)
    assert state.joined == [first, last]
    first.open = False
    with state.locking(last):
        state.join(last)
    assert state.joined == [last, last]
    assert state.roll_back_open()
    last.open = True
    assert not state.guarded
    assert not state.roll_back_open()
    assert last.open
    last.open = False
    state.joined = [last]
    assert not state.roll_back_open()


# -- while the row is locked -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ttl", "believed"), [(1.0, 1.0), (3.0, 1.0), (6.0, 2.0), (15.0, 5.0), (900.0, 300.0)]
)
def test_a_lock_is_looked_at_more_than_twice_before_it_does_not_count_any_more(ttl, believed):
    assert lock_counts_for(ttl) == pytest.approx(believed)
    assert lock_counts_for(ttl) > 2 * renewal_retry(0.0, ttl)


def test_a_lock_that_is_found_extends_the_lease_beyond_its_ttl(bench: Bench) -> None:
    held_lease, _ = guarded(bench)
    for at in range(1, 20):
        see(bench, held_lease, RenewalResult.LOCKED, at)
        assert held_lease.held
    assert held_lease.due == pytest.approx(START + 19 + AGAIN)
    assert held_lease.stop_deadline == pytest.approx(START + 19 + BELIEVED)
    bench.clock.time = START + 19 + BELIEVED - 0.001
    assert held_lease.overdue(bench.clock.time) is None
    bench.clock.time += 0.001
    assert not held_lease.held
    assert held_lease.overdue(bench.clock.time) == DEADLINE
    assert not bench.seen.of(LeaseRenewed)


def test_guarding_is_itself_a_sight_of_the_lock(bench: Bench) -> None:
    held_lease, _ = guarded(bench)
    assert held_lease.stop_deadline == pytest.approx(START + STOP)
    bench.clock.time = START + STOP - 0.1
    guard(bench, held_lease)
    assert held_lease.stop_deadline == pytest.approx(START + STOP - 0.1 + BELIEVED)


def test_a_lease_in_redis_gains_nothing_from_a_guard(bench: Bench) -> None:
    held_lease = bench.held_lease()
    bench.clock.time = START + STOP - 0.001
    guard(bench, held_lease, lease_until=None)
    held_lease.check()
    bench.clock.time = START + STOP
    assert not held_lease.held
    with pytest.raises(LeaseLost, match=DEADLINE):
        held_lease.check()
    assert not bench.leases.renewed


def test_a_guard_that_raised_does_not_count(bench: Bench) -> None:
    held_lease, first = guarded(bench)
    other: Any = Transaction()
    with pytest.raises(ValueError, match="refused"), held_lease.body_state.locking(other):
        raise ValueError("refused")
    first.open = False
    assert not held_lease.body_state.guarded


def test_the_renewer_knows_which_rows_the_body_may_have_locked(bench: Bench) -> None:
    """It must not wait for the body, and all other leases with it."""
    held_lease, transaction = guarded(bench)
    see(bench, held_lease, RenewalResult.LOCKED, 1)
    transaction.open = False
    see(bench, held_lease, RenewalResult.OURS, 2)
    assert [renewal.guarded for renewal in bench.leases.renewed] == [True, False]


def test_no_lock_counts_beyond_the_time_limit(bench: Bench) -> None:
    held_lease, _ = guarded(bench, max_hold=10.0)
    see(bench, held_lease, RenewalResult.LOCKED, 9.5)
    assert held_lease.stop_deadline == pytest.approx(START + 10)
    bench.clock.time = START + 10
    assert not held_lease.held
    assert not held_lease.needs_renewer(bench.clock.time)
    assert held_lease.overdue(bench.clock.time) == HELD_TOO_LONG


def test_a_body_that_is_to_be_killed_lives_as_long_as_the_lock_is_seen(bench: Bench) -> None:
    held_lease, _ = guarded(bench)
    told: list[float] = []
    held_lease.move_kill_timer = told.append
    assert held_lease.kill_deadline == pytest.approx(START + HARD)
    see(bench, held_lease, RenewalResult.LOCKED, 1)
    see(bench, held_lease, RenewalResult.LOCKED, 19)
    assert told == pytest.approx([START + HARD, START + 19 + BELIEVED + HARD - STOP])


# -- the lock is gone ------------------------------------------------------------------------------


def test_a_lock_that_is_gone_leaves_a_lease_that_is_simply_renewed(bench: Bench) -> None:
    held_lease, _ = guarded(bench)
    see(bench, held_lease, RenewalResult.LOCKED, 2 * TTL)
    see(bench, held_lease, RenewalResult.OURS, 2 * TTL + 0.5)
    assert held_lease.stop_deadline == pytest.approx(START + 2 * TTL + 0.5 + STOP)
    assert held_lease.due == pytest.approx(START + 2 * TTL + 0.5 + TTL / 3)


@pytest.mark.parametrize(
    ("kept", "row", "reason"),
    [(RenewalResult.OTHER, THEIRS, HELD_BY_OTHER), (RenewalResult.MISSING, None, RELEASED)],
)
def test_a_lock_that_is_gone_and_used_by_another_means_lost(bench, kept, row, reason) -> None:
    held_lease, _ = guarded(bench)
    bench.leases.reasserts = False
    see(bench, held_lease, RenewalResult.LOCKED, 2 * TTL)
    bench.records.row = row
    see(bench, held_lease, kept, 2 * TTL + 0.5)
    assert (held_lease.lost, held_lease.held) == (reason, False)
    assert [event.reason for event in bench.seen.of(events.LeaseLost)] == [reason]


def test_a_completion_that_has_committed_needs_no_renewal(bench: Bench) -> None:
    held_lease, transaction = guarded(bench)
    held_lease.body_state.completing = True
    see(bench, held_lease, RenewalResult.LOCKED, 2 * TTL)
    transaction.open = False
    bench.records.row = Row(State.DONE, 7, "token")
    see(bench, held_lease, RenewalResult.MISSING, 2 * TTL + 0.5)
    bench.clock.time += 100 * TTL
    assert held_lease.held
    assert not held_lease.needs_renewer(bench.clock.now())


# -- lease_renew=False -----------------------------------------------------------------------------


def test_without_renewal_the_lock_is_looked_at_and_nothing_pushed_out(bench: Bench) -> None:
    held_lease, _ = guarded(bench, renew=False)
    assert held_lease.needs_renewer(START)
    assert held_lease.due == pytest.approx(START + AGAIN)
    see(bench, held_lease, RenewalResult.LOCKED, 1)
    assert held_lease.stop_deadline == pytest.approx(START + STOP)
    see(bench, held_lease, RenewalResult.OURS, 4.5)
    assert [renewal.ttl for renewal in bench.leases.renewed] == [0.0, 0.0]
    assert held_lease.stop_deadline == pytest.approx(START + STOP)
    assert not held_lease.needs_renewer(bench.clock.time)
    assert held_lease.overdue(START + STOP) == NOT_EXTENDED


def test_without_renewal_a_transaction_that_has_outlasted_the_lease_leaves_a_whole_one(bench):
    """The body could not extend it: ``extend()`` raises while the transaction is open."""
    held_lease, _ = guarded(bench, renew=False)
    see(bench, held_lease, RenewalResult.LOCKED, 5)
    see(bench, held_lease, RenewalResult.OURS, 6)
    assert [renewal.ttl for renewal in bench.leases.renewed] == [TTL, TTL]
    assert held_lease.stop_deadline == pytest.approx(START + 6 + STOP)
    assert not held_lease.needs_renewer(bench.clock.time)


# -- check() ---------------------------------------------------------------------------------------


def outlasted(bench: Bench, **options: Any) -> tuple[HeldLease, Transaction]:
    """A lease that only the lock on its row extends, two ttls later."""
    held_lease, transaction = guarded(bench, **options)
    see(bench, held_lease, RenewalResult.LOCKED, 2 * TTL)
    bench.leases.renewed.clear()
    return held_lease, transaction


def test_before_the_lease_is_over_a_check_is_arithmetic(bench: Bench) -> None:
    held_lease, _ = guarded(bench)
    see(bench, held_lease, RenewalResult.LOCKED, 2)
    bench.leases.renewed.clear()
    bench.clock.time = START + STOP - 0.001
    held_lease.check()
    assert not bench.leases.renewed


def test_a_check_of_a_lock_asks_the_store(bench: Bench) -> None:
    held_lease, _ = outlasted(bench)
    bench.clock.time += BELIEVED - 0.1
    held_lease.check()
    held_lease.check()
    assert [(renewal.ttl, renewal.guarded) for renewal in bench.leases.renewed] == [(TTL, True)] * 2
    assert held_lease.remaining() == pytest.approx(BELIEVED)


@pytest.mark.parametrize("renew", [True, False])
def test_a_check_after_the_transaction_renews_the_lease(bench: Bench, renew: bool) -> None:
    held_lease, transaction = outlasted(bench, renew=renew)
    transaction.open = False
    bench.leases.answer = lambda _: RenewalResult.OURS
    held_lease.check()
    held_lease.check()
    assert [(renewal.ttl, renewal.guarded) for renewal in bench.leases.renewed] == [(TTL, False)]
    assert held_lease.stop_deadline == pytest.approx(bench.clock.now() + STOP)


@pytest.mark.parametrize("is_open", [True, False], ids=["open", "ended"])
@pytest.mark.parametrize(
    ("kept", "row", "reason"),
    [(RenewalResult.OTHER, THEIRS, HELD_BY_OTHER), (RenewalResult.MISSING, None, RELEASED)],
)
def test_a_check_that_finds_another_owner_raises(bench, kept, row, reason, is_open) -> None:
    held_lease, transaction = outlasted(bench)
    transaction.open = is_open
    bench.leases.reasserts, bench.records.row = False, row
    bench.leases.answer = lambda _: kept
    with pytest.raises(LeaseLost, match=reason):
        held_lease.check()
    assert held_lease.lost == reason
    assert [event.reason for event in bench.seen.of(events.LeaseLost)] == [reason]


def away(_: Renewal) -> RenewalResult:
    raise StoreUnavailable("away", None)


def test_a_check_without_an_answer_does_not_pass(bench: Bench) -> None:
    held_lease, _ = outlasted(bench)
    bench.leases.answer = away
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="away"):
            held_lease.check()
    assert (held_lease.lost, held_lease.held) == (None, True)
    bench.leases.answer = lambda _: RenewalResult.LOCKED
    held_lease.check()


def test_without_an_answer_the_lease_is_over_once_the_last_look_does_not_count(bench) -> None:
    held_lease, _ = outlasted(bench)

    def late(renewal: Renewal) -> RenewalResult:
        bench.clock.time += BELIEVED
        return away(renewal)

    bench.leases.answer = late
    for asked in (1, 1):
        with pytest.raises(LeaseLost, match=DEADLINE):
            held_lease.check()
        assert len(bench.leases.renewed) == asked


LONG = 60.0


@pytest.mark.parametrize(("ttl", "over"), [(1.0, 1.0), (15.0, 5.0), (900.0, 5.0)])
def test_a_lock_whose_transaction_is_over_counts_for_a_few_seconds_at_most(ttl, over) -> None:
    assert lock_counts_for(ttl, still=False) == pytest.approx(over)
    assert lock_counts_for(ttl, still=False) > 2 * renewal_retry(0.0, ttl)


def test_a_lock_does_not_count_for_long_after_its_transaction(bench: Bench) -> None:
    held_lease, transaction = guarded(bench, ttl=LONG)
    see(bench, held_lease, RenewalResult.LOCKED, 2 * LONG)
    assert held_lease.stop_deadline == pytest.approx(START + 2 * LONG + LONG / 3)
    transaction.open = False
    bench.clock.time = START + 2 * LONG + 5.0 - 0.001
    assert held_lease.held
    bench.clock.time += 0.002
    assert not held_lease.held
    assert held_lease.overdue(bench.clock.time) == DEADLINE


def test_a_late_answer_after_the_transaction_is_as_good_as_an_early_one(bench: Bench) -> None:
    held_lease, transaction = guarded(bench, ttl=LONG)
    see(bench, held_lease, RenewalResult.LOCKED, 2 * LONG)
    transaction.open = False
    see(bench, held_lease, RenewalResult.OURS, 2 * LONG + 4)
    assert not held_lease.needs_row_lock(bench.clock.time + LONG / 2)


def test_a_lease_that_is_lost_is_not_asked_about(bench: Bench) -> None:
    """The answer would not matter."""
    held_lease, _ = outlasted(bench)
    bench.renewer.lose(held_lease, DEADLINE)
    with pytest.raises(LeaseLost):
        held_lease.check()
    assert not bench.leases.renewed


# -- the threads -----------------------------------------------------------------------------------


def begun(running: Bench, ttl: float) -> tuple[HeldLease, Transaction]:
    """A lease that the threads look after, whose row is locked."""
    held_lease = running.held_lease(ttl=ttl)
    transaction = guard(running, held_lease)
    running.renewer.add(held_lease)
    return held_lease, transaction


def test_the_lease_is_held_all_along_and_renewed_once_the_transaction_is_over(running) -> None:
    held: list[bool] = []
    running.leases.answer = lambda renewal: (
        RenewalResult.LOCKED if renewal.guarded else RenewalResult.OURS
    )
    held_lease, transaction = begun(running, ttl=0.6)
    over = running.clock.now() + 3 * 0.6
    while running.clock.now() < over:
        held.append(held_lease.held)
        time.sleep(0.001)
    transaction.open = False
    until(lambda: running.seen.of(LeaseRenewed), "the renewal")
    assert all(held)
    assert (held_lease.lost, held_lease.held) == (None, True)


def test_the_lease_is_lost_once_the_lock_is_not_seen_any_more(running: Bench) -> None:
    gone: list[float] = []
    seen: list[float] = []
    away: list[bool] = []

    def answer(_: Renewal) -> RenewalResult:
        if away:
            raise StoreUnavailable("away", None)
        seen.append(running.clock.now())
        return RenewalResult.LOCKED

    running.leases.answer = answer
    held_lease, _ = begun(running, ttl=1.2)
    held_lease.interrupt = lambda: gone.append(running.clock.now())
    ordinary = held_lease.hard_deadline
    until(lambda: running.clock.now() > ordinary, "the lease to be outlasted")
    away.append(True)
    until(lambda: gone, "the loss")
    assert held_lease.lost == DEADLINE
    assert gone[0] - seen[-1] >= 1.0 - 0.05


@pytest.mark.parametrize("is_open", [True, False], ids=["open", "ended"])
def test_a_look_that_failed_wakes_the_deadline_thread_once_the_transaction_is_over(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, is_open: bool
) -> None:
    rung: list[bool] = []
    held_lease, transaction = guarded(bench, ttl=LONG)
    see(bench, held_lease, RenewalResult.LOCKED, 2 * LONG)
    bench.renewer._deadline_wakes_at = held_lease.stop_deadline
    monkeypatch.setattr(bench.renewer._deadline_wakeup, "notify", lambda: rung.append(True))
    transaction.open = is_open
    bench.leases.answer = away
    bench.renew(held_lease)
    assert bool(rung) is not is_open
