"""``lease_runs``, ``lease_on_busy`` and ``lease_on_done`` from real workers."""

from tests.integration.deployments import Stage, got


def test_ignore_drops_other_calls_of_a_held_or_done_key(stage: Stage, name: str) -> None:
    gate, first = stage.hold("ignores", name)
    early = stage.tasks.ignores.delay(name, gate=str(gate))
    stage.wait_for_log(early.id, "dropped: another call holds the key")
    gate.touch()
    assert got(first)["name"] == name
    late = stage.tasks.ignores.delay(name, gate=str(gate))
    stage.wait_for_log(late.id, "dropped: another call has done it")
    stage.wait_until_drained()
    assert {early.state, late.state} == {"PENDING"}
    assert len(stage.events("begin", name=name)) == 1
