"""A hard time limit that is shorter than what the library waits for: the body gets its time."""

import pytest

from tests.crash.conftest import CrashDeploymentFactory
from tests.integration.deployments import spelled
from tests.support.servers import PostgresServer

REDIS_LEASES = ("rabbit", "redis", "postgres")
DATABASE_LEASES = ("redis", "database", "postgres")
BOTH_LEASES = pytest.mark.parametrize("combination", [REDIS_LEASES, DATABASE_LEASES], ids=spelled)


@pytest.mark.parametrize("broker", ["rabbit", "redis"])
def test_calls_of_a_killed_worker_run_although_their_limit_is_as_short_as_the_wait_for_evidence(
    scene_factory: CrashDeploymentFactory, name: str, broker: str
) -> None:
    """With database leases the next worker must first see the database answer for a while."""
    scene = scene_factory((broker, "database", "postgres"), ttl=3, visibility=4, concurrency=5)
    names = [f"{name}{number}" for number in range(5)]
    gate = scene.gate()
    results = [
        scene.tasks.work.apply_async((each,), {"gate": str(gate)}, time_limit=3) for each in names
    ]
    for each in names:
        scene.wait_for("begin", name=each)
    scene.kill_worker()
    gate.touch()
    scene.another()
    for each, result in zip(names, results, strict=True):
        assert result.get(timeout=60)["name"] == each
        assert len(scene.events("begin", name=each)) == 2
        assert scene.done_once("work", each, crashes=1)["attempt"] == 2


@pytest.mark.both_lease_stores
@BOTH_LEASES
def test_a_database_that_is_silent_for_longer_than_the_limit_ends_no_call(
    scene_factory: CrashDeploymentFactory,
    own_postgres: PostgresServer,
    name: str,
    combination: tuple[str, ...],
) -> None:
    """Each delivery is rescheduled before Celery kills it; afterwards each call runs once."""
    scene = scene_factory(
        combination, urls={"postgres": own_postgres.new_database()}, visibility=30, concurrency=2
    )
    scene.tasks.work.delay(f"{name}-first").get(timeout=30)  # the connections are open
    own_postgres.pause()
    names = [f"{name}{number}" for number in range(4)]
    results = [scene.tasks.work.apply_async((each,), time_limit=4) for each in names]
    for each in names:
        scene.wait_for_log(each, "rescheduled")
    own_postgres.resume()
    for each, result in zip(names, results, strict=True):
        assert result.get(timeout=60)["name"] == each
        assert len(scene.events("begin", name=each)) == 1
