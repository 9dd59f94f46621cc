"""A lease whose row a transaction of the body's own has locked: how long that is believed, and what comes after it."""

import time
from typing import Any

import pytest

from celery_leases.core.errors import LeaseLost, StoreUnavailable
from celery_leases.core.events import LeaseGone, LeaseRenewed
from celery_leases.core.ports import Kept, Renewal
from celery_leases.core.records import State
from celery_leases.core.validity import answer_awaited, lock_believed, lock_looked_at
from celery_leases.renewal import RELEASED, TAKEN
from celery_leases.tenure import DEADLINE, HELD_TOO_LONG, Tenure
from tests.unit.test_renewal import STOP, TTL, Bench, Row, running, until

__all__ = ["running"]

START = 1000.0
BELIEVED = TTL / 3
AWAITED = 2.0


class Transaction:
    """Open until a test says otherwise."""

    open = True

    def is_open(self) -> bool:
        """Whether it is."""
        return self.open

    def is_over(self) -> bool:
        """Whether it is not."""
        return not self.open


@pytest.fixture
def bench() -> Bench:
    """The renewer's own code, step by step, under a clock that stands still."""
    return Bench()


def guard(bench: Bench, tenure: Tenure) -> Transaction:
    """The body locks the row just now."""
    transaction: Any = Transaction()
    with tenure.work.locking(transaction):
        bench.renewer.make_way(tenure)
    bench.renewer.locked(tenure, bench.clock.now())
    locked: Transaction = transaction
    return locked


def guarded(bench: Bench, **options: Any) -> tuple[Tenure, Transaction]:
    """A database lease whose row the body has locked at once."""
    tenure = bench.tenure(**options)
    tenure.row_is_lease = True
    tenure.confirm = lambda: bench.renewer.confirm(tenure)
    bench.clock.time += 0.0001
    return tenure, guard(bench, tenure)


def see(bench: Bench, tenure: Tenure, kept: Kept, at: float) -> None:
    """The keeper looks *at* so many seconds after the start, and gets this answer."""
    bench.clock.time = START + at
    bench.leases.answer = lambda _: kept
    bench.renew(tenure)


@pytest.mark.parametrize(
    ("ttl", "believed", "looked", "awaited"),
    [
        (1.0, 1.0, 0.2, 1 / 3),
        (3.0, 1.0, 0.3, 1.0),
        (6.0, 2.0, 0.6, 2.0),
        (15.0, 5.0, 1.0, 2.0),
        (900.0, 300.0, 1.0, 2.0),
    ],
)
def test_how_long_a_lock_is_believed_and_how_often_looked_at(
    ttl: float, believed: float, looked: float, awaited: float
) -> None:
    """It is looked at more than twice before it is not believed any more."""
    assert (lock_believed(ttl), lock_looked_at(ttl), answer_awaited(ttl)) == pytest.approx((believed, looked, awaited))
    assert lock_believed(ttl) > 2 * lock_looked_at(ttl)


def test_a_lock_that_is_seen_keeps_the_lease_beyond_its_ttl(bench: Bench) -> None:
    """For a third of the ttl after the look was sent; then only the ordinary deadline counts, which has passed."""
    tenure, _ = guarded(bench)
    for at in range(1, 20):
        see(bench, tenure, Kept.LOCKED, at)
        assert tenure.held
    assert tenure.due == pytest.approx(START + 19 + TTL / 10)
    assert tenure.stop == pytest.approx(START + 19 + BELIEVED)
    bench.clock.time = START + 19 + BELIEVED - 0.001
    assert tenure.held
    bench.clock.time += 0.001
    assert not tenure.held
    assert not bench.seen.of(LeaseRenewed)


def test_guarding_is_itself_a_sight_of_the_lock(bench: Bench) -> None:
    """Late in the ttl it pushes the deadline out; early it leaves the ordinary one, which is later."""
    tenure, _ = guarded(bench)
    assert tenure.stop == pytest.approx(START + STOP)
    bench.clock.time = START + STOP - 0.1
    guard(bench, tenure)
    assert tenure.stop == pytest.approx(START + STOP - 0.1 + BELIEVED)


def test_a_guard_that_raised_is_none(bench: Bench) -> None:
    """The transaction before counts on."""
    tenure, first = guarded(bench)
    other: Any = Transaction()
    with pytest.raises(ValueError, match="refused"), tenure.work.locking(other):
        raise ValueError("refused")
    first.open = False
    assert not tenure.work.guarded


def test_a_lease_in_redis_gains_nothing_from_a_guard(bench: Bench) -> None:
    """It is renewed as ever, and its deadline is the ordinary one."""
    tenure, _ = guarded(bench)
    tenure.row_is_lease = False
    bench.clock.time = START + STOP
    assert not tenure.held
    assert not tenure.in_doubt(bench.clock.time)
    bench.renew(tenure)
    assert bench.leases.renewed[-1].waits


def test_the_keeper_waits_for_the_row_only_where_the_body_has_not_locked_it(bench: Bench) -> None:
    """Else it would wait for the body, and all other leases with it."""
    tenure, transaction = guarded(bench)
    see(bench, tenure, Kept.LOCKED, 1)
    transaction.open = False
    see(bench, tenure, Kept.OURS, 2)
    assert [renewal.waits for renewal in bench.leases.renewed] == [False, True]


def test_a_lock_that_is_gone_leaves_a_lease_that_is_simply_renewed(bench: Bench) -> None:
    """The transaction object says that it is open; nobody has come in between."""
    tenure, _ = guarded(bench)
    see(bench, tenure, Kept.LOCKED, 5)
    see(bench, tenure, Kept.OURS, 6)
    assert tenure.stop == pytest.approx(START + 6 + STOP)
    assert tenure.due == pytest.approx(START + 6 + TTL / 3)


@pytest.mark.parametrize(("kept", "reason"), [(Kept.OTHER, TAKEN), (Kept.MISSING, RELEASED)])
def test_a_lock_that_is_gone_and_used_by_another_means_lost(bench: Bench, kept: Kept, reason: str) -> None:
    """At the next look, while the transaction object still says that it is open."""
    tenure, _ = guarded(bench)
    see(bench, tenure, kept, 1)
    assert (tenure.lost, tenure.held) == (reason, False)


def test_no_lock_is_believed_beyond_lease_max_hold(bench: Bench) -> None:
    """However often it is seen."""
    tenure, _ = guarded(bench, max_hold=10.0)
    see(bench, tenure, Kept.LOCKED, 9.5)
    assert tenure.stop == pytest.approx(START + 10)
    bench.clock.time = START + 10
    assert not tenure.held
    assert not tenure.looked_after(bench.clock.time)
    assert tenure.overdue(bench.clock.time) == HELD_TOO_LONG


def test_without_renewal_the_lock_is_looked_at_and_nothing_pushed_out(bench: Bench) -> None:
    """``lease_renew=False``: 0 seconds are asked for."""
    tenure, _ = guarded(bench, renew=False)
    assert tenure.looked_after(START)
    assert tenure.due == pytest.approx(START + TTL / 10)
    see(bench, tenure, Kept.LOCKED, 1)
    assert tenure.stop == pytest.approx(START + STOP)
    see(bench, tenure, Kept.LOCKED, 4.5)
    assert tenure.stop == pytest.approx(START + 4.5 + BELIEVED)
    see(bench, tenure, Kept.OURS, 5)
    assert [renewal.ttl for renewal in bench.leases.renewed] == [0.0, 0.0, 0.0]
    assert tenure.stop == pytest.approx(START + STOP)
    assert not tenure.looked_after(bench.clock.time)


# -- in doubt ----------------------------------------------------------------------------------------------


def outlasted(bench: Bench, **options: Any) -> Tenure:
    """A lease whose transaction has ended two ttls later."""
    tenure, transaction = guarded(bench, **options)
    see(bench, tenure, Kept.LOCKED, 2 * TTL)
    transaction.open = False
    return tenure


def test_a_transaction_that_outlasts_the_lease_leaves_it_in_doubt(bench: Bench) -> None:
    """Not held, but not lost either: the watcher leaves it alone, the keeper is to ask."""
    tenure = outlasted(bench)
    assert (tenure.held, tenure.gone, tenure.remaining()) == (False, False, 0)
    assert tenure.overdue(bench.clock.now()) is None
    assert tenure.looked_after(bench.clock.now())


def test_the_keepers_renewal_ends_the_doubt(bench: Bench) -> None:
    """Counted from when it was sent."""
    tenure = outlasted(bench)
    see(bench, tenure, Kept.OURS, 2 * TTL + 0.5)
    assert tenure.held
    assert tenure.stop == pytest.approx(START + 2 * TTL + 0.5 + STOP)
    assert not tenure.in_doubt(tenure.stop)
    assert tenure.overdue(tenure.stop) == DEADLINE


def test_a_check_asks_by_itself_and_once(bench: Bench) -> None:
    """One renewal; the next check is arithmetic again."""
    tenure = outlasted(bench)
    bench.leases.answer = lambda _: Kept.OURS
    before = len(bench.leases.renewed)
    tenure.check()
    tenure.check()
    assert [(renewal.ttl, renewal.waits) for renewal in bench.leases.renewed[before:]] == [(TTL, True)]
    assert tenure.held


def test_a_check_without_renewal_asks_too(bench: Bench) -> None:
    """``lease_renew=False`` says that nobody renews by himself."""
    tenure = outlasted(bench, renew=False)
    bench.leases.answer = lambda _: Kept.OURS
    tenure.check()
    assert tenure.held


@pytest.mark.parametrize(("kept", "reason"), [(Kept.OTHER, TAKEN), (Kept.MISSING, DEADLINE)])
def test_a_check_that_finds_another_owner_raises(bench: Bench, kept: Kept, reason: str) -> None:
    """Lost as ever."""
    tenure = outlasted(bench)
    bench.leases.answer = lambda _: kept
    with pytest.raises(LeaseLost, match=reason):
        tenure.check()
    assert (tenure.lost, tenure.gone) == (reason, True)
    assert [event.reason for event in bench.seen.of(LeaseGone)] == [reason]


def test_a_check_without_an_answer_raises(bench: Bench) -> None:
    """The keeper may still get one."""
    tenure = outlasted(bench)

    def away(_: Renewal) -> Kept:
        raise StoreUnavailable("away", None)

    bench.leases.answer = away
    with pytest.raises(LeaseLost, match=DEADLINE):
        tenure.check()
    assert tenure.lost is None


def test_a_lease_that_is_lost_is_not_asked_about(bench: Bench) -> None:
    """Whatever the answer would be."""
    tenure = outlasted(bench)
    bench.renewer._lose(tenure, DEADLINE)
    before = len(bench.leases.renewed)
    with pytest.raises(LeaseLost):
        tenure.check()
    assert len(bench.leases.renewed) == before


def test_without_a_guard_a_deadline_that_has_passed_is_no_doubt(bench: Bench) -> None:
    """Nor is it after a renewal since the guard: the row was free to be renewed."""
    tenure, transaction = guarded(bench)
    transaction.open = False
    see(bench, tenure, Kept.OURS, 1)
    bench.clock.time = START + 1 + STOP
    before = len(bench.leases.renewed)
    with pytest.raises(LeaseLost, match=DEADLINE):
        tenure.check()
    assert len(bench.leases.renewed) == before
    assert tenure.gone


def test_a_completion_that_has_committed_ends_the_doubt(bench: Bench) -> None:
    """The row is done under our fence: there is nothing to renew, and nobody comes."""
    tenure = outlasted(bench)
    tenure.work.completing = True
    bench.records.row = Row(State.DONE, 7, "token")
    see(bench, tenure, Kept.MISSING, 2 * TTL + 1)
    assert tenure.held
    assert not tenure.looked_after(bench.clock.now())


def test_the_watcher_has_the_keeper_asked_and_waits_for_the_answer(running: Bench) -> None:
    """It comes late, and in time."""
    asked = []

    def slow(renewal: Renewal) -> Kept:
        asked.append(renewal)
        if not renewal.waits:
            return Kept.LOCKED
        time.sleep(0.1)
        return Kept.OURS

    running.leases.answer = slow
    tenure = running.tenure(ttl=0.6)
    tenure.row_is_lease = True
    transaction = guard(running, tenure)
    running.renewer.add(tenure)
    ordinary = tenure.stop
    until(lambda: running.clock.now() > ordinary + 0.3, "the lease to be outlasted")
    assert tenure.held
    transaction.open = False
    assert not tenure.held
    until(lambda: tenure.held, "the confirmation")
    assert tenure.lost is None
    assert not asked[0].waits


def test_the_watcher_gives_up_when_there_is_no_answer(running: Bench) -> None:
    """A third of this ttl after it has noticed, and not before."""
    gone: list[float] = []

    def away(renewal: Renewal) -> Kept:
        if renewal.waits:
            raise StoreUnavailable("away", None)
        return Kept.LOCKED

    running.leases.answer = away
    tenure = running.tenure(ttl=1.2)
    tenure.row_is_lease = True
    tenure.interrupt = lambda: gone.append(running.clock.now())
    transaction = guard(running, tenure)
    running.renewer.add(tenure)
    ordinary = tenure.stop
    until(lambda: running.clock.now() > ordinary + 0.2, "the lease to be outlasted")
    transaction.open = False
    ended = running.clock.now()
    until(lambda: gone, "the loss")
    assert tenure.lost == DEADLINE
    assert gone[0] - ended >= 0.4 - 0.01
