"""The contract of effect stores for effects that belong to one call, instead of to a generation."""

from __future__ import annotations

import pytest

from celery_leases.call import Call
from celery_leases.effect import EffectState, Found
from celery_leases.record import Record
from celery_leases.stores.sql.effects import SqlEffectStore
from celery_leases.stores.sql.records import SqlRecordStore
from celery_leases.testing.contracts.calls import fresh_key, make_call
from celery_leases.testing.contracts.effect_case import (
    CHARGE,
    EffectCase,
    begin,
    finished,
    purge,
    sent,
)
from celery_leases.testing.contracts.record_case import PassTime, again, closed, row, won

HOUR = 3600.0


class ScopeContract(EffectCase):
    """Another call that takes over the record neither reads nor changes the effects of the
    first.
    """

    def test_a_call_finds_its_effect_after_another_has_had_the_record(
        self, records: SqlRecordStore, effects: SqlEffectStore, key: str
    ) -> None:
        """The call crashed inside the effect, and another call took over the key and finished. The
        effect still has no reply.
        """
        first = make_call(key, each_runs=True)
        begun = sent(effects, won(records, first), keep=HOUR)
        between = won(records, make_call(key, each_runs=True))
        assert effects.of_key(between) == []
        assert finished(effects, sent(effects, between, keep=HOUR), '"of the other"')
        closed(records, between)
        record = won(records, again(first, each_runs=True))
        assert record.generation == 2
        found = begin(effects, record, keep=HOUR)
        assert isinstance(found, Found)
        assert (found.effect.state, found.effect.scope) == (EffectState.SENT, first.call_id)
        assert (found.effect.fence, found.effect.idempotency_key) == (
            begun.fence,
            begun.idempotency_key,
        )
        taken = sent(effects, record, taken=begun.fence, keep=HOUR)
        assert finished(effects, taken, '"of the first"')
        assert [effect.result for effect in effects.of_key(record)] == ['"of the first"']

    def test_both_kinds_of_effects_are_of_the_record(
        self, records: SqlRecordStore, effects: SqlEffectStore, key: str
    ) -> None:
        """A deployment may have changed the scope."""
        record = won(records, make_call(key))
        sent(effects, record)
        sent(effects, record, keep=HOUR)
        assert [(effect.name, effect.scope) for effect in effects.of_key(record)] == [
            (CHARGE, "#0"),
            (CHARGE, record.call_id),
        ]
        assert effects.forget_sent(record) == 2
        assert effects.of_key(record) == []

    def test_an_operator_forgets_no_effect_of_another_call(
        self, records: SqlRecordStore, effects: SqlEffectStore, key: str
    ) -> None:
        """The operator has checked the effects that the record shows, which are those of its
        call.
        """
        first = make_call(key, each_runs=True)
        sent(effects, won(records, first), keep=HOUR)
        other = won(records, make_call(key, each_runs=True))
        sent(effects, other, keep=HOUR)
        assert effects.forget_sent(other) == 1
        closed(records, other)
        assert isinstance(
            begin(effects, won(records, again(first, each_runs=True)), keep=HOUR), Found
        )

    def test_a_forgotten_record_leaves_the_effects_of_calls(
        self, records: SqlRecordStore, effects: SqlEffectStore, key: str
    ) -> None:
        """They are no longer shown, but the same call finds them if it runs again."""
        call = make_call(key, each_runs=True)
        assert finished(effects, sent(effects, won(records, call), keep=HOUR))
        forgotten = records.reset(key, keep=False)
        assert forgotten is not None
        assert effects.of_key(forgotten) == []
        assert isinstance(
            begin(effects, won(records, again(call, each_runs=True)), keep=HOUR), Found
        )

    # -- purging -----------------------------------------------------------------------------------

    def test_effects_of_calls_are_purged_when_they_expire(
        self, records: SqlRecordStore, effects: SqlEffectStore, key: str, pass_time: PassTime
    ) -> None:
        """Even if other calls of the key run meanwhile. Unexpired effects, and those of the
        record's current call, stay.
        """
        short, long, present = (make_call(key, each_runs=True) for _ in range(3))
        self.ran(records, effects, short, self.short)
        self.ran(records, effects, long, HOUR)
        record = self.ran(records, effects, present, self.short)
        pass_time(1.2 * self.short)
        purge(records)
        assert len(effects.of_key(record)) == 1
        for call, expected in ((long, 1), (short, 0), (present, 0)):
            record = won(records, again(call, each_runs=True))
            purge(records)  # now another call is the current one
            assert len(effects.of_key(record)) == expected
            closed(records, record)

    @pytest.mark.parametrize("keep", [0.1, HOUR])
    def test_effects_of_calls_need_no_record(
        self,
        records: SqlRecordStore,
        effects: SqlEffectStore,
        key: str,
        pass_time: PassTime,
        keep: float,
    ) -> None:
        """They are purged with the record if they have expired; otherwise they stay for the
        call.
        """
        call = make_call(key, each_runs=True)
        record = won(records, call)
        assert finished(effects, sent(effects, record, keep=keep))
        closed(records, record, retention=0.1)
        pass_time(0.2)
        purge(records)
        purge(records)
        assert records.read(key) is None
        assert len(effects.of_key(won(records, again(call, each_runs=True)))) == (keep == HOUR)

    def test_an_effect_taken_over_expires_later(
        self, records: SqlRecordStore, effects: SqlEffectStore, key: str, pass_time: PassTime
    ) -> None:
        """Its retention counts from the takeover."""
        call = make_call(key, each_runs=True)
        begun = sent(effects, won(records, call), keep=self.short)
        sent(effects, won(records, again(call, each_runs=True)), taken=begun.fence, keep=HOUR)
        closed(records, row(records, key))
        closed(records, won(records, make_call(key, each_runs=True)))
        pass_time(1.2 * self.short)
        purge(records)
        assert len(effects.of_key(won(records, again(call, each_runs=True)))) == 1

    def test_many_effects_are_purged_in_batches(
        self, records: SqlRecordStore, effects: SqlEffectStore, key: str, pass_time: PassTime
    ) -> None:
        """The result of a full batch shows that there may be more."""
        record = won(records, make_call(key, each_runs=True))
        for number in range(5):
            sent(effects, record, f"mail {number}", keep=0.1)
        won(records, make_call(key, each_runs=True))
        lasting = sent(effects, won(records, make_call(fresh_key())))
        pass_time(0.2)
        assert [records.purge(2) for _ in range(3)][:2] == [2, 2]
        assert effects.of_key(record) == []
        assert finished(effects, lasting)

    def ran(
        self, records: SqlRecordStore, effects: SqlEffectStore, call: Call, keep: float
    ) -> Record:
        """The row after a run with one effect, whose retention is *keep*."""
        record = won(records, call)
        assert finished(effects, sent(effects, record, keep=keep))
        return closed(records, record)
