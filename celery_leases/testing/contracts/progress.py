"""The contract of effect stores for saved progress, and for the purge of records."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from celery_leases.effect import Begun
from celery_leases.record import Ended, State
from celery_leases.stores.sql.effects import SqlEffectStore
from celery_leases.stores.sql.records import SqlRecordStore
from celery_leases.testing.contracts.calls import fresh_key, make_call
from celery_leases.testing.contracts.effect_case import (
    EffectCase,
    begin,
    finished,
    purge,
    sent,
)
from celery_leases.testing.contracts.record_case import PassTime, closed, outcome, row, won


class ProgressContract(EffectCase):
    """Saving progress, and resetting the crashes in a row, is fenced by the record."""

    # -- progress ----------------------------------------------------------------------------------

    def test_progress_is_saved_for_the_next_attempt(
        self, records: SqlRecordStore, effects: SqlEffectStore, key: str
    ) -> None:
        """The last saved progress counts, and nothing else in the row changes."""
        record = won(records, make_call(key))
        before = row(records, key)
        assert effects.save_progress(record, '{"n": 1}')
        text = '{"ü": "' + "x" * 100_000 + '"}'
        assert effects.save_progress(record, text)
        assert row(records, key) == replace(before, progress=text)
        assert won(records, make_call(key)).progress == text

    @pytest.mark.parametrize("kept", [0, 1])
    def test_progress_keeps_the_crashes_of_another_call(
        self, records: SqlRecordStore, effects: SqlEffectStore, key: str, kept: int
    ) -> None:
        """Otherwise the crashes in a row have ended."""
        first = won(records, make_call(key))
        closed(records, first, state=State.PENDING, ended=Ended.CRASHED, crashes=1)
        record = won(records, make_call(key))
        assert effects.save_progress(record, '{"n": 1}', keeps_crashes=bool(kept))
        assert row(records, key).crashes == kept

    @pytest.mark.parametrize("how", ["overtaken", "done", "wrong owner", "forgotten"])
    def test_progress_of_a_stale_attempt_is_refused(
        self, records: SqlRecordStore, effects: SqlEffectStore, key: str, how: str
    ) -> None:
        """It changes nothing."""
        record = won(records, make_call(key))
        assert effects.save_progress(record, '{"n": 1}')
        match how:
            case "overtaken":
                won(records, make_call(key))
            case "done":
                closed(records, record)
            case "wrong owner":
                record = replace(record, owner="stranger")
            case _:
                records.reset(key, keep=False)
        before = row(records, key)
        assert not effects.save_progress(record, '{"n": 2}')
        effects.clear_crashes(record)
        assert row(records, key) == before
        assert before.progress == (None if how == "forgotten" else '{"n": 1}')

    @pytest.mark.parametrize("how", ["progress", "effect"])
    def test_progress_ends_the_crashes_in_a_row(
        self, records: SqlRecordStore, effects: SqlEffectStore, key: str, how: str
    ) -> None:
        """The next crash counts as the first."""
        won(records, make_call(key))
        record = won(records, make_call(key))
        assert record.crashes == 1
        if how == "progress":
            assert effects.save_progress(record, '{"n": 1}')
        else:
            effects.clear_crashes(record)
        assert row(records, key).crashes == 0
        assert won(records, make_call(key)).crashes == 1

    def test_an_outcome_saves_progress_along_or_leaves_it(
        self, records: SqlRecordStore, effects: SqlEffectStore, key: str
    ) -> None:
        """Progress that was not saved before is saved with the outcome."""
        record = won(records, make_call(key))
        assert effects.save_progress(record, '{"n": 1}')
        assert records.settle(
            record, outcome(record, State.PENDING, Ended.FAILED, progress='{"n": 2}')
        )
        assert row(records, key).progress == '{"n": 2}'
        record = won(records, make_call(key))
        assert records.settle(record, outcome(record, State.PENDING, Ended.FAILED))
        assert won(records, make_call(key)).progress == '{"n": 2}'

    def test_the_row_shows_whether_the_attempt_still_runs(
        self, records: SqlRecordStore, effects: SqlEffectStore, key: str
    ) -> None:
        """By state, fence and owner."""
        record = won(records, make_call(key))
        assert effects.is_running(record)
        assert not effects.is_running(replace(record, owner="stranger"))
        successor = won(records, make_call(key))
        assert (effects.is_running(record), effects.is_running(successor)) == (False, True)
        closed(records, successor)
        assert not effects.is_running(successor)

    # -- purging -----------------------------------------------------------------------------------

    def test_effects_are_purged_with_their_record(
        self, records: SqlRecordStore, effects: SqlEffectStore, key: str, pass_time: PassTime
    ) -> None:
        """The next record of the key begins without effects. The effects of other keys stay."""
        lasting = won(records, make_call(fresh_key()))
        assert finished(effects, sent(effects, lasting))
        old = won(records, make_call(key))
        assert finished(effects, sent(effects, old))
        sent(effects, old, "mail")
        closed(records, old, retention=self.short)
        pass_time(1.2 * self.short)
        purge(records)
        assert records.read(key) is None
        record = won(records, make_call(key))
        assert record.generation == 0
        assert effects.of_key(record) == []
        assert isinstance(begin(effects, record), Begun)
        assert len(effects.of_key(lasting)) == 1

    def test_purges_at_the_same_time_leave_no_effect(
        self, records: SqlRecordStore, effects: SqlEffectStore, pass_time: PassTime
    ) -> None:
        """An effect that stayed would belong to the next record of the key, because that has the
        same generation.
        """
        keys = [fresh_key() for _ in range(60)]
        for key in keys:
            record = won(records, make_call(key))
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
            assert isinstance(begin(effects, won(records, make_call(key))), Begun)
