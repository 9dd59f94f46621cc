"""Invariants of a key after any sequence of endings, calls, waits, kills and operator actions."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_leases.call import Call
from celery_leases.decide.endings import (
    ControlFlow,
    Ending,
    Interrupted,
    Lost,
    Returned,
    Snoozed,
    Terminated,
)
from celery_leases.decide.verdicts import Drop
from celery_leases.decide.waiting import early_grace
from celery_leases.errors import Snooze
from celery_leases.failures.actions import Reason, cooldown, permanent, retry, retry_exactly
from celery_leases.options import Runs
from celery_leases.record import Ended, Record, State
from tests.unit.decision_inputs import GROUP, KEY, OURS, THEIRS, raised
from tests.unit.memory_worker import Bench

HARMLESS: dict[str, Ending] = {
    "cooldown": raised(cooldown("60s")),
    "group": raised(cooldown("30s", scope="group"), reason=Reason.RATE_LIMITED),
    "told": raised(
        replace(cooldown("30s", scope="group"), server_delay="instead"), 20.0, Reason.RATE_LIMITED
    ),
    "retry": raised(retry("1s")),
    "retry at once": raised(retry_exactly(0)),
    "ambiguous": raised(retry("1s", ambiguous=True)),
    "snoozed": Snoozed(Snooze(60), 60.0),
    "lost": Lost("taken"),
    "interrupted": Interrupted(SystemExit()),
    "retried": ControlFlow(Exception(), runs_again=True, delay=5.0, ended=Ended.REJECTED),
}
"""Endings after which the key continues, none of which is a crash."""
FINAL: dict[str, Ending] = {
    "returned": Returned(1, "1"),
    "permanent": raised(permanent()),
    "ignored": ControlFlow(Exception(), runs_again=False, ended=Ended.IGNORED),
}
TERMINATED: dict[str, Ending] = {"terminated": Terminated(SystemExit(), "hard time limit")}
ALL = HARMLESS | FINAL | TERMINATED
KILLED, RESET = "killed", "reset"
WAITS = st.sampled_from([0.0, 0.5, 20.0, 70.0, 4_000.0, 100_000.0])
CALLS = st.sampled_from([OURS, THEIRS])
EITHER: st.SearchStrategy[Runs] = st.sampled_from(["once", "each"])
FAMILIES = pytest.mark.parametrize(
    "in_records", [False, True], ids=["leases apart", "rows are leases"]
)


class Killed(BaseException):
    """The process is gone."""


def delivered(bench: Bench, call: Call, what: str) -> None:
    """One delivery to its end, or to its process's."""
    if what == RESET:
        if bench.records.rows and not bench.held:
            bench.records.retry(KEY.stored)
        return
    if what == KILLED:

        def kill() -> None:
            raise Killed

        try:
            bench.run(call, during=lambda _: kill())
        except Killed:
            bench.clock.sleep(call.options.ttl)
        return
    before, closed_group, bodies = bench.records.row(KEY.stored), bench.closed_group, len(bench.ran)
    reply = bench.run(call, ALL[what])
    if len(bench.ran) > bodies:
        assert closed_group is None or closed_group.probe_due, (
            "a body has started behind a closed group"
        )
        assert before is None or before.expired or may_start(before, call)
    finished = before is not None and (
        call.call_id in before.finished_calls or before.state is State.DONE
    )
    assert not isinstance(reply, Drop) or finished, "a call was dropped unanswered"


def may_start(row: Record, call: Call) -> bool:
    """Whether the previous row allowed the call to run."""
    if row.state in (State.PENDING, State.COOLING):
        return row.waits <= early_grace(row, call.call_id)
    if row.state is State.RUNNING:
        return row.lease_remaining == 0
    return call.options.each_runs and row.call_id != call.call_id


def is_sound(bench: Bench) -> None:
    """The invariants while no call runs."""
    closed_group = bench.closed_group
    assert closed_group is None or closed_group.probe is None, "a slot was kept"
    if not bench.records.rows:
        return
    row = bench.row
    assert not bench.held
    assert row.attempt >= 0
    assert 0 <= row.failures <= len(bench.ran)
    assert 0 <= row.quick_retries <= len(bench.ran)
    assert row.quick_retries <= 2, "more quick retries than are allowed"
    assert row.failures < 4 or row.state is State.FAILED, "more failures than are allowed"


@FAMILIES
@given(
    st.lists(st.tuples(CALLS, st.sampled_from([*HARMLESS, *FINAL]), WAITS), max_size=25),
    EITHER,
)
def test_what_ends_in_our_hands_is_never_a_crash(in_records, steps, which) -> None:
    bench = Bench(in_records)
    for call_id, what, wait in steps:
        call = bench.call(
            call_id=call_id,
            runs=which,
            repeat=True,
            started=True,
            max_retries=2,
            max_failures=4,
        )
        delivered(bench, call, what)
        is_sound(bench)
        assert all(row.crashes == 0 for row in bench.records.rows.values())
        assert all(row.state is not State.RUNNING for row in bench.records.rows.values())
        bench.clock.sleep(wait)


@FAMILIES
@given(
    st.lists(
        st.tuples(CALLS, st.sampled_from([*ALL, KILLED, RESET]), WAITS, st.booleans()), max_size=25
    ),
    EITHER,
)
def test_crashes_are_those_of_processes_that_died_and_end_the_key(in_records, steps, which):
    bench, died = Bench(in_records), 0
    for call_id, what, wait, repeat in steps:
        call = bench.call(
            call_id=call_id,
            runs=which,
            repeat=repeat,
            max_retries=2,
            max_failures=4,
            max_crashes=3,
        )
        bodies = len(bench.ran)
        delivered(bench, call, what)
        died += (what == KILLED or what in TERMINATED) and len(bench.ran) > bodies
        is_sound(bench)
        for row in bench.records.rows.values():
            assert row.crashes <= min(died, 3)
        bench.clock.sleep(wait)


@FAMILIES
@given(
    st.sampled_from(["cooldown", "retry", "ambiguous", "retry at once"]),
    st.integers(0, 3),
    st.integers(1, 4),
)
def test_a_failure_that_repeats_itself_comes_to_an_end(in_records, what, max_retries, max_failures):
    bench = Bench(in_records)
    call = bench.call(max_retries=max_retries, max_failures=max_failures, retention=60.0)
    for _ in range(30):
        bench.run(bench.again(call), ALL[what])
        bench.clock.sleep(bench.row.waits)
    quick = 0 if what in ("cooldown", "ambiguous") else max_retries
    assert bench.state is State.FAILED
    assert bench.row.failures == max_failures
    assert bench.row.attempt == len(bench.ran) == max_failures * (1 + quick)


@FAMILIES
def test_a_group_that_never_recovers_is_probed_once_for_each_closing(in_records: bool) -> None:
    bench = Bench(in_records)
    other = replace(KEY, key="invoice:7", stored="t:billing.send|invoice:7")
    calls = [bench.call(), bench.call(key=other, call_id=THEIRS)]
    for round_ in range(1, 9):
        bodies = len(bench.ran)
        for call in calls:
            bench.run(bench.again(call), ALL["group"])
        closed_group = bench.stores.groups.get(GROUP)
        assert closed_group is not None
        assert closed_group.in_a_row == round_
        assert len(bench.ran) == bodies + 1
        bench.clock.sleep(closed_group.closed_for)
    assert {row.failures for row in bench.records.rows.values()} == {0}
