"""The contract of effect stores for intents: begun by the attempt itself, by a stale attempt, or
by a later one.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from celery_leases.effect import Begun, Effect, EffectState, Found
from celery_leases.record import Record, State
from celery_leases.stores.sql.effects import SqlEffectStore
from celery_leases.stores.sql.records import SqlRecordStore
from celery_leases.testing.contracts.calls import fresh_key, make_call
from celery_leases.testing.contracts.effect_case import (
    CHARGE,
    MARGIN,
    EffectCase,
    begin,
    finished,
    found_of,
    sent,
)
from celery_leases.testing.contracts.record_case import PassTime, closed, row, won


class IntentContract(EffectCase):
    """An intent is fenced by the record, and only one attempt begins it."""

    # -- the intent --------------------------------------------------------------------------------

    def test_an_intent_is_noted_under_the_fence_of_its_attempt(
        self, records: SqlRecordStore, effects: SqlEffectStore, key: str
    ) -> None:
        """Its state is *sent*, its time is now, and it has no reply."""
        record = won(records, make_call(key))
        begun = sent(effects, record)
        assert (begun.stored_key, begun.name, begun.state) == (key, CHARGE, EffectState.SENT)
        assert (begun.fence, begun.scope, begun.idempotency_key) == (
            record.fence,
            "#0",
            f"{key}/{CHARGE}",
        )
        assert (begun.result, begun.reference, begun.done_at) == (None, None, None)
        assert abs(begun.sent_at - record.started_at) < MARGIN
        assert begun.age() < 1.0
        assert found_of(effects, record) == [replace(begun, now=0)]

    def test_begun_again_by_its_own_attempt_it_is_begun(
        self, records: SqlRecordStore, effects: SqlEffectStore, key: str
    ) -> None:
        """The reply to the commit may have been lost. The time of the intent does not change."""
        record = won(records, make_call(key))
        first, again = sent(effects, record), sent(effects, record)
        assert replace(again, now=0) == replace(first, now=0)
        assert len(found_of(effects, record)) == 1

    @pytest.mark.parametrize("wrong", ["fence", "owner"])
    def test_a_stale_attempt_begins_nothing(
        self, records: SqlRecordStore, effects: SqlEffectStore, key: str, wrong: str
    ) -> None:
        """Nothing is written."""
        record = won(records, make_call(key))
        stale = (
            replace(record, fence=record.fence - 1)
            if wrong == "fence"
            else replace(record, owner="stranger")
        )
        assert begin(effects, stale) is None
        assert found_of(effects, record) == []

    def test_an_attempt_that_was_overtaken_begins_nothing(
        self, records: SqlRecordStore, effects: SqlEffectStore, key: str
    ) -> None:
        """It can neither begin nor take over an effect, whether or not its successor has begun."""
        zombie = won(records, make_call(key))
        successor = won(records, make_call(key))
        assert begin(effects, zombie) is None
        assert found_of(effects, successor) == []
        begun = sent(effects, successor)
        assert begin(effects, zombie) is None
        assert begin(effects, zombie, taken=begun.fence) is None
        assert found_of(effects, successor) == [replace(begun, now=0)]

    @pytest.mark.parametrize(
        "state", [State.DONE, State.PENDING, State.FAILED, State.UNCERTAIN, State.COOLING]
    )
    def test_an_attempt_that_was_closed_begins_nothing(
        self, records: SqlRecordStore, effects: SqlEffectStore, key: str, state: State
    ) -> None:
        """Its body may still be running."""
        record = won(records, make_call(key))
        closed(records, record, state)
        assert begin(effects, record) is None
        assert found_of(effects, record) == []

    def test_an_attempt_without_a_row_begins_nothing(
        self, records: SqlRecordStore, effects: SqlEffectStore, key: str
    ) -> None:
        """The row may have been purged."""
        record = replace(won(records, make_call(key)), stored_key=fresh_key())
        assert begin(effects, record) is None
        assert found_of(effects, record) == []

    def test_keys_and_names_have_effects_of_their_own(
        self, records: SqlRecordStore, effects: SqlEffectStore, key: str
    ) -> None:
        """They are listed in the order of their intents."""
        record, other = (
            won(records, make_call(key)),
            won(records, make_call(fresh_key())),
        )
        names = ["zulu", "alpha", "naïve ✓ " + "n" * 200, "Alpha"]
        for name in names:
            sent(effects, record, name)
        assert [effect.name for effect in effects.of_key(record)] == names
        assert effects.of_key(other) == []
        assert finished(effects, sent(effects, other, "alpha"))
        assert {effect.state for effect in effects.of_key(record)} == {EffectState.SENT}

    def test_the_longest_names_are_different_effects(
        self, records: SqlRecordStore, effects: SqlEffectStore, key: str
    ) -> None:
        """Names of 255 characters that differ in the last one."""
        record = won(records, make_call(key))
        for last in "ab":
            sent(effects, record, "é" * 254 + last)
        assert len(effects.of_key(record)) == 2

    # -- found by a later attempt ------------------------------------------------------------------

    @pytest.mark.parametrize("done", [False, True])
    def test_a_later_attempt_finds_it_as_it_is(
        self, records: SqlRecordStore, effects: SqlEffectStore, key: str, done: bool
    ) -> None:
        """Whether or not the earlier attempt got a reply."""
        call = make_call(key)
        first = sent(effects, won(records, call))
        if done:
            assert finished(effects, first, '{"id": "ch_1", "ü": [1]}', "ch_1")
        before = found_of(effects, row(records, key))
        later = begin(effects, won(records, make_call(key, call_id=call.call_id)))
        assert isinstance(later, Found)
        assert [replace(later.effect, now=0)] == before == found_of(effects, row(records, key))
        assert (later.effect.state is EffectState.DONE) is done
        if done:
            assert (later.effect.result, later.effect.reference) == (
                '{"id": "ch_1", "ü": [1]}',
                "ch_1",
            )

    def test_its_age_is_counted_by_the_stores_clock(
        self, records: SqlRecordStore, effects: SqlEffectStore, key: str, pass_time: PassTime
    ) -> None:
        """The age is the time from the intent until it is found."""
        sent(effects, won(records, make_call(key)))
        pass_time(self.short)
        later = begin(effects, won(records, make_call(key)))
        assert isinstance(later, Found)
        assert self.short <= later.effect.age() < self.short + 10.0

    def test_a_later_attempt_takes_an_intent_in_doubt_over(
        self, records: SqlRecordStore, effects: SqlEffectStore, key: str
    ) -> None:
        """The intent gets the new fence and keeps its idempotency key. Taking it over twice changes
        nothing.
        """
        first = sent(effects, won(records, make_call(key)))
        record = won(records, make_call(key))
        taken = sent(effects, record, taken=first.fence)
        assert (taken.fence, taken.idempotency_key) == (record.fence, first.idempotency_key)
        assert taken.sent_at >= first.sent_at
        assert replace(sent(effects, record, taken=first.fence), now=0) == replace(taken, now=0)
        assert found_of(effects, record) == [replace(taken, now=0)]

    @pytest.mark.parametrize("case", ["done", "another fence"])
    def test_only_the_intent_that_was_seen_is_taken_over(
        self, records: SqlRecordStore, effects: SqlEffectStore, key: str, case: str
    ) -> None:
        """Since then it may have got a reply, or may have been taken over."""
        first = sent(effects, won(records, make_call(key)))
        if case == "done":
            assert finished(effects, first)
        record = won(records, make_call(key))
        taken = first.fence - (case != "done")
        assert isinstance(begin(effects, record, taken=taken), Found)
        assert found_of(effects, record)[0].fence == first.fence

    # -- races -------------------------------------------------------------------------------------

    def test_of_two_attempts_at_once_one_begins(
        self, records: SqlRecordStore, effects: SqlEffectStore
    ) -> None:
        """Either the first begins before the second claims, which then finds the effect; or the
        first is refused.
        """
        seen = set()
        for number in range(40):
            key = fresh_key()
            zombie = won(records, make_call(key))
            together = threading.Barrier(2)

            def first(zombie: Record = zombie, together: threading.Barrier = together) -> object:
                together.wait(10)
                return begin(effects, zombie)

            def second(
                key: str = key, together: threading.Barrier = together, number: int = number
            ) -> tuple[Record, object]:
                together.wait(10)
                if number % 2:
                    threading.Event().wait(0.0005)
                record = won(records, make_call(key))
                return record, begin(effects, record)

            with ThreadPoolExecutor(2) as threads:
                one, two = threads.submit(first), threads.submit(second)
                answer, (successor, its_answer) = one.result(20), two.result(20)
            if isinstance(answer, Begun):
                assert isinstance(its_answer, Found)
                assert its_answer.effect.fence == zombie.fence
            else:
                assert answer is None
                assert isinstance(its_answer, Begun)
                assert its_answer.effect.fence == successor.fence
            assert len(effects.of_key(successor)) == 1
            seen.add(type(answer))
        assert seen  # which attempt comes first depends on the machine

    def test_of_a_late_reply_and_a_takeover_at_once_one_counts(
        self, records: SqlRecordStore, effects: SqlEffectStore
    ) -> None:
        """Never both: a call whose reply was accepted is not made again."""
        for _ in range(40):
            key = fresh_key()
            old = sent(effects, won(records, make_call(key)))
            record = won(records, make_call(key))
            together = threading.Barrier(2)

            def late(old: Effect = old, together: threading.Barrier = together) -> bool:
                together.wait(10)
                return finished(effects, old, '"late"')

            def take(
                record: Record = record, old: Effect = old, together: threading.Barrier = together
            ) -> Begun | Found | None:
                together.wait(10)
                return begin(effects, record, taken=old.fence)

            with ThreadPoolExecutor(2) as threads:
                one, two = threads.submit(late), threads.submit(take)
                accepted, answer = one.result(20), two.result(20)
            assert isinstance(answer, Found if accepted else Begun)
            (effect,) = effects.of_key(record)
            assert (effect.result == '"late"') is accepted
