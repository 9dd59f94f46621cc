"""What must hold for every combination of facts, before the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any, get_args

from celery_leases.call import Call
from celery_leases.decide import before_run as decisions
from celery_leases.decide import claim as claim_rules
from celery_leases.decide.before_run import before_run
from celery_leases.decide.verdicts import Drop, Facts, Raise, Reschedule, Return, Run, Verdict
from celery_leases.decide.waiting import SHORTEST_DELAY
from celery_leases.errors import AlreadyDone, CoolingDown, KeyReused, LeaseHeld
from celery_leases.events import Dropped
from celery_leases.record import Ended, Failure, Record, State
from celery_leases.results import TOO_LARGE
from tests.unit.decision_inputs import (
    NOW,
    ON_BUSY,
    OURS,
    SECOND,
    THEIRS,
    WHEN_DONE,
    a_call,
    a_closed_group,
    a_record,
    held_by,
    probed,
)


@dataclass(frozen=True)
class Combination:
    call: Call
    facts: Facts
    verdict: Verdict

    @property
    def finished(self) -> bool:
        record = self.facts.record
        if self.facts.callbacks_sent:
            return True
        return (
            record is not None
            and not record.expired
            and claim_rules.finished_by(self.call.call_id, record)
        )

    @property
    def live(self) -> bool:
        record = self.facts.record
        return self.facts.holder is not None or (
            record is not None and decisions.holder_of_row(record) is not None
        )

    @property
    def same(self) -> bool:
        record, holder = self.facts.record, self.facts.holder
        return all(found is None or found.call_id == OURS for found in (record, holder))

    @property
    def begun(self) -> bool:
        """It is known of the call that it has begun: from its message, or from the row it stands
        in.
        """
        record = self.facts.record
        return self.call.started or (
            record is not None and not record.expired and record.call_id == OURS
        )


FAILED: dict[str, Any] = {"ended": Ended.FAILED, "failure": Failure("E", "no")}
ROWS: dict[str, dict[str, Any]] = {
    "pending": {"state": State.PENDING},
    "pending, later": {"state": State.PENDING, "retry_at": NOW + 60 * SECOND},
    "pending, in a moment": {"state": State.PENDING, "retry_at": NOW + SECOND // 2},
    "running in its row": {"state": State.RUNNING, "lease_until": NOW + 9 * SECOND},
    "running, lease over": {"state": State.RUNNING, "lease_until": NOW - SECOND},
    "running, lease elsewhere": {"state": State.RUNNING},
    "done": {"state": State.DONE, "result": "1"},
    "done, result too large": {"state": State.DONE, "reason": TOO_LARGE},
    "done, ignored": {"state": State.DONE, "reason": "ignored"},
    "done, long ago": {"state": State.DONE, "result": "1", "expires_at": NOW - 1},
    "cooling": {"state": State.COOLING, "retry_at": NOW + 60 * SECOND},
    "cooled": {"state": State.COOLING, "retry_at": NOW - SECOND},
    "failed": {"state": State.FAILED, "failure": Failure("E", "no")},
    "failed, long ago": {"state": State.FAILED, "expires_at": NOW - 1},
    "uncertain": {"state": State.UNCERTAIN},
}
COOLED: dict[str, dict[str, Any]] = {
    "cooling, coming back": {"state": State.COOLING, "retry_at": NOW + 60 * SECOND, "resumes": True, **FAILED},
    "cooled, coming back": {"state": State.COOLING, "retry_at": NOW, "resumes": True, **FAILED},
    "cooling, told": {"state": State.COOLING, "retry_at": NOW + 60 * SECOND, **FAILED},
    "cooled, told": {"state": State.COOLING, "retry_at": NOW, **FAILED},
    "quick retry": {"state": State.PENDING, "retry_at": NOW + 2 * SECOND, "resumes": True, **FAILED},
    "snoozed": {"state": State.PENDING, "retry_at": NOW + 60 * SECOND, "resumes": True, "ended": Ended.SNOOZED},
}  # fmt: skip
LISTS: tuple[dict[str, Any], ...] = (
    {},
    {"finished_calls": (OURS, THEIRS), "finished_results": {OURS: "1", THEIRS: "2"}},
    {"finished_calls": (OURS,), "finished_results": {OURS: None}},
)
FINGERPRINTS = ("v1:same", "v1:other", None)


def rows(
    kinds: dict[str, dict[str, Any]], fingerprints: tuple[str | None, ...]
) -> Iterator[Record | None]:
    yield None
    for row, call_id, fingerprint, listed in product(
        kinds.values(), (OURS, THEIRS), fingerprints, LISTS
    ):
        changes = {name: value for name, value in row.items() if name != "state"}
        yield a_record(row["state"], call_id, fingerprint=fingerprint, **changes, **listed)


@cache
def combinations() -> list[Combination]:
    holders = (None, held_by(OURS), held_by(THEIRS))
    calls = [
        a_call(on_busy=on_busy, **when_done, canvas=canvas)
        for on_busy, when_done, canvas in product(ON_BUSY, WHEN_DONE, (False, True))
    ]
    found = []
    for call, row, holder, out in product(
        calls, list(rows(ROWS, FINGERPRINTS)), holders, (False, True)
    ):
        facts = Facts(record=row, holder=holder, callbacks_sent=out)
        found.append(Combination(call, facts, before_run(call, facts)))
    return found


@cache
def cooldowns() -> list[Combination]:
    calls = [
        a_call(**when_done, on_busy=on_busy, canvas=canvas, started=started, repeat=repeat)
        for when_done, on_busy, canvas, started, repeat in product(
            WHEN_DONE[::3],
            ON_BUSY,
            (False, True),
            (False, True),
            (False, True),
        )
    ]
    closed_groups = (None, a_closed_group(60), a_closed_group(7_200), a_closed_group(0), probed(14))
    found = []
    for call, row, closed_group in product(
        calls, list(rows(ROWS | COOLED, FINGERPRINTS[:2])), closed_groups
    ):
        facts = Facts(record=row, closed_group=closed_group)
        found.append(Combination(call, facts, before_run(call, facts)))
    return found


def breaches(found: list[Combination], broken: Callable[[Combination], bool]) -> list[Combination]:
    return [one for one in found if broken(one)][:3]


class TestEveryCombination:
    """Some 50 000 combinations of row, holder, options, canvas and callbacks."""

    def breaches(self, broken: Any) -> list[Combination]:
        return breaches(combinations(), broken)

    def test_there_is_a_verdict_for_each(self) -> None:
        assert self.breaches(lambda one: not isinstance(one.verdict, get_args(Verdict))) == []

    def test_a_delivery_with_a_canvas_is_dropped_only_as_this_calls_finished_business(self) -> None:
        assert (
            self.breaches(
                lambda one: isinstance(one.verdict, Drop) and one.call.canvas and not one.finished
            )
            == []
        )

    def test_a_held_key_never_runs(self) -> None:
        assert self.breaches(lambda one: isinstance(one.verdict, Run) and one.live) == []

    def test_what_this_call_has_finished_is_answered_and_never_run_or_rescheduled(self) -> None:
        assert (
            self.breaches(
                lambda one: one.finished and not isinstance(one.verdict, Return | Drop | Raise)
            )
            == []
        )

    def test_nothing_is_dropped_unasked(self) -> None:
        def unasked(one: Combination) -> bool:
            options = one.call.options
            record = one.facts.record
            busy = one.live or (record is not None and record.state is State.COOLING)
            asked = (options.on_busy == "ignore" and busy) or options.on_done == "ignore"
            return isinstance(one.verdict, Drop) and not one.finished and not asked

        assert self.breaches(unasked) == []

    def test_the_options_about_other_calls_do_not_apply_to_the_same_call(self) -> None:
        seen: dict[Any, Verdict] = {}
        for one in combinations():
            if one.same:
                known = (repr(one.facts), one.call.canvas)
                assert repr(seen.setdefault(known, one.verdict)) == repr(one.verdict), one

    def test_the_same_call_is_never_refused_for_being_held_done_or_different(self) -> None:
        told = (LeaseHeld, AlreadyDone, KeyReused)
        assert (
            self.breaches(
                lambda one: (
                    one.same
                    and isinstance(one.verdict, Raise)
                    and isinstance(one.verdict.error, told)
                )
            )
            == []
        )

    def test_every_delay_can_be_published(self) -> None:
        assert self.breaches(unpublishable) == []


class TestEveryCooldown:
    """Some 40 000 combinations of row, group, ``lease_on_busy``, canvas, and what the message
    knows.
    """

    def breaches(self, broken: Any) -> list[Combination]:
        return breaches(cooldowns(), broken)

    def test_no_body_starts_at_a_group_that_is_not_open(self) -> None:
        assert (
            self.breaches(
                lambda one: one.facts.closed_group is not None and isinstance(one.verdict, Run)
            )
            == []
        )

    def test_no_body_starts_before_the_keys_own_time(self) -> None:
        def early(one: Combination) -> bool:
            record = one.facts.record
            waits = (
                record is not None
                and record.state in (State.PENDING, State.COOLING)
                and record.waits > 1
            )
            return waits and isinstance(one.verdict, Run)

        assert self.breaches(early) == []

    def test_a_group_changes_nothing_but_a_run_or_a_wait(self) -> None:
        answers: dict[Any, Verdict] = {}
        for one in cooldowns():
            known = (repr(one.facts.record), repr(one.call))
            if one.facts.closed_group is None:
                answers[known] = one.verdict
            elif not too_early(answers[known]):
                assert repr(answers[known]) == repr(one.verdict), one

    def test_a_call_that_has_begun_is_never_refused_or_dropped_for_a_cooldown(self) -> None:
        def refused(one: Combination) -> bool:
            dropped = isinstance(one.verdict, Drop) and not one.finished
            told = isinstance(one.verdict, Raise) and isinstance(one.verdict.error, CoolingDown)
            return one.begun and (dropped or told)

        assert self.breaches(refused) == []

    def test_the_copy_of_a_call_that_stands_in_the_row_knows_that_it_has_begun(self) -> None:
        """So that it may no longer expire."""

        def forgetful(one: Combination) -> bool:
            known = one.begun and not one.call.started
            return known and isinstance(one.verdict, Reschedule) and not one.verdict.started

        assert self.breaches(forgetful) == []

    def test_a_delivery_with_a_canvas_is_never_dropped_for_a_cooldown(self) -> None:
        assert (
            self.breaches(
                lambda one: isinstance(one.verdict, Drop) and one.call.canvas and not one.finished
            )
            == []
        )

    def test_only_a_copy_of_the_call_that_got_the_error_gets_it_again(self) -> None:
        def told(one: Combination) -> bool:
            record = one.facts.record
            if record is None or record.ended is not Ended.FAILED or record.resumes or one.finished:
                return False
            again = isinstance(one.verdict, Raise) and one.verdict.own
            return again is not (one.call.repeat and record.call_id == OURS)

        assert self.breaches(told) == []

    def test_every_wait_can_be_published_and_explained_to_an_eager_caller(self) -> None:
        def unexplained(one: Combination) -> bool:
            too_early = isinstance(one.verdict, Reschedule) and one.verdict.event_type in (
                "cooldown",
                "backoff",
            )
            return too_early and not isinstance(one.verdict.refusal, CoolingDown)  # type: ignore[union-attr]

        assert self.breaches(unpublishable) == []
        assert self.breaches(unexplained) == []


def unpublishable(one: Combination) -> bool:
    delays = isinstance(one.verdict, Reschedule)
    return delays and not SHORTEST_DELAY <= one.verdict.delay <= one.call.longest_countdown  # type: ignore[union-attr]


def too_early(verdict: Verdict) -> bool:
    """Whether the verdict is a run, or a wait that a group may make longer."""
    return (
        isinstance(verdict, Run)
        or (isinstance(verdict, Reschedule) and verdict.event_type in ("cooldown", "backoff"))
        or (isinstance(verdict, Raise) and isinstance(verdict.error, CoolingDown))
        or (isinstance(verdict, Drop) and verdict.reason is Dropped.COOLING)
    )
