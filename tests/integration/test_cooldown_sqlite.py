"""Cooldowns and groups over a SQLite file that eight processes write: with leases in it, and with
leases in Redis.
"""

from tests.integration.cooldowns import BUSY, COOLING, paid
from tests.integration.deployments import (
    RABBIT_REDIS_SQLITE,
    REDIS_DATABASE_SQLITE,
    Stage,
    got,
    stages,
    until,
)

module_stage = stages(
    REDIS_DATABASE_SQLITE,
    RABBIT_REDIS_SQLITE,
    home=COOLING,
    worker={"concurrency": 8, "log_level": "DEBUG"},
)
"""Eight children."""


def test_eight_failures_close_once_and_one_probe_opens(stage: Stage, name: str) -> None:
    gates, keys = [stage.gate(), stage.gate()], [f"{name}-{n}" for n in range(20)]
    script = [["when", str(gates[0]), *BUSY], ["when", str(gates[1]), "ok"]]

    def runs() -> int:
        return sum(len(paid(stage, key)) for key in keys)

    results = [stage.tasks.grouped.delay(key, script, name) for key in keys[:8]]
    until(lambda: runs() == 8, "eight bodies")
    gates[0].touch()
    stage.wait_for_log(f"cooldown group {name} is closed", "closing 1 in a row", 8)
    results += [stage.tasks.grouped.delay(key, script[1:], name) for key in keys[8:]]
    until(lambda: runs() == 9, "the probe")
    (found,) = [each for each in stage.client.groups() if each.group == name]
    assert (found.state, found.in_a_row) == ("probing", 1)
    so_far = len(stage.log(f"cooldown group {name} is cooling down"))
    stage.wait_for_log(f"cooldown group {name} is cooling down", "rescheduled", so_far + 19)
    assert runs() == 9
    gates[1].touch()
    assert [got(result)["name"] for result in results] == keys
    assert not [each for each in stage.client.groups() if each.group == name]
    assert runs() == 28
