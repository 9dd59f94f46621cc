"""Cooldown groups under real workers: one state for all keys of a dependency, one probe, and what
it spares.
"""

import time
from collections.abc import Iterator

import pytest

from celery_leases.client import GroupStatus
from celery_leases.testing.waits import wait_until
from tests.integration.conftest import MakeStage
from tests.integration.cooldowns import (
    BROKEN,
    BUSY,
    COOLING,
    OK,
    assert_sound,
    paid,
    refusal,
    status,
)
from tests.integration.deployments import BOTH_WAYS, Stage, got, spelled, until
from tests.integration.rate_limited_server import Limiter
from tests.support.records import assert_has


@pytest.fixture(scope="module", params=BOTH_WAYS, ids=spelled)
def module_stage(request: pytest.FixtureRequest, stage_factory: MakeStage) -> Iterator[Stage]:
    """Two workers with four children each; at the end nothing may be left in the queue."""
    # A wait that goes on is logged for debugging only.
    made = stage_factory(request.param, home=COOLING, worker={"log_level": "DEBUG"})
    second = made.new_worker(log_level="DEBUG").start()
    yield made
    try:
        if not request.session.testsfailed:
            made.wait_until_drained()
    finally:
        second.teardown()
        made.close()


@pytest.fixture
def group(name: str) -> str:
    return f"model-{name}"


def closed_group_of(stage: Stage, group: str) -> GroupStatus | None:
    """The group if it is not open."""
    return next((each for each in stage.client.groups() if each.group == group), None)


def log_of_both(stage: Stage, about: str = "") -> list[str]:
    """The lines of both workers' logs in which *about* occurs, oldest first."""
    logs = "\n".join(
        log.read_text(errors="replace") for log in stage.directory.glob("worker-*.log")
    )
    return sorted(line for line in logs.splitlines() if about in line)


def wait_for_lines(stage: Stage, about: str, number: int) -> list[str]:
    """Those lines once there are so many of them."""
    until(lambda: len(log_of_both(stage, about)) >= number, f"{number} lines with {about!r}")
    return log_of_both(stage, about)


@pytest.mark.nightly
def test_keys_in_a_group_waste_less_than_a_tenth_of_the_calls(stage: Stage, name: str) -> None:
    """Alone, they use up the limit of each other."""
    keys = 60 if stage.lease_store == "database" else 200
    with Limiter(25, 1.5, stage.directory / f"{name}-together") as limiter:
        began = time.monotonic()
        results = [stage.tasks.asks_together.delay(f"{name}-{n}", limiter.url) for n in range(keys)]
        assert [result.get(timeout=80) for result in results] == [
            f"{name}-{n}" for n in range(keys)
        ]
        together, took = limiter.counts, time.monotonic() - began
    assert together["accepted"] == keys
    assert together["rejected"] < keys / 2
    print(f"together: {together} in {took:.1f} s")

    with Limiter(25, 1.5, stage.directory / f"{name}-alone") as limiter:
        began = time.monotonic()
        results = [stage.tasks.asks.delay(f"{name}-{n}", limiter.url) for n in range(keys)]
        enough = 10 * max(together["rejected"], 1) + 1
        wait_until(lambda: limiter.counts["rejected"] >= enough, 80, f"{enough} rejected calls")
        alone, took = limiter.counts, time.monotonic() - began
        assert alone["accepted"] < keys
        limiter.lift()
        assert [result.get(timeout=80) for result in results] == [
            f"{name}-{n}" for n in range(keys)
        ]
        assert limiter.counts["accepted"] == keys
    print(f"alone: {alone} after {took:.1f} s")


def test_one_closing_is_one_however_many_fail(stage: Stage, name: str, group: str) -> None:
    gate = stage.gate()
    script = [["when", str(gate), *BUSY], OK]
    results = [
        stage.tasks.grouped.delay(f"{name}-{n}", script, group) for n in range(4)
    ]  # one worker may get them all
    until(lambda: sum(len(paid(stage, f"{name}-{n}")) for n in range(4)) == 4, "four bodies")
    gate.touch()
    lines = wait_for_lines(stage, f"cooldown group {group} is closed", 4)
    assert all("closing 1 in a row" in line for line in lines), lines
    assert [got(result)["paid"] for result in results] == [2] * 4
    assert closed_group_of(stage, group) is None


def test_one_of_many_probes_and_lets_the_others_in(stage: Stage, name: str, group: str) -> None:
    stage.client.close_group(group, 1.5, "overloaded")
    gate, keys = stage.gate(), [f"{name}-{n}" for n in range(20)]
    results = [stage.tasks.grouped.delay(key, [["when", str(gate), "ok"]], group) for key in keys]
    until(lambda: any(paid(stage, key) for key in keys), "the probe")
    shown = closed_group_of(stage, group)
    assert shown is not None
    assert (shown.state, shown.reason) == ("probing", "asked")
    so_far = len(log_of_both(stage, f"cooldown group {group} is cooling down"))
    wait_for_lines(stage, f"cooldown group {group} is cooling down", so_far + 20)
    assert sum(len(paid(stage, key)) for key in keys) == 1
    gate.touch()
    assert [got(result) for result in results] == [{"name": key, "paid": 1} for key in keys]
    assert closed_group_of(stage, group) is None
    for key in keys:
        row = stage.row("grouped", f"grouped:{key}")
        assert_has(row, attempt=1, failures=0, quick_retries=0, cooldowns=0)


def test_a_failed_probe_closes_its_group_for_longer(stage: Stage, name: str, group: str) -> None:
    result = stage.tasks.grouped.delay(name, [BUSY, BUSY, OK], group)
    first, second = wait_for_lines(stage, f"cooldown group {group} is closed", 2)[:2]
    assert "closed for 1.5 s by rule busy: closing 1 in a row" in first
    assert "closed for 3.0 s by rule busy: closing 2 in a row" in second
    shown = status(stage, "grouped", name)
    assert (shown.state, shown.scope, shown.group, shown.failures) == ("cooling", "group", group, 0)
    assert got(result) == {"name": name, "paid": 3}
    runs = paid(stage, name)
    assert runs[1]["t"] - runs[0]["t"] >= 1.5
    assert runs[2]["t"] - runs[1]["t"] >= 3.0
    assert len(log_of_both(stage, f"cooldown group {group} is open again")) == 1
    assert closed_group_of(stage, group) is None


def test_a_probe_that_fails_otherwise_opens_its_group(stage: Stage, name: str, group: str) -> None:
    stage.client.close_group(group, 1.0)
    stage.tasks.grouped.delay(name, [BROKEN, OK], group)
    wait_for_lines(stage, f"cooldown group {group} is open again", 1)
    assert got(stage.tasks.grouped.delay(f"{name}-other", [OK], group))["paid"] == 1
    shown = status(stage, "grouped", name)
    assert (shown.state, shown.scope, shown.failures) == ("cooling", "key", 1)
    stage.wait_for_state("grouped", f"grouped:{name}", "done")


@pytest.mark.parametrize("word", ["later", "snooze"])
def test_a_rescheduled_probe_opens_nothing(stage: Stage, name: str, group: str, word: str) -> None:
    stage.client.close_group(group, 1.0)
    gates = [stage.gate(), stage.gate()]
    script = [["when", str(gates[0]), word, 0.2], ["when", str(gates[1]), "ok"]]
    result = stage.tasks.grouped.delay(name, script, group)
    for number, gate in enumerate(gates, 1):
        stage.wait_for("paid", number, name=name)
        shown = closed_group_of(stage, group)
        assert shown is not None
        assert (shown.state, shown.in_a_row) == ("probing", 1)
        gate.touch()
    assert got(result) == {"name": name, "paid": 2}
    until(lambda: closed_group_of(stage, group) is None, "the group to open")


def test_an_ambiguous_probe_leaves_the_group_due_for_a_probe(
    stage: Stage, name: str, group: str
) -> None:
    stage.client.close_group(group, 1.0)
    with pytest.raises(TimeoutError):
        got(stage.tasks.visits.delay(name, [["read timeout"]], group))
    shown = closed_group_of(stage, group)
    assert shown is not None
    assert (shown.state, shown.in_a_row) == ("probe_due", 1)
    assert got(stage.tasks.visits.delay(f"{name}-next", [OK], group))["paid"] == 1
    until(lambda: closed_group_of(stage, group) is None, "the group to open")


def test_an_operator_closes_and_opens_a_group(stage: Stage, name: str, group: str) -> None:
    gate = stage.gate()
    running = stage.tasks.gated.delay(name, [["when", str(gate), "ok"]], group)
    stage.wait_for("paid", name=name)
    closed = stage.client.close_group(group, 60, "maintenance")
    assert (closed.state, closed.in_a_row, closed.error) == ("closed", 1, "maintenance")
    assert stage.client.close_group(group, 5).retry_after == pytest.approx(60, abs=10), "never cut"
    refusal(stage.tasks.gated.delay(f"{name}-next", [OK], group))
    gate.touch()
    assert got(running) == {"name": name, "paid": 1}
    assert closed_group_of(stage, group) is not None, "only a probe's success opens it"
    assert stage.client.open_group(group)
    assert got(stage.tasks.gated.delay(f"{name}-next", [OK], group))["paid"] == 1
    assert not stage.client.open_group(group)
    assert_sound(stage, "gated", name, logs=log_of_both(stage))
