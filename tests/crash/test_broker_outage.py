"""RabbitMQ does not confirm while a delivery is to be rescheduled: the message survives."""

import pytest

from tests.crash.conftest import MakeScene
from tests.crash.crash_deployments import FAILING
from tests.support.servers import RabbitServer


@pytest.mark.parametrize("how", ["frozen", "killed"])
def test_a_reschedule_that_is_not_confirmed_loses_no_message(
    scene_factory: MakeScene, own_rabbit: RabbitServer, name: str, how: str
) -> None:
    scene = scene_factory(
        ("rabbit", "redis", "postgres"),
        urls={"rabbit": own_rabbit.url},
        concurrency=2,
        module=FAILING,
        start=False,
    )
    # What a broker has not confirmed may be lost with it, and Celery does not ask unless it is told
    # to.
    scene.app.conf.broker_transport_options = {"confirm_publish": True}
    go = scene.gate()
    scene.another(
        env={"PREFETCH": "2", "FAILPOINT_GATE": str(go), **scene.failpoint("slow rescheduled")}
    )
    gate, result = scene.hold("work", name)
    duplicate = scene.tasks.work.delay(name, gate=str(gate))
    scene.wait_until_failed("slow rescheduled")
    own_rabbit.pause() if how == "frozen" else own_rabbit.kill()
    go.touch()
    scene.wait_for_log(duplicate.id, "could not be rescheduled", timeout=40)
    own_rabbit.resume() if how == "frozen" else own_rabbit.start()
    gate.touch()
    assert duplicate.get(timeout=60) == result.get(timeout=60)
    assert len(scene.events("begin", name=name)) == 1
    scene.done_once("work", name)
