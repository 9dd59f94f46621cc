"""What every store of effects and progress must do: subclass, and give it as the fixture ``effects``."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from celery_leases.core.effects import Begun, Effect, EffectState, Found
from celery_leases.core.ports import EffectStore, RecordStore
from celery_leases.core.records import Bid, Ended, Record, State
from celery_leases.testing.contracts.bids import fresh_key, make_bid
from celery_leases.testing.contracts.record_case import PassTime, RecordCase, closed, outcome, row, won

CHARGE = "charge"
MARGIN = 30e6
"""How far apart the store's clock may read within one test, in microseconds."""


class EffectStoreContract(RecordCase):
    """For every ``EffectStore``, beside the record store it belongs to.

    Override the fixtures ``records`` and ``effects``; and ``pass_time`` where the store's clock can be turned.
    """

    @pytest.fixture
    def effects(self, records: RecordStore) -> EffectStore:
        """The store under test, on the database of *records*; override this."""
        raise NotImplementedError("override the fixture `effects` with an effect store")

    # -- the intent ----------------------------------------------------------------------------------------

    def test_an_intent_is_noted_under_the_fence_of_its_attempt(
        self, records: RecordStore, effects: EffectStore, key: str
    ) -> None:
        """It is sent now, and has no reply."""
        record = won(records, make_bid(key))
        begun = sent(effects, record)
        assert (begun.stored_key, begun.name, begun.state) == (key, CHARGE, EffectState.SENT)
        assert (begun.fence, begun.generation, begun.idempotency_key) == (record.fence, 0, f"{key}/{CHARGE}")
        assert (begun.result, begun.reference, begun.done_at) == (None, None, None)
        assert abs(begun.sent_at - record.started_at) < MARGIN
        assert begun.age() < 1.0
        assert found_of(effects, record) == [replace(begun, now=0)]

    def test_begun_again_by_its_own_attempt_it_is_begun(
        self, records: RecordStore, effects: EffectStore, key: str
    ) -> None:
        """The reply to the commit may have been lost; the time of the intent stays."""
        record = won(records, make_bid(key))
        first, again = sent(effects, record), sent(effects, record)
        assert replace(again, now=0) == replace(first, now=0)
        assert len(found_of(effects, record)) == 1

    @pytest.mark.parametrize("wrong", ["fence", "owner"])
    def test_a_stale_attempt_begins_nothing(
        self, records: RecordStore, effects: EffectStore, key: str, wrong: str
    ) -> None:
        """And writes nothing."""
        record = won(records, make_bid(key))
        stale = replace(record, fence=record.fence - 1) if wrong == "fence" else replace(record, owner="stranger")
        assert begin(effects, stale) is None
        assert found_of(effects, record) == []

    def test_an_attempt_that_was_overtaken_begins_nothing(
        self, records: RecordStore, effects: EffectStore, key: str
    ) -> None:
        """Neither anew nor by taking over, whether its successor has begun or not."""
        zombie = won(records, make_bid(key))
        successor = won(records, make_bid(key))
        assert begin(effects, zombie) is None
        assert found_of(effects, successor) == []
        begun = sent(effects, successor)
        assert begin(effects, zombie) is None
        assert begin(effects, zombie, taken=begun.fence) is None
        assert found_of(effects, successor) == [replace(begun, now=0)]

    @pytest.mark.parametrize("state", [State.DONE, State.PENDING, State.FAILED, State.UNCERTAIN, State.COOLING])
    def test_an_attempt_that_was_closed_begins_nothing(
        self, records: RecordStore, effects: EffectStore, key: str, state: State
    ) -> None:
        """Its body may still be running somewhere."""
        record = won(records, make_bid(key))
        closed(records, record, state)
        assert begin(effects, record) is None
        assert found_of(effects, record) == []

    def test_an_attempt_without_a_row_begins_nothing(
        self, records: RecordStore, effects: EffectStore, key: str
    ) -> None:
        """It may have been purged."""
        record = replace(won(records, make_bid(key)), stored_key=fresh_key())
        assert begin(effects, record) is None
        assert found_of(effects, record) == []

    def test_keys_and_names_have_effects_of_their_own(
        self, records: RecordStore, effects: EffectStore, key: str
    ) -> None:
        """Listed in the order in which they were sent."""
        record, other = won(records, make_bid(key)), won(records, make_bid(fresh_key()))
        names = ["zulu", "alpha", "naïve ✓ " + "n" * 200, "Alpha"]
        for name in names:
            sent(effects, record, name)
        assert [effect.name for effect in effects.of_key(record)] == names
        assert effects.of_key(other) == []
        assert finished(effects, sent(effects, other, "alpha"))
        assert {effect.state for effect in effects.of_key(record)} == {EffectState.SENT}

    def test_the_longest_names_are_told_apart(self, records: RecordStore, effects: EffectStore, key: str) -> None:
        """255 characters, of which the last may be the difference."""
        record = won(records, make_bid(key))
        for last in "ab":
            sent(effects, record, "é" * 254 + last)
        assert len(effects.of_key(record)) == 2

    # -- found by a later attempt --------------------------------------------------------------------------

    @pytest.mark.parametrize("done", [False, True])
    def test_a_later_attempt_finds_it_as_it_is(
        self, records: RecordStore, effects: EffectStore, key: str, done: bool
    ) -> None:
        """However the earlier one ended."""
        bid = make_bid(key)
        first = sent(effects, won(records, bid))
        if done:
            assert finished(effects, first, '{"id": "ch_1", "ü": [1]}', "ch_1")
        before = found_of(effects, row(records, key))
        later = begin(effects, won(records, make_bid(key, call_id=bid.call_id)))
        assert isinstance(later, Found)
        assert [replace(later.effect, now=0)] == before == found_of(effects, row(records, key))
        assert (later.effect.state is EffectState.DONE) is done
        if done:
            assert (later.effect.result, later.effect.reference) == ('{"id": "ch_1", "ü": [1]}', "ch_1")

    def test_its_age_is_counted_by_the_stores_clock(
        self, records: RecordStore, effects: EffectStore, key: str, pass_time: PassTime
    ) -> None:
        """From the intent to the moment it is found."""
        sent(effects, won(records, make_bid(key)))
        pass_time(self.short)
        later = begin(effects, won(records, make_bid(key)))
        assert isinstance(later, Found)
        assert self.short <= later.effect.age() < self.short + 10.0

    def test_a_later_attempt_takes_an_intent_in_doubt_over(
        self, records: RecordStore, effects: EffectStore, key: str
    ) -> None:
        """It is sent anew under its fence and the same idempotency key; asked twice, it is the same."""
        first = sent(effects, won(records, make_bid(key)))
        record = won(records, make_bid(key))
        taken = sent(effects, record, taken=first.fence)
        assert (taken.fence, taken.idempotency_key) == (record.fence, first.idempotency_key)
        assert taken.sent_at >= first.sent_at
        assert replace(sent(effects, record, taken=first.fence), now=0) == replace(taken, now=0)
        assert found_of(effects, record) == [replace(taken, now=0)]

    @pytest.mark.parametrize("case", ["done", "another fence"])
    def test_only_the_intent_that_was_seen_is_taken_over(
        self, records: RecordStore, effects: EffectStore, key: str, case: str
    ) -> None:
        """It may have been noted, or taken over, since."""
        first = sent(effects, won(records, make_bid(key)))
        if case == "done":
            assert finished(effects, first)
        record = won(records, make_bid(key))
        taken = first.fence - (case != "done")
        assert isinstance(begin(effects, record, taken=taken), Found)
        assert found_of(effects, record)[0].fence == first.fence

    # -- the reply -----------------------------------------------------------------------------------------

    def test_a_reply_is_noted(self, records: RecordStore, effects: EffectStore, key: str) -> None:
        """With its reference, and when."""
        record = won(records, make_bid(key))
        begun = sent(effects, record)
        text = '{"long": "' + "x" * 300_000 + '", "ü": "✓"}'
        assert effects.finish(begun, text, "réf-1")
        (done,) = effects.of_key(record)
        assert (done.state, done.result, done.reference) == (EffectState.DONE, text, "réf-1")
        assert (done.fence, done.sent_at, done.idempotency_key) == (begun.fence, begun.sent_at, begun.idempotency_key)
        assert done.done_at is not None
        assert done.sent_at <= done.done_at < done.sent_at + MARGIN

    def test_a_reply_may_be_nothing(self, records: RecordStore, effects: EffectStore, key: str) -> None:
        """It has happened all the same."""
        record = won(records, make_bid(key))
        assert effects.finish(sent(effects, record), None, None)
        (done,) = effects.of_key(record)
        assert (done.state, done.result, done.reference) == (EffectState.DONE, None, None)

    def test_the_same_reply_again_is_accepted_and_another_one_is_not(
        self, records: RecordStore, effects: EffectStore, key: str
    ) -> None:
        """The answer to the commit may have been lost; what was noted stays."""
        record = won(records, make_bid(key))
        begun = sent(effects, record)
        assert finished(effects, begun, '"one"', "1")
        assert finished(effects, begun, '"one"', "1")
        assert not finished(effects, begun, '"two"', "1")
        assert not finished(effects, begun, '"one"', "2")
        assert [(effect.result, effect.reference) for effect in effects.of_key(record)] == [('"one"', "1")]

    @pytest.mark.parametrize("since", ["nothing", "claimed", "found", "given back", "done"])
    def test_a_late_reply_is_a_fact_while_nobody_has_taken_its_intent_over(
        self, records: RecordStore, effects: EffectStore, key: str, since: str
    ) -> None:
        """Lease or no lease: the next attempt uses it."""
        zombie = won(records, make_bid(key))
        begun = sent(effects, zombie)
        if since in ("claimed", "found"):
            successor = won(records, make_bid(key))
            if since == "found":
                assert isinstance(begin(effects, successor), Found)
        elif since == "given back":
            closed(records, zombie, State.PENDING, ended=Ended.LOST)
        elif since == "done":
            closed(records, zombie)
        assert finished(effects, begun, '"late"')
        if since != "done":
            later = begin(effects, won(records, make_bid(key)))
            assert isinstance(later, Found)
            assert (later.effect.state, later.effect.result) == (EffectState.DONE, '"late"')

    def test_an_intent_that_was_taken_over_refuses_the_old_reply(
        self, records: RecordStore, effects: EffectStore, key: str
    ) -> None:
        """Neither that, nor its withdrawal, changes anything, before the new one has its reply and after."""
        old = sent(effects, won(records, make_bid(key)))
        record = won(records, make_bid(key))
        taken = sent(effects, record, taken=old.fence)
        for _ in range(2):
            before = found_of(effects, record)
            assert not finished(effects, old, '"old"')
            assert not effects.withdraw(old)
            assert found_of(effects, record) == before
            assert finished(effects, taken, '"new"')
        assert effects.of_key(record)[0].result == '"new"'

    # -- withdrawn -----------------------------------------------------------------------------------------

    def test_a_withdrawn_intent_has_never_been(self, records: RecordStore, effects: EffectStore, key: str) -> None:
        """The next attempt begins anew; the reply to a call that was not made is not noted."""
        begun = sent(effects, won(records, make_bid(key)))
        other = sent(effects, row(records, key), "mail")
        assert effects.withdraw(begun)
        assert found_of(effects, row(records, key)) == [replace(other, now=0)]
        assert not finished(effects, begun)
        assert not effects.withdraw(begun)
        record = won(records, make_bid(key))
        assert sent(effects, record).fence == record.fence

    def test_what_is_done_cannot_be_withdrawn(self, records: RecordStore, effects: EffectStore, key: str) -> None:
        """It has happened."""
        record = won(records, make_bid(key))
        begun = sent(effects, record)
        assert finished(effects, begun)
        assert not effects.withdraw(begun)
        assert effects.of_key(record)[0].state is EffectState.DONE

    # -- generations ---------------------------------------------------------------------------------------

    @pytest.mark.parametrize("how", ["crash", "failure", "operator's retry"])
    def test_effects_outlast_attempts(self, records: RecordStore, effects: EffectStore, key: str, how: str) -> None:
        """They belong to the work, not to one attempt of it."""
        bid = make_bid(key)
        record = won(records, bid)
        assert finished(effects, sent(effects, record), '"kept"')
        if how == "failure":
            closed(records, record, State.PENDING, ended=Ended.FAILED, failures=1, resumes=True)
        elif how == "operator's retry":
            closed(records, record, State.FAILED, ended=Ended.FAILED)
            assert records.reset(key, keep=True, forgive=True) is not None
        later = begin(effects, won(records, make_bid(key, call_id=bid.call_id)))
        assert isinstance(later, Found)
        assert later.effect.result == '"kept"'

    @pytest.mark.parametrize("done", [False, True])
    @pytest.mark.parametrize("how", ["forgotten", "another call of a rerun task", "retention over"])
    def test_a_new_generation_has_effects_of_its_own(
        self, records: RecordStore, effects: EffectStore, key: str, pass_time: PassTime, how: str, done: bool
    ) -> None:
        """Nothing of the old one counts, and its late reply is refused."""
        old = won(records, make_bid(key))
        before = sent(effects, old)
        if done:
            assert finished(effects, before, '"old"', "ref")
        bid: Bid = make_bid(key)
        if how == "forgotten":
            assert records.reset(key, keep=False) is not None
        elif how == "retention over":
            closed(records, old, retention=self.short)
            pass_time(1.2 * self.short)
        else:
            closed(records, old)
            bid = make_bid(key, rerun=True)
        record = won(records, bid)
        assert record.generation == 1
        assert effects.of_key(record) == []
        begun = sent(effects, record)
        assert (begun.generation, begun.result, begun.reference, begun.done_at) == (1, None, None, None)
        assert not finished(effects, before, '"late"')
        assert not effects.withdraw(before)
        assert found_of(effects, record) == [replace(begun, now=0)]

    # -- an operator's word --------------------------------------------------------------------------------

    def test_intents_in_doubt_are_forgotten_by_an_operators_word(
        self, records: RecordStore, effects: EffectStore, key: str
    ) -> None:
        """Those with a reply stay."""
        record = won(records, make_bid(key))
        assert finished(effects, sent(effects, record, "mail"))
        sent(effects, record)
        other = sent(effects, won(records, make_bid(fresh_key())))
        assert effects.forget_sent(record) == 1
        assert [effect.name for effect in effects.of_key(record)] == ["mail"]
        assert finished(effects, other)

    def test_an_operators_word_says_nothing_of_a_later_attempt(
        self, records: RecordStore, effects: EffectStore, key: str
    ) -> None:
        """It may have begun while he was looking, or have taken over what he looked for."""
        seen = won(records, make_bid(key))
        sent(effects, seen)
        begun = sent(effects, seen, "mail")
        later = won(records, make_bid(key))
        sent(effects, later, "parcel")
        sent(effects, later, "mail", taken=begun.fence)
        assert effects.forget_sent(seen) == 1
        assert sorted(effect.name for effect in effects.of_key(later)) == ["mail", "parcel"]

    # -- progress ------------------------------------------------------------------------------------------

    def test_progress_is_saved_for_the_next_attempt(self, records: RecordStore, effects: EffectStore, key: str) -> None:
        """The last one counts, and nothing else of the row changes."""
        record = won(records, make_bid(key))
        before = row(records, key)
        assert effects.save_progress(record, '{"n": 1}')
        text = '{"ü": "' + "x" * 100_000 + '"}'
        assert effects.save_progress(record, text)
        assert row(records, key) == replace(before, progress=text)
        assert won(records, make_bid(key)).progress == text

    @pytest.mark.parametrize("how", ["overtaken", "done", "wrong owner", "forgotten"])
    def test_progress_of_a_stale_attempt_is_refused(
        self, records: RecordStore, effects: EffectStore, key: str, how: str
    ) -> None:
        """It changes nothing."""
        record = won(records, make_bid(key))
        assert effects.save_progress(record, '"first"')
        match how:
            case "overtaken":
                won(records, make_bid(key))
            case "done":
                closed(records, record)
            case "wrong owner":
                record = replace(record, owner="stranger")
            case _:
                records.reset(key, keep=False)
        before = row(records, key)
        assert not effects.save_progress(record, '"late"')
        effects.clear_crashes(record)
        assert row(records, key) == before
        assert before.progress == (None if how == "forgotten" else '"first"')

    @pytest.mark.parametrize("how", ["progress", "effect"])
    def test_what_gets_on_ends_the_row_of_crashes(
        self, records: RecordStore, effects: EffectStore, key: str, how: str
    ) -> None:
        """The next crash is the first."""
        won(records, make_bid(key))
        record = won(records, make_bid(key))
        assert record.crashes == 1
        if how == "progress":
            assert effects.save_progress(record, "1")
        else:
            effects.clear_crashes(record)
        assert row(records, key).crashes == 0
        assert won(records, make_bid(key)).crashes == 1

    def test_an_outcome_saves_progress_along_or_leaves_it(
        self, records: RecordStore, effects: EffectStore, key: str
    ) -> None:
        """What an attempt has not saved before it ends is saved with that."""
        record = won(records, make_bid(key))
        assert effects.save_progress(record, "1")
        assert records.settle(record, outcome(record, State.PENDING, Ended.FAILED, progress="2"))
        assert row(records, key).progress == "2"
        record = won(records, make_bid(key))
        assert records.settle(record, outcome(record, State.PENDING, Ended.FAILED))
        assert won(records, make_bid(key)).progress == "2"

    def test_the_row_tells_whether_the_attempt_still_runs(
        self, records: RecordStore, effects: EffectStore, key: str
    ) -> None:
        """By state, fence and owner."""
        record = won(records, make_bid(key))
        assert effects.is_running(record)
        assert not effects.is_running(replace(record, owner="stranger"))
        successor = won(records, make_bid(key))
        assert (effects.is_running(record), effects.is_running(successor)) == (False, True)
        closed(records, successor)
        assert not effects.is_running(successor)

    # -- purging -------------------------------------------------------------------------------------------

    def test_effects_go_with_their_record(
        self, records: RecordStore, effects: EffectStore, key: str, pass_time: PassTime
    ) -> None:
        """A key that is as good as new begins anew; the effects of others stay."""
        lasting = won(records, make_bid(fresh_key()))
        assert finished(effects, sent(effects, lasting))
        old = won(records, make_bid(key))
        assert finished(effects, sent(effects, old))
        sent(effects, old, "mail")
        closed(records, old, retention=self.short)
        pass_time(1.2 * self.short)
        purge(records)
        assert records.read(key) is None
        record = won(records, make_bid(key))
        assert record.generation == 0
        assert effects.of_key(record) == []
        assert isinstance(begin(effects, record), Begun)
        assert len(effects.of_key(lasting)) == 1

    def test_many_may_purge_at_once_and_leave_nothing(
        self, records: RecordStore, effects: EffectStore, pass_time: PassTime
    ) -> None:
        """An effect left behind would count for the next record of its key, which is of the same generation."""
        keys = [fresh_key() for _ in range(60)]
        for key in keys:
            record = won(records, make_bid(key))
            assert finished(effects, sent(effects, record))
            closed(records, record, retention=self.short)
        pass_time(1.2 * self.short)
        together = threading.Barrier(4)

        def purging(_: int) -> None:
            together.wait(10)
            purge(records, 3)

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(purging, range(4)))
        for key in keys:
            assert isinstance(begin(effects, won(records, make_bid(key))), Begun)

    # -- races ---------------------------------------------------------------------------------------------

    def test_of_two_attempts_at_once_one_begins(self, records: RecordStore, effects: EffectStore) -> None:
        """Either the first did so before the second claimed, which finds it then; or it is refused."""
        seen = set()
        for number in range(40):
            key = fresh_key()
            zombie = won(records, make_bid(key))
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
                record = won(records, make_bid(key))
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
        assert seen  # which of them came first is up to the machine

    def test_of_a_late_reply_and_a_takeover_at_once_one_counts(
        self, records: RecordStore, effects: EffectStore
    ) -> None:
        """Never both: a reply that was accepted is not called for again."""
        for _ in range(40):
            key = fresh_key()
            old = sent(effects, won(records, make_bid(key)))
            record = won(records, make_bid(key))
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


def begin(effects: EffectStore, record: Record, name: str = CHARGE, taken: int | None = None) -> Begun | Found | None:
    """What the store says to an intent of the attempt on *record*."""
    return effects.begin(record, name, f"{record.stored_key}/{name}"[:64], taken)


def sent(effects: EffectStore, record: Record, name: str = CHARGE, taken: int | None = None) -> Effect:
    """The effect, whose intent must be accepted."""
    begun = begin(effects, record, name, taken)
    assert isinstance(begun, Begun), begun
    return begun.effect


def finished(effects: EffectStore, effect: Effect, result: str = '"ok"', reference: str | None = None) -> bool:
    """Whether the reply was accepted."""
    return effects.finish(effect, result, reference)


def found_of(effects: EffectStore, record: Record) -> list[Effect]:
    """The effects of the record's generation, without the moment they were read at."""
    return [replace(effect, now=0) for effect in effects.of_key(record)]


def purge(records: RecordStore, batch: int = 100) -> None:
    """Purge until nothing is left to be purged."""
    while records.purge(batch):
        pass
