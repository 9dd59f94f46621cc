"""Cooldowns beside what Celery's users do: its own retries and control flow, limits, canvas, eager
and direct calls.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from celery import chain
from celery.exceptions import SoftTimeLimitExceeded

from celery_leases import Cooldown, CoolingDown, LeaseStatus, PermanentFailure, RetryLater, Snooze
from celery_leases.worker.processes import close_all
from tests.integration.cooldowns import (
    BROKEN,
    COOLING,
    OK,
    assert_sound,
    cooled,
    lasted,
    limited,
    paid,
    refusal,
    status,
)
from tests.integration.deployments import (
    BOTH_WAYS,
    Stage,
    got,
    imported_anew,
    stages,
    until,
)
from tests.integration.event_watcher import Watcher
from tests.integration.rate_limited_server import Answered

module_stage = stages(*BOTH_WAYS, home=COOLING)


def test_only_the_users_own_retries_are_counted_by_celery(stage: Stage, name: str) -> None:
    result = stage.tasks.resumes.delay(name, [["retry", 0.2], limited(1.2), ["retry", 0.2], OK])
    assert got(result) == {"name": name, "paid": 4}
    runs = paid(stage, name)
    assert [(run["id"], run["retries"]) for run in runs] == [
        (result.id, retries) for retries in (0, 1, 1, 2)
    ]
    assert [run["previous"] and run["previous"]["ended"] for run in runs] == [
        None,
        "retried",
        "failed",
        "retried",
    ]
    assert_sound(stage, "resumes", name)


def test_the_rules_meet_the_original_error_after_autoretry(stage: Stage, name: str) -> None:
    first = stage.tasks.auto.delay(name, [limited(60)])
    row = cooled(stage, "auto", name)
    assert [run["retries"] for run in paid(stage, name)] == [0, 1, 2]
    assert (row["reason"], row["call_id"], row["resumes"]) == ("rate_limited", first.id, 0)
    assert 60 <= lasted(row) <= 66
    with pytest.raises(Answered):
        got(first)
    assert refusal(stage.tasks.auto.delay(name, [limited(60)])).rule == "rate-limited"


@pytest.mark.parametrize(
    ("how", "state", "ended"), [("ignore", "done", "ignored"), ("reject", "pending", "rejected")]
)
def test_ignore_and_reject_mean_after_a_cooldown_what_they_mean_without(
    stage: Stage, name: str, how: str, state: str, ended: str
) -> None:
    stage.tasks.resumes.delay(name, [limited(1.2), [how]])
    until(lambda: len(paid(stage, name)) == 2, "the second body")
    row = stage.wait_for_state("resumes", f"resumes:{name}", state)
    assert (row["ended"], row["result"], row["retry_at"]) == (ended, None, None)
    assert len(paid(stage, name)) == 2


def test_a_soft_limit_in_the_body_cools_the_key_as_ambiguous(stage: Stage, name: str) -> None:
    script = [["sleep", 30], OK]
    with pytest.raises(SoftTimeLimitExceeded):
        got(stage.tasks.limited.delay(name, script))
    assert not _ends_as_ambiguous(stage, "limited", name, "SoftTimeLimitExceeded").resumes
    assert got(stage.tasks.limited.delay(name, script)) == {"name": name, "paid": 2}
    _was_ambiguous(stage, name)


def test_a_body_without_memory_cools_as_ambiguous(stage: Stage, name: str) -> None:
    """A ``MemoryError`` in the main process would end it."""
    script = [["raise", "MemoryError"], OK]
    stage.tasks.resumes.delay(name, script)
    let_go = _ends_as_ambiguous(stage, "resumes", name, "MemoryError")
    assert let_go.resumes, "its copy comes when the 15 s are over, and is answered with the result"
    assert got(stage.tasks.resumes.delay(name, script)) == {"name": name, "paid": 2}
    _was_ambiguous(stage, name)


def _ends_as_ambiguous(stage: Stage, task: str, name: str, error: str) -> LeaseStatus:
    assert lasted(cooled(stage, task, name)) == pytest.approx(15.0, abs=0.01)
    shown = status(stage, task, name)
    assert shown.error is not None
    assert (shown.reason, shown.rule, shown.error.ambiguous) == (
        "limit_hit",
        "time-or-memory-limit",
        True,
    )
    assert shown.error.type.endswith(error)
    return stage.client.retry(f"{task}:{name}", task=f"{COOLING}.{task}")


def _was_ambiguous(stage: Stage, name: str) -> None:
    error = paid(stage, name)[1]["previous"]["error"]
    assert (error["rule"], error["ambiguous"]) == ("time-or-memory-limit", True)


def test_a_read_timeout_is_retried_where_that_is_harmless(stage: Stage, name: str) -> None:
    script = [["read timeout"], OK]
    result = stage.tasks.repeatable.delay(name, script)
    assert got(result) == {"name": name, "paid": 2}
    assert_sound(stage, "repeatable", name)

    other = f"{name}-other"
    with pytest.raises(TimeoutError):
        got(stage.tasks.stops.delay(other, script))
    assert 30 <= lasted(cooled(stage, "stops", other)) <= 60
    shown = status(stage, "stops", other)
    assert shown.error is not None
    assert (shown.rule, shown.error.ambiguous) == ("outcome-unknown", True)


@pytest.mark.parametrize("task", ["resumes", "ignores"])
def test_a_step_of_a_chain_waits_for_anothers_cooldown(stage: Stage, name: str, task: str) -> None:
    leased, script = getattr(stage.tasks, task), [limited(1.8), OK]
    first = leased.delay(name, script)
    cooled(stage, task, name)
    outcome = chain(leased.si(name, script), stage.tasks.plain.s())()
    stage.wait_for_log(outcome.parent.id, "Retry available in")
    assert got(outcome) == got(first) == {"name": name, "paid": 2}
    assert len(stage.events("plain", id=outcome.id)) == 1
    assert_sound(stage, task, name)


def test_a_chain_fails_where_a_cooldown_is_to_fail_it(stage: Stage, name: str) -> None:
    script = [limited(2.5), OK]
    first = stage.tasks.refuses.delay(name, script)
    cooled(stage, "refuses", name)
    outcome = chain(stage.tasks.refuses.si(name, script), stage.tasks.plain.s())()
    refusal(outcome)
    assert not stage.events("plain", id=outcome.id)
    assert got(first) == {"name": name, "paid": 2}


def test_a_plain_call_is_dropped_where_it_is_to_ignore(stage: Stage, name: str) -> None:
    script = [limited(1.8), OK]
    first = stage.tasks.ignores.delay(name, script)
    cooled(stage, "ignores", name)
    other = stage.tasks.ignores.delay(name, script)
    stage.wait_for_log(other.id, "dropped: Retry available in")
    assert got(first) == {"name": name, "paid": 2}
    assert other.state == "PENDING"


def test_without_events_none_are_published(stage: Stage, name: str) -> None:
    watcher = Watcher(stage)
    try:
        call = stage.tasks.resumes.delay(name, [limited(1.2), OK])
        assert got(call) == {"name": name, "paid": 2}
        with stage.app.events.default_dispatcher() as dispatcher:
            dispatcher.send("task-mark", uuid="mark")
        watcher.wait_for("task-mark", "mark")
        assert not watcher.of(call.id)
    finally:
        watcher.close()


@pytest.fixture
def eager(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The tasks under an app of their own, whose bodies run in this process."""
    monkeypatch.setenv("JOURNAL", str(stage.journal))
    tasks = imported_anew(COOLING, stage.env)
    tasks.app.conf.broker_url = stage.broker_url
    yield tasks
    close_all()
    stage.app.set_current()


@pytest.mark.parametrize("step", [limited(60), BROKEN], ids=["limited", "broken"])
def test_an_eager_call_gets_its_original_error_and_the_next_one_is_refused(
    stage: Stage, name: str, eager: Any, step: list[Any]
) -> None:
    with pytest.raises((Answered, KeyError)):
        eager.slow.apply(args=(name, [step, OK])).get()
    with pytest.raises(CoolingDown) as told:
        eager.slow.apply(args=(name, [step, OK])).get()
    assert told.value.retry_after > 0
    assert len(paid(stage, name)) == 1
    assert stage.find_row("slow", f"slow:{name}") is None


@pytest.mark.parametrize(
    "step", [["cooldown", 60, "draft not ready"], ["later", 60], ["snooze", 60]]
)
def test_an_eager_call_that_asks_to_wait_returns_the_time_to_its_caller(
    stage: Stage, name: str, eager: Any, step: list[Any]
) -> None:
    with pytest.raises(CoolingDown, match="Retry available in 60 seconds") as told:
        eager.resumes.apply(args=(name, [step])).get()
    assert told.value.retry_after == pytest.approx(60, abs=0.5)


def test_a_direct_call_raises_what_the_body_raises(stage: Stage, name: str, eager: Any) -> None:
    for step, error in (
        (["cooldown", 60, "draft not ready"], Cooldown),
        (["later", 60], RetryLater),
        (["snooze", 60], Snooze),
        (["permanent", "unknown"], PermanentFailure),
        (limited(60), Answered),
    ):
        with pytest.raises(error):
            eager.resumes(f"{name}-{step[0]}", [step])
    assert [run["held"] for run in stage.events("paid") if run["name"].startswith(name)] == [
        False
    ] * 5
    assert stage.find_row("resumes", f"resumes:{name}-later") is None
