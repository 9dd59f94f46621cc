"""A hard time limit that is shorter than what the library waits for: the body gets its time."""

from functools import partial
from typing import Any

import pytest
from celery.exceptions import TimeLimitExceeded
from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool

from celery_leases.testing.waits import wait_until
from tests.crash.conftest import MakeScene
from tests.crash.crash_deployments import Scene
from tests.integration.deployments import spelled
from tests.support.records import assert_has
from tests.support.servers import PostgresServer, RabbitServer

REDIS_LEASES = ("rabbit", "redis", "postgres")
DATABASE_LEASES = ("redis", "database", "postgres")
BOTH_LEASES = pytest.mark.parametrize("combination", [REDIS_LEASES, DATABASE_LEASES], ids=spelled)


@pytest.mark.parametrize("broker", ["rabbit", "redis"])
def test_calls_of_a_killed_worker_run_although_their_limit_is_as_short_as_the_wait_for_evidence(
    scene_factory: MakeScene, name: str, broker: str
) -> None:
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
    scene_factory: MakeScene, own_postgres: PostgresServer, name: str
) -> None:
    scene = scene_factory(
        urls={"postgres": own_postgres.new_database()}, visibility=30, concurrency=2
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


def make_slow(scene: Scene, when: str, seconds: float) -> None:
    """Let the database take *seconds* for writes of a record for which *when* holds."""
    engine = create_engine(scene.database_url, poolclass=NullPool)
    body = f"BEGIN IF {when} THEN PERFORM pg_sleep({seconds}); END IF; RETURN NEW; END"
    with engine.begin() as connection:
        connection.execute(
            text(f"CREATE FUNCTION slow() RETURNS trigger AS $$ {body} $$ LANGUAGE plpgsql")
        )
        connection.execute(
            text(
                "CREATE TRIGGER slow BEFORE INSERT OR UPDATE ON celery_leases_records "
                "FOR EACH ROW EXECUTE FUNCTION slow()"
            )
        )


@pytest.mark.both_lease_stores
@BOTH_LEASES
def test_a_body_that_begins_late_and_meets_its_limit_is_counted(
    scene_factory: MakeScene, name: str
) -> None:
    """Celery counts the limit from the delivery, so the body has had less than it."""
    scene = scene_factory(ttl=30, visibility=60)
    make_slow(scene, "TG_OP = 'INSERT' OR NEW.ended IN ('interrupted', 'terminated')", 1.0)
    with pytest.raises(TimeLimitExceeded):
        scene.tasks.limited.apply_async((name,), time_limit=3).get(timeout=30)
    wait_until(lambda: row_of(scene, "limited", name)["crashes"] == 1, 20, "the crash")
    row = row_of(scene, "limited", name)
    assert_has(row, state="pending", ended="terminated", reason="hard time limit")
    assert scene.tasks.limited.delay(name).get(timeout=30)["name"] == name


def row_of(scene: Scene, task: str, name: str) -> dict[str, Any]:
    return scene.row(task, f"{task}:{name}")


@pytest.mark.every_argument
@pytest.mark.parametrize("pool", ["prefork", "gevent"])
@pytest.mark.parametrize("combination", [DATABASE_LEASES], ids=spelled)
def test_a_limit_that_only_the_worker_knows_is_counted_as_one_of_the_task(
    scene_factory: MakeScene, name: str, pool: str
) -> None:
    scene = scene_factory(ttl=30, visibility=60, start=False)
    scene.another(pool=pool, concurrency=2, options=("--time-limit", "1"))
    for crashes in (1, 2):
        with pytest.raises(TimeLimitExceeded):
            scene.tasks.work.delay(name, 30).get(timeout=30)
        counted = partial(lambda number: row_of(scene, "work", name)["crashes"] == number, crashes)
        wait_until(counted, 20, f"crash {crashes}")
        row = row_of(scene, "work", name)
        assert (row["ended"], row["reason"]) == ("terminated", "hard time limit")


@pytest.mark.both_lease_stores
@BOTH_LEASES
def test_a_queued_call_that_its_limit_ends_before_its_lease_makes_room_for_the_next(
    scene_factory: MakeScene, name: str
) -> None:
    scene = scene_factory(ttl=30, visibility=60)
    with pytest.raises(TimeLimitExceeded):
        scene.tasks.prepared.apply_async((name, 30), time_limit=1).get(timeout=30)
    wait_until(
        lambda: (scene.find_row("prepared", f"prepared:{name}") or {})["ended"] == "terminated",
        20,
        "the call to be closed",
    )
    assert scene.tasks.prepared.delay(name).get(timeout=30) == {"name": name}


@pytest.mark.nightly  # two servers of its own
def test_a_broker_that_is_silent_too_keeps_the_call(
    scene_factory: MakeScene, own_postgres: PostgresServer, own_rabbit: RabbitServer, name: str
) -> None:
    urls = {"postgres": own_postgres.new_database(), "rabbit": own_rabbit.url}
    scene = scene_factory(REDIS_LEASES, urls=urls, visibility=60)
    scene.tasks.work.delay(f"{name}-first").get(timeout=30)
    own_postgres.pause()
    result = scene.tasks.work.apply_async((name,), time_limit=4)
    scene.wait_for_log(result.id, "received")
    own_rabbit.pause()
    scene.wait_for_log(result.id, "returned to the broker")
    own_postgres.resume()
    own_rabbit.resume()
    assert result.get(timeout=60)["name"] == name
    assert len(scene.events("begin", name=name)) == 1
