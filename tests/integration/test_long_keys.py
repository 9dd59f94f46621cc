"""A key of 20,000 ids: the headers of an AMQP message must fit in a frame of 128 KB, and log lines
must stay short.
"""

from tests.integration.deployments import (
    RABBIT_DATABASE_POSTGRES,
    RABBIT_REDIS_MARIADB,
    Stage,
    got,
    stages,
)

IDS = list(range(100_000, 120_000))


module_stage = stages(RABBIT_DATABASE_POSTGRES, RABBIT_REDIS_MARIADB, drained=False)
"""A worker that consumes from RabbitMQ."""


def test_a_call_with_a_long_key_is_retried_and_rescheduled(stage: Stage, name: str) -> None:
    gate = stage.gate()
    first = stage.send("exports", name, IDS, str(gate))
    stage.wait_for("begin", 2, name=name)
    second = stage.send("exports", name, IDS, str(gate))
    stage.wait_for_log(second.id, "rescheduled in")
    gate.touch()
    assert (got(first), got(second)) == (len(IDS), len(IDS))
    lengths = {event["length"] for event in stage.events("begin", name=name)}
    assert [event["id"] for event in stage.events("begin", name=name)] == [first.id] * 2
    assert lengths.pop() > 140_000
    lines = [line for line in stage.log(first.id) + stage.log(second.id) if " key exports:" in line]
    assert lines
    assert max(map(len, lines)) < 1_000
