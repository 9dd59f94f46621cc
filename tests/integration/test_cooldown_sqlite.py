"""Cooldowns and groups over a SQLite file that eight processes write: with leases in it, and with
leases in Redis.
"""

from collections.abc import Iterator

import pytest

from celery_leases.testing.waits import wait_until
from tests.integration.conftest import DeploymentFactory
from tests.integration.cooldowns import (
    BUSY,
    COOLING,
    OK,
    assert_sound,
    cooled,
    limited,
    paid,
    refusal,
)
from tests.integration.deployments import (
    PATIENCE,
    RABBIT_REDIS_SQLITE,
    REDIS_DATABASE_SQLITE,
    Deployment,
    spelled,
)


@pytest.fixture(scope="module", params=[REDIS_DATABASE_SQLITE, RABBIT_REDIS_SQLITE], ids=spelled)
def module_stage(
    request: pytest.FixtureRequest, stage_factory: DeploymentFactory
) -> Iterator[Deployment]:
    """Eight children; at the end nothing may be left in the queue."""
    worker = {"concurrency": 8, "log_level": "DEBUG"}
    made = stage_factory(request.param, home=COOLING, worker=worker)
    yield made
    made.close_when_drained(request.session)


def test_a_limited_call_resumes_and_presses_are_refused(stage: Deployment, name: str) -> None:
    script = [limited(3), OK]
    first = stage.tasks.resumes.delay(name, script)
    row = cooled(stage, "resumes", name)
    presses = [stage.tasks.resumes.delay(name, script) for _ in range(10)]
    assert {refusal(press).reason for press in presses} == {"rate_limited"}
    assert first.get(timeout=PATIENCE) == {"name": name, "paid": 2}
    assert paid(stage, name)[1]["wall"] >= row["retry_at"] / 1e6
    assert_sound(stage, "resumes", name)


def test_eight_failures_close_once_and_one_probe_opens(stage: Deployment, name: str) -> None:
    gates, keys = [stage.gate(), stage.gate()], [f"{name}-{n}" for n in range(20)]
    script = [["when", str(gates[0]), *BUSY], ["when", str(gates[1]), "ok"]]

    def runs() -> int:
        return sum(len(paid(stage, key)) for key in keys)

    results = [stage.tasks.grouped.delay(key, script, name) for key in keys[:8]]
    wait_until(lambda: runs() == 8, PATIENCE, "eight bodies")
    gates[0].touch()
    stage.wait_for_log(f"cooldown group {name} is closed", "trip 1 in a row", 8)
    results += [stage.tasks.grouped.delay(key, script[1:], name) for key in keys[8:]]
    wait_until(lambda: runs() == 9, PATIENCE, "the probe")
    (gate,) = [gate for gate in stage.client.groups() if gate.group == name]
    assert (gate.state, gate.trips) == ("probing", 1)
    so_far = len(stage.log(f"cooldown group {name} is cooling down"))
    stage.wait_for_log(f"cooldown group {name} is cooling down", "rescheduled", so_far + 19)
    assert runs() == 9
    gates[1].touch()
    assert [result.get(timeout=PATIENCE)["name"] for result in results] == keys
    assert not [gate for gate in stage.client.groups() if gate.group == name]
    assert runs() == 28
