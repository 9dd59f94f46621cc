"""The contract of effect stores for replies, withdrawn intents, new generations, and intents
that an operator forgets.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from celery_leases.call import Call
from celery_leases.effect import EffectState, Found
from celery_leases.record import (
    Ended,
    State,
)
from celery_leases.stores.sql.effects import SqlEffectStore
from celery_leases.stores.sql.records import SqlRecordStore
from celery_leases.testing.contracts.calls import fresh_key, make_call
from celery_leases.testing.contracts.effect_case import (
    MARGIN,
    EffectCase,
    begin,
    finished,
    found_of,
    sent,
)
from celery_leases.testing.contracts.record_case import PassTime, closed, row, won


class ReplyContract(EffectCase):
    """A reply is accepted from the attempt with the intent's fence, and is never changed."""

    # -- the reply ---------------------------------------------------------------------------------

    def test_a_reply_is_stored(
        self, records: SqlRecordStore, effects: SqlEffectStore, key: str
    ) -> None:
        """With its reference and its time."""
        record = won(records, make_call(key))
        begun = sent(effects, record)
        text = '{"long": "' + "x" * 300_000 + '", "ü": "✓"}'
        assert effects.finish(begun, text, "réf-1")
        (done,) = effects.of_key(record)
        assert (done.state, done.result, done.reference) == (EffectState.DONE, text, "réf-1")
        assert (done.fence, done.sent_at, done.idempotency_key) == (
            begun.fence,
            begun.sent_at,
            begun.idempotency_key,
        )
        assert done.done_at is not None
        assert done.sent_at <= done.done_at < done.sent_at + MARGIN

    def test_a_reply_may_be_nothing(
        self, records: SqlRecordStore, effects: SqlEffectStore, key: str
    ) -> None:
        """The effect is done nevertheless."""
        record = won(records, make_call(key))
        assert effects.finish(sent(effects, record), None, None)
        (done,) = effects.of_key(record)
        assert (done.state, done.result, done.reference) == (EffectState.DONE, None, None)

    def test_the_same_reply_again_is_accepted_and_another_one_is_not(
        self, records: SqlRecordStore, effects: SqlEffectStore, key: str
    ) -> None:
        """The reply to the commit may have been lost. The stored reply does not change."""
        record = won(records, make_call(key))
        begun = sent(effects, record)
        assert finished(effects, begun, '"one"', "1")
        assert finished(effects, begun, '"one"', "1")
        assert not finished(effects, begun, '"two"', "1")
        assert not finished(effects, begun, '"one"', "2")
        assert [(effect.result, effect.reference) for effect in effects.of_key(record)] == [
            ('"one"', "1")
        ]

    @pytest.mark.parametrize("since", ["nothing", "claimed", "found", "given back", "done"])
    def test_a_late_reply_is_stored_unless_its_intent_was_taken_over(
        self, records: SqlRecordStore, effects: SqlEffectStore, key: str, since: str
    ) -> None:
        """Even if the attempt has lost its lease. The next attempt uses the reply."""
        zombie = won(records, make_call(key))
        begun = sent(effects, zombie)
        if since in ("claimed", "found"):
            successor = won(records, make_call(key))
            if since == "found":
                assert isinstance(begin(effects, successor), Found)
        elif since == "given back":
            closed(records, zombie, State.PENDING, ended=Ended.LOST)
        elif since == "done":
            closed(records, zombie)
        assert finished(effects, begun, '"late"')
        if since != "done":
            later = begin(effects, won(records, make_call(key)))
            assert isinstance(later, Found)
            assert (later.effect.state, later.effect.result) == (EffectState.DONE, '"late"')

    def test_an_intent_that_was_taken_over_refuses_the_old_reply(
        self, records: SqlRecordStore, effects: SqlEffectStore, key: str
    ) -> None:
        """Neither the old reply nor a withdrawal by the old attempt changes anything, before and
        after the new reply.
        """
        old = sent(effects, won(records, make_call(key)))
        record = won(records, make_call(key))
        taken = sent(effects, record, taken=old.fence)
        for _ in range(2):
            before = found_of(effects, record)
            assert not finished(effects, old, '"old"')
            assert not effects.withdraw(old)
            assert found_of(effects, record) == before
            assert finished(effects, taken, '"new"')
        assert effects.of_key(record)[0].result == '"new"'

    # -- withdrawn ---------------------------------------------------------------------------------

    def test_a_withdrawn_intent_is_deleted(
        self, records: SqlRecordStore, effects: SqlEffectStore, key: str
    ) -> None:
        """The next attempt begins a new intent. A reply to the withdrawn one is refused."""
        begun = sent(effects, won(records, make_call(key)))
        other = sent(effects, row(records, key), "mail")
        assert effects.withdraw(begun)
        assert found_of(effects, row(records, key)) == [replace(other, now=0)]
        assert not finished(effects, begun)
        assert not effects.withdraw(begun)
        record = won(records, make_call(key))
        assert sent(effects, record).fence == record.fence

    def test_what_is_done_cannot_be_withdrawn(
        self, records: SqlRecordStore, effects: SqlEffectStore, key: str
    ) -> None:
        """Its call was made."""
        record = won(records, make_call(key))
        begun = sent(effects, record)
        assert finished(effects, begun)
        assert not effects.withdraw(begun)
        assert effects.of_key(record)[0].state is EffectState.DONE

    # -- generations -------------------------------------------------------------------------------

    @pytest.mark.parametrize("how", ["crash", "failure", "operator's retry"])
    def test_effects_outlast_attempts(
        self, records: SqlRecordStore, effects: SqlEffectStore, key: str, how: str
    ) -> None:
        """They belong to the generation, not to one attempt."""
        call = make_call(key)
        record = won(records, call)
        assert finished(effects, sent(effects, record), '"kept"')
        if how == "failure":
            closed(records, record, State.PENDING, ended=Ended.FAILED, failures=1, resumes=True)
        elif how == "operator's retry":
            closed(records, record, State.FAILED, ended=Ended.FAILED)
            assert records.reset(key, keep=True, forgive=True) is not None
        later = begin(effects, won(records, make_call(key, call_id=call.call_id)))
        assert isinstance(later, Found)
        assert later.effect.result == '"kept"'

    @pytest.mark.parametrize("done", [False, True])
    @pytest.mark.parametrize(
        "how", ["forgotten", "another call of a task whose calls all run", "retention over"]
    )
    def test_a_new_generation_has_effects_of_its_own(
        self,
        records: SqlRecordStore,
        effects: SqlEffectStore,
        key: str,
        pass_time: PassTime,
        how: str,
        done: bool,
    ) -> None:
        """No effect of the old generation counts, and neither does its late reply."""
        old = won(records, make_call(key))
        before = sent(effects, old)
        if done:
            assert finished(effects, before, '"old"', "ref")
        call: Call = make_call(key)
        if how == "forgotten":
            assert records.reset(key, keep=False) is not None
        elif how == "retention over":
            closed(records, old, retention=self.short)
            pass_time(1.2 * self.short)
        else:
            closed(records, old)
            call = make_call(key, each_runs=True)
        record = won(records, call)
        assert record.generation == 1
        assert effects.of_key(record) == []
        begun = sent(effects, record)
        assert (begun.scope, begun.result, begun.reference, begun.done_at) == (
            "#1",
            None,
            None,
            None,
        )
        finished(effects, before, '"late"')
        effects.withdraw(before)
        assert found_of(effects, record) == [replace(begun, now=0)]

    # -- forgotten by an operator ------------------------------------------------------------------

    def test_an_operator_forgets_the_intents_without_a_reply(
        self, records: SqlRecordStore, effects: SqlEffectStore, key: str
    ) -> None:
        """Effects with a reply stay."""
        record = won(records, make_call(key))
        assert finished(effects, sent(effects, record, "mail"))
        sent(effects, record)
        other = sent(effects, won(records, make_call(fresh_key())))
        assert effects.forget_sent(record) == 1
        assert [effect.name for effect in effects.of_key(record)] == ["mail"]
        assert finished(effects, other)

    def test_an_operator_forgets_no_intent_of_a_later_attempt(
        self, records: SqlRecordStore, effects: SqlEffectStore, key: str
    ) -> None:
        """The later attempt may have begun the intent, or have taken it over, after the operator
        has read the record.
        """
        seen = won(records, make_call(key))
        sent(effects, seen)
        begun = sent(effects, seen, "mail")
        later = won(records, make_call(key))
        sent(effects, later, "parcel")
        sent(effects, later, "mail", taken=begun.fence)
        assert effects.forget_sent(seen) == 1
        assert sorted(effect.name for effect in effects.of_key(later)) == ["mail", "parcel"]
