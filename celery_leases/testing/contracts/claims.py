"""The contract of record stores for claims."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest

from celery_leases.decide.answers import Acquired, Refusal, Refused
from celery_leases.decide.waiting import RETRY_GRACE
from celery_leases.errors import LeaseStoreMismatch, StoreUnavailable
from celery_leases.record import (
    Ended,
    Failure,
    Record,
    State,
)
from celery_leases.stores.sql.records import SqlRecordStore
from celery_leases.testing.contracts.calls import claimed, fresh_key, make_call
from celery_leases.testing.contracts.record_case import (
    STORE,
    PassTime,
    RecordCase,
    again,
    closed,
    outcome,
    refused,
    row,
    timeless,
    waiting,
    won,
)

THREADS = 8


class ClaimContract(RecordCase):
    """A claim takes the row, or leaves it exactly as it is."""

    def test_a_claim_of_an_absent_row_makes_it(self, records: SqlRecordStore, key: str) -> None:
        """The row is running under the token, with all values of the call."""
        call = make_call(key, ttl=15.0, fingerprint="v1:f", digests={"a": "1"})
        assert records.read(key) is None
        record = won(records, call)
        named = (
            record.stored_key,
            record.task,
            record.key,
            record.owner,
            record.call_id,
            record.holder,
        )
        assert named == (
            key,
            call.task,
            call.key.key,
            call.token,
            call.call_id,
            call.host,
        )
        assert (record.state, record.attempt, record.failures, record.crashes) == (
            State.RUNNING,
            1,
            0,
            0,
        )
        assert (record.fingerprint, record.digests) == ("v1:f", {"a": "1"})
        assert (record.lease_store, record.lease_ttl, record.lease_until) == (STORE, 15.0, None)
        assert record.created_at == record.started_at
        assert abs(record.now - record.started_at) < 60e6
        assert record.fence > 0
        assert (record.previous, record.result, record.expires_at, record.finished_calls) == (
            None,
            None,
            None,
            (),
        )
        assert not record.just_crashed
        assert timeless(record) == row(records, key)

    def test_a_repeated_claim_counts_nothing(self, records: SqlRecordStore, key: str) -> None:
        """The reply to the first try may have been lost."""
        call = make_call(key)
        first = won(records, call)
        assert timeless(won(records, call)) == timeless(first)

    def test_a_repeated_claim_after_a_crash_still_shows_the_crash(
        self, records: SqlRecordStore, key: str
    ) -> None:
        """The reply that was lost may have been the one that showed it."""
        won(records, make_call(key))
        call = make_call(key)
        first = won(records, call)
        assert first.just_crashed
        assert timeless(won(records, call)) == timeless(first)

    def test_a_running_row_whose_lease_is_gone_is_a_suspected_crash(
        self, records: SqlRecordStore, key: str
    ) -> None:
        """The row is taken over, the crash is counted, and the host of the attempt is stored."""
        dead = won(records, make_call(key))
        for crashes in (1, 2):
            record = won(records, make_call(key))
            assert (record.attempt, record.crashes, record.failures) == (1 + crashes, crashes, 0)
            assert record.just_crashed
            assert record.previous is not None
            assert (record.previous.ended, record.previous.host) == (Ended.ABANDONED, dead.holder)
            assert record.created_at == dead.created_at
            dead = record

    @pytest.mark.parametrize(
        ("ended", "crashes"), [(Ended.LOST, 1), (Ended.CRASHED, 2)], ids=["lives", "died"]
    )
    def test_how_an_abandoned_attempt_ended_can_be_noted_later(
        self, records: SqlRecordStore, key: str, ended: Ended, crashes: int
    ) -> None:
        """Once, and while a later attempt has the row, which keeps it."""
        first, second, third = (won(records, make_call(key)) for _ in range(3))
        noted = records.note_end(first.stored_key, first.owner, ended)
        assert noted is not None
        assert (noted.crashes, [past.ended for past in noted.history]) == (
            crashes,
            [ended, Ended.ABANDONED],
        )
        assert records.note_end(first.stored_key, first.owner, ended) is None
        assert records.note_end(first.stored_key, third.owner, ended) is None
        assert row(records, key).is_attempt(State.RUNNING, third.owner, third.fence)
        noted = records.note_end(second.stored_key, second.owner, ended)
        assert noted is not None
        assert noted.previous is not None
        assert (noted.crashes, noted.previous.ended) == (2 * crashes - 2, ended)

    @pytest.mark.parametrize("by_celery", [True, False])
    def test_the_end_of_a_call_without_another_attempt_hides_no_crash(
        self, records: SqlRecordStore, key: str, by_celery: bool
    ) -> None:
        """The history keeps how the latest attempt ended, so a suspected crash before it can still
        be taken back.
        """
        first, second = won(records, make_call(key)), won(records, make_call(key))
        counted: dict[str, Any] = {"ended": Ended.CRASHED, "crashes": 2, "resumes": True}
        crashed = closed(records, second, State.PENDING, **counted)
        failure = Failure("builtins.TypeError", "no")
        ends: dict[str, Any] = {"ended": Ended.FAILED, "failure": failure, "unrun": True}
        if by_celery:
            assert records.close_waiting(key, lambda seen: outcome(seen, State.PENDING, **ends))
        else:
            assert records.stop_resuming(crashed, failure)
            assert not records.stop_resuming(crashed, failure), "it resumes no more"
        after = row(records, key)
        assert (after.ended, after.failure, after.resumes) == (Ended.FAILED, failure, False)
        assert after.unrun
        assert [past.ended for past in after.history] == [Ended.ABANDONED, Ended.CRASHED]
        assert after.previous is not None
        assert (after.previous.ended, after.previous.host) == (Ended.CRASHED, second.holder)
        noted = records.note_end(key, first.owner, Ended.LOST)
        assert noted is not None
        assert noted.crashes == 1
        third = won(records, make_call(key))
        assert [past.ended for past in third.history] == [Ended.LOST, Ended.CRASHED]

    def test_a_running_row_is_left_alone_while_its_lease_store_is_younger_than_its_ttl(
        self, records: SqlRecordStore, key: str
    ) -> None:
        """Even if the call's own ttl is shorter: the holder may be about to write its lease
        again.
        """
        first = make_call(key, ttl=15.0)
        running = won(records, first)
        answer = records.claim(make_call(key, ttl=0.1), STORE, age=lambda: 14.9)
        assert isinstance(answer, Refused)
        assert answer.why is Refusal.EMPTIED
        assert answer.record is not None
        assert answer.record.owner == running.owner
        assert answer.emptied == 14.9
        second = records.claim(make_call(key), STORE, age=lambda: 15.0)
        assert claimed(second).crashes == 1

    def test_the_age_of_the_lease_store_is_read_only_before_a_takeover(
        self, records: SqlRecordStore, key: str
    ) -> None:
        """It is not needed for a key without a row, for a row of an earlier attempt of the same
        call, and for a row that is not running.
        """

        def asked() -> float:
            raise StoreUnavailable("the lease store does not answer", False)

        first = make_call(key, ttl=15.0)
        assert isinstance(records.claim(first, STORE, age=asked), Acquired)
        second = claimed(records.claim(again(first, prior=(first.token,)), STORE, age=asked))
        assert second.crashes == 0
        with pytest.raises(StoreUnavailable, match="the lease store does not answer"):
            records.claim(make_call(key), STORE, age=asked)
        closed(records, second, State.PENDING, ended=Ended.LOST)
        third = make_call(key)
        assert isinstance(records.claim(third, STORE, age=asked), Acquired)
        assert isinstance(records.claim(third, STORE, age=asked), Acquired)

    def test_the_identity_of_a_database_never_changes(self, records: SqlRecordStore) -> None:
        """It is a word, because it is stored in the values of leases."""
        name = records.identity()
        assert name.isalnum()
        assert records.identity() == name

    def test_an_attempt_that_was_closed_is_no_crash(
        self, records: SqlRecordStore, key: str
    ) -> None:
        """The next attempt sees how it ended, its error and its host."""
        failure = Failure("shop.errors.Declined", "no", "rule")
        first = won(records, make_call(key))
        closed(records, first, State.PENDING, ended=Ended.LOST, failure=failure, failures=1)
        record = won(records, make_call(key))
        assert (record.attempt, record.failures, record.crashes) == (2, 1, 0)
        assert not record.just_crashed
        assert record.previous is not None
        seen = (record.previous.ended, record.previous.error, record.previous.host)
        assert seen == (Ended.LOST, failure, first.holder)
        assert record.failure is None

    def test_a_crash_is_shown_once(self, records: SqlRecordStore, key: str) -> None:
        """The claim after an attempt that was settled does not show the crash before it."""
        won(records, make_call(key))
        closed(records, won(records, make_call(key)), State.PENDING, ended=Ended.LOST)
        record = won(records, make_call(key))
        assert not record.just_crashed
        assert record.crashes == 1

    def test_our_own_earlier_attempt_is_no_crash(self, records: SqlRecordStore, key: str) -> None:
        """A call names the attempts that may have left its row running in ``prior``."""
        first = make_call(key)
        won(records, first)
        record = won(records, again(first, prior=(first.token,)))
        assert record.crashes == 0
        assert not record.just_crashed
        other = won(records, make_call(key, prior=(first.token,)))
        assert other.crashes == 1

    def test_the_fence_grows_with_every_claim(self, records: SqlRecordStore, key: str) -> None:
        """After crashes, failures and repeats alike."""
        fences = []
        for number in range(6):
            record = won(records, make_call(key))
            fences.append(record.fence)
            if number % 2:
                closed(records, record, State.PENDING, ended=Ended.LOST)
        assert fences == sorted(set(fences))

    def test_of_claims_at_the_same_time_one_can_settle(
        self, records: SqlRecordStore, key: str
    ) -> None:
        """Each successful claim has its own fence, and only the last one can write an outcome."""
        together = Barrier(THREADS)

        def claim(_: int) -> Record | None:
            together.wait(10)
            answer = records.claim(make_call(key), STORE)
            return answer.record if isinstance(answer, Acquired) else None

        with ThreadPoolExecutor(THREADS) as threads:
            winners = [
                record for record in threads.map(claim, range(THREADS)) if record is not None
            ]
        assert len({record.fence for record in winners}) == len(winners) > 0
        assert [records.settle(record, outcome(record)) for record in winners].count(True) == 1

    # -- refusals ----------------------------------------------------------------------------------

    def test_finished_work_is_replayed(self, records: SqlRecordStore, key: str) -> None:
        """A claim of a done row, by the same call or another, gets the row with its result."""
        call = make_call(key)
        closed(records, won(records, call), result='{"a": 1}')
        for later in (make_call(key), again(call), call):
            record = refused(records, later)
            assert (record.state, record.result, record.call_id) == (
                State.DONE,
                '{"a": 1}',
                call.call_id,
            )

    @pytest.mark.parametrize("state", [State.FAILED, State.UNCERTAIN])
    def test_failed_work_stays_failed(
        self, records: SqlRecordStore, key: str, state: State
    ) -> None:
        """Until an operator resets it."""
        failure = Failure("builtins.ValueError", "bad", None)
        call = make_call(key)
        closed(records, won(records, call), state, ended=Ended.LOST, failure=failure)
        for later in (make_call(key), again(call)):
            record = refused(records, later)
            assert (record.state, record.failure) == (state, failure)

    @pytest.mark.parametrize("state", [State.PENDING, State.COOLING])
    def test_a_waiting_row_is_refused_until_its_time(
        self, records: SqlRecordStore, key: str, state: State, pass_time: PassTime
    ) -> None:
        """Also to the waiting call itself, if it comes much too early."""
        call = make_call(key)
        waiting(records, call, self.short, state)
        record = refused(records, make_call(key))
        assert 0 < record.waits <= self.short
        pass_time(1.2 * self.short)
        assert won(records, make_call(key)).attempt == 2
        other = make_call(fresh_key())
        waiting(records, other, RETRY_GRACE + 60, state)
        refused(records, make_call(other.key.stored))
        refused(records, again(other))

    def test_the_call_that_waits_is_granted_its_travel_time(
        self, records: SqlRecordStore, key: str
    ) -> None:
        """Other calls are not, because they would overtake the message with that countdown."""
        call = make_call(key)
        waiting(records, call, 0.9 * RETRY_GRACE)
        refused(records, make_call(key))
        assert won(records, again(call)).attempt == 2

    @pytest.mark.parametrize("state", [State.RUNNING, State.PENDING, State.DONE])
    def test_another_fingerprint_is_refused(
        self, records: SqlRecordStore, key: str, state: State
    ) -> None:
        """The key belongs to other arguments. Nothing is counted, and the row shows their
        digests.
        """
        call = make_call(key, fingerprint="v1:a", digests={"x": "1"})
        record = won(records, call)
        if state is not State.RUNNING:
            closed(records, record, state)
        found = refused(records, make_call(key, fingerprint="v1:b", digests={"x": "2"}))
        assert (found.fingerprint, found.digests, found.state) == ("v1:a", {"x": "1"}, state)

    def test_the_fingerprint_of_the_same_call_is_not_compared(
        self, records: SqlRecordStore, key: str
    ) -> None:
        """A deployment may have changed how it is computed. The row keeps the first one."""
        call = make_call(key, fingerprint="v1:a")
        closed(records, won(records, call), State.PENDING, ended=Ended.LOST)
        assert won(records, again(call, fingerprint="v2:z")).fingerprint == "v1:a"

    @pytest.mark.parametrize("given", [{"fingerprint": "v1:a"}, {"fingerprint": None}])
    def test_an_equal_fingerprint_is_accepted(
        self, records: SqlRecordStore, key: str, given: Any
    ) -> None:
        """So is a request without a fingerprint."""
        closed(
            records,
            won(records, make_call(key, fingerprint="v1:a")),
            State.PENDING,
            ended=Ended.LOST,
        )
        assert won(records, make_call(key, **given)).attempt == 2

    # -- lease stores ------------------------------------------------------------------------------

    def test_two_lease_stores_over_one_database_are_noticed(
        self, records: SqlRecordStore, key: str
    ) -> None:
        """The attempt under the other lease store may be alive. So this is an error that names both
        stores, and not a crash.
        """
        won(records, make_call(key))
        before = row(records, key)
        with pytest.raises(LeaseStoreMismatch) as caught:
            records.claim(make_call(key), "redis:two")
        assert (caught.value.ours, caught.value.theirs) == ("redis:two", STORE)
        assert "redis:two" in str(caught.value)
        assert STORE in str(caught.value)
        assert row(records, key) == before

    def test_a_row_that_does_not_run_may_change_its_lease_store(
        self, records: SqlRecordStore, key: str
    ) -> None:
        """So an application can change its lease store."""
        closed(records, won(records, make_call(key)), State.PENDING, ended=Ended.LOST)
        assert won(records, make_call(key), "redis:two").lease_store == "redis:two"
        closed(records, won(records, make_call(key), "redis:two"))
        assert refused(records, make_call(key)).state is State.DONE

    # -- each runs ---------------------------------------------------------------------------------

    def test_rerun_gives_every_call_a_generation(self, records: SqlRecordStore, key: str) -> None:
        """The counts start at 0, and the finished calls are remembered."""
        finished: dict[str, str | None] = {}
        for generation in range(3):
            call = make_call(key, each_runs=True)
            closed(records, won(records, call), State.PENDING, ended=Ended.LOST, failures=1)
            record = won(records, again(call, each_runs=True))
            assert (record.generation, record.attempt, record.failures) == (generation, 2, 1)
            assert tuple(finished) == record.finished_calls
            finished[call.call_id] = f'"{generation}"'
            closed(records, record, failures=0, result=f'"{generation}"', finished=finished)
        fresh = won(records, make_call(key, each_runs=True))
        assert (fresh.generation, fresh.attempt, fresh.failures, fresh.crashes) == (3, 1, 0, 0)
        assert (fresh.result, fresh.previous, fresh.just_crashed) == (None, None, False)
        assert fresh.finished_results == finished

    def test_rerun_never_repeats_a_call_that_has_finished(
        self, records: SqlRecordStore, key: str
    ) -> None:
        """A late copy of its message is refused in every state of the key."""
        call = make_call(key, each_runs=True)
        closed(records, won(records, call), finished={call.call_id: '"a"'})
        refused(records, again(call, each_runs=True))
        second = won(records, make_call(key, each_runs=True))
        refused(records, again(call, each_runs=True))
        closed(records, second, State.PENDING, ended=Ended.LOST)
        refused(records, again(call, each_runs=True))
        assert row(records, key).finished_results == {call.call_id: '"a"'}

    def test_rerun_waits_like_any_other(self, records: SqlRecordStore, key: str) -> None:
        """Until its retry time other calls are refused, and the failed call keeps its
        generation.
        """
        waiting(records, make_call(key, each_runs=True), 60.0)
        refused(records, make_call(key, each_runs=True))

    def test_rerun_starts_anew_after_a_crash_of_another_call(
        self, records: SqlRecordStore, key: str
    ) -> None:
        """The next call takes over the dead call's row for itself, with a higher fence."""
        dead = won(records, make_call(key, each_runs=True))
        record = won(records, make_call(key, each_runs=True))
        assert record.fence > dead.fence
        assert not records.settle(dead, outcome(dead))
