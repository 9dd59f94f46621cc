"""Cooldowns and groups while workers die or freeze and stores are down.

No call runs early or is lost, and no failure is counted twice.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from sqlalchemy.exc import OperationalError

from celery_leases.testing.waits import wait_until
from tests.crash.conftest import MakeScene
from tests.crash.crash_deployments import Scene
from tests.integration.cooldowns import (
    BROKEN,
    BUSY,
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
from tests.integration.deployments import BOTH_WAYS, got, spelled, until
from tests.support.servers import PostgresServer, RedisServer

BOTH = pytest.mark.parametrize("combination", BOTH_WAYS, ids=spelled)
ELSEWHERE = ("rabbit", "redis", "postgres")
"""Only the leases are in Redis."""
STEPS = (
    "before settle",
    "after settle",
    "after cool",
    "before publish",
    "after publish",
    "after rescheduled",
)


def second_run(scene: Scene, name: str) -> dict[str, object]:
    return scene.wait_for("paid", 2, name=name)[1]


@pytest.mark.both_lease_stores
@BOTH
def test_a_worker_killed_at_any_step_around_a_failure_counts_it_once_and_loses_no_call(
    scene_factory: MakeScene, tmp_path: Path, name: str, combination: tuple[str, ...]
) -> None:
    """A crash before the outcome is written, a failure after it, never both."""
    about = {step: f"resumes:{_named(name, step)}" for step in STEPS}
    scene = _stopping(scene_factory, tmp_path, combination, about)
    gate = scene.gate()
    script = [BROKEN, ["when", str(gate), "ok"]]
    results = {step: scene.tasks.resumes.delay(_named(name, step), script) for step in STEPS}
    for step in STEPS:
        scene.wait_for("failpoint", step=step, about=about[step])
    scene.kill_worker()
    rows = {step: scene.row("resumes", about[step]) for step in STEPS}
    scene.another()
    for step in STEPS:
        run, written = second_run(scene, _named(name, step)), step != "before settle"
        row, before = scene.find_row("resumes", about[step]), rows[step]
        assert row is not None
        assert before is not None
        assert before["state"] == ("cooling" if written else "running"), step
        assert (row["failures"], row["crashes"]) == ((1, 0) if written else (0, 1)), step
        assert run["previous"]["ended"] == ("failed" if written else "abandoned"), step  # type: ignore[index]
        assert not written or run["wall"] >= before["retry_at"] / 1e6, step
    gate.touch()
    for step, result in results.items():
        assert got(result) == {"name": _named(name, step), "paid": 2}, step
    scene.wait_until_drained()
    assert [len(paid(scene, _named(name, step))) for step in STEPS] == [2] * len(STEPS)


@BOTH
def test_a_worker_killed_after_it_closed_a_group_leaves_it_closed(
    scene_factory: MakeScene, tmp_path: Path, name: str, combination: tuple[str, ...]
) -> None:
    scene = _stopping(scene_factory, tmp_path, combination, {"after close": name})
    result = scene.tasks.grouped.delay(name, [BUSY, OK], name)
    scene.wait_for("failpoint", step="after close", about=name)
    (found,) = scene.client.groups()
    assert (found.group, found.in_a_row, found.reason) == (name, 1, "error")
    scene.kill_worker()
    scene.another()
    assert got(result) == {"name": name, "paid": 2}
    first, second = paid(scene, name)
    assert second["previous"]["ended"] == "abandoned"
    assert second["wall"] - first["wall"] >= 1.5
    assert not scene.client.groups()


def _stopping(
    scene_factory: MakeScene, points: Path, combination: tuple[str, ...], about: dict[str, str]
) -> Scene:
    """A worker with a child for each call; *about* is the key or group that stops at each step."""
    for step, what in about.items():
        (points / f"{step} {what}").touch()
    return scene_factory(
        combination,
        visibility=4,
        home=COOLING,
        module=f"{COOLING}_failpoints",
        concurrency=len(about),
        env={"FAILPOINTS": str(points)},
    )


def _named(name: str, step: str) -> str:
    return f"{name}-{step.replace(' ', '-')}"


def test_a_lease_store_that_comes_back_empty_changes_no_cooldown(
    scene_factory: MakeScene, own_redis: RedisServer, name: str
) -> None:
    scene = scene_factory(ELSEWHERE, home=COOLING, env={"LEASES_URL": own_redis.url})
    first = scene.tasks.resumes.delay(name, [limited(5), OK])
    row = cooled(scene, "resumes", name)
    own_redis.kill()
    own_redis.start()
    told = refusal(scene.tasks.resumes.delay(name, [limited(5), OK]))
    assert told.reason == "rate_limited"
    assert told.retry_at == pytest.approx(row["retry_at"] / 1e6, abs=0.5)
    assert status(scene, "resumes", name).state == "cooling"
    assert got(first) == {"name": name, "paid": 2}
    assert_sound(scene, "resumes", name, logs=[scene.logs()])


def test_a_lease_store_that_dies_before_the_cooldown_is_set_there_changes_nothing_either(
    scene_factory: MakeScene, own_redis: RedisServer, name: str
) -> None:
    scene = scene_factory(ELSEWHERE, ttl=3, home=COOLING, env={"LEASES_URL": own_redis.url})
    gate = scene.gate()
    script = [["when", str(gate), *limited(4)], OK]
    first = scene.tasks.resumes.delay(name, script)
    scene.wait_for("paid", name=name)
    own_redis.kill()
    gate.touch()
    cooled(scene, "resumes", name)
    scene.wait_for_log(first.id, "rescheduled in")
    own_redis.start()
    refusal(scene.tasks.resumes.delay(name, script))
    assert got(first) == {"name": name, "paid": 2}
    assert_sound(scene, "resumes", name, logs=[scene.logs()])


def answers(scene: Scene, name: str) -> bool:
    with suppress(OperationalError):
        return scene.find_row("resumes", f"resumes:{name}") is not None
    return False


@BOTH
def test_a_cooldown_is_written_when_the_database_is_back(
    scene_factory: MakeScene, own_postgres: PostgresServer, name: str
) -> None:
    scene = scene_factory(
        urls={"postgres": own_postgres.new_database()}, visibility=20, home=COOLING
    )
    gate = scene.gate()
    result = scene.tasks.resumes.delay(name, [["when", str(gate), *BROKEN], OK])
    scene.wait_for("paid", name=name)
    own_postgres.kill()
    gate.touch()
    away = time.monotonic()
    wait_until(lambda: time.monotonic() - away > 1.0, 10, "an outage of a second")
    with ThreadPoolExecutor(1) as servant:
        starting = servant.submit(own_postgres.start)
        until(
            lambda: answers(scene, name), "the database"
        )  # it may serve long before start() knows
        row = cooled(scene, "resumes", name)
        starting.result()
    assert (row["failures"], row["crashes"], row["resumes"]) == (1, 0, 1)
    assert lasted(row) == pytest.approx(3.0, abs=0.01)
    assert got(result) == {"name": name, "paid": 2}
    assert_sound(scene, "resumes", name, logs=[scene.logs()])


def test_a_cooldown_that_could_not_be_written_in_time_is_neither_crash_nor_failure(
    scene_factory: MakeScene, own_postgres: PostgresServer, name: str
) -> None:
    scene = scene_factory(
        ELSEWHERE,
        urls={"postgres": own_postgres.new_database()},
        home=COOLING,
        env={"SETTLE_TIMEOUT": "1.5"},
    )
    gate = scene.gate()
    result = scene.tasks.resumes.delay(name, [["when", str(gate), *BROKEN], OK])
    scene.wait_for("paid", name=name)
    own_postgres.kill()
    gate.touch()
    scene.wait_for_log(result.id, "the outcome could not be written")
    own_postgres.start()
    assert got(result) == {"name": name, "paid": 2}
    assert second_run(scene, name)["previous"]["ended"] == "lost"  # type: ignore[index]
    row = scene.row("resumes", f"resumes:{name}")
    assert (row["failures"], row["crashes"], row["attempt"]) == (0, 0, 2)
    assert not [
        line for line in scene.log(f"key resumes:{name}") if "without reporting an outcome" in line
    ]


@pytest.mark.both_lease_stores
@BOTH
def test_a_redelivered_copy_of_a_cooling_call_neither_runs_early_nor_is_lost(
    scene_factory: MakeScene, name: str
) -> None:
    scene = scene_factory(visibility=2, home=COOLING, concurrency=2)
    other = scene.another(queue=scene.side_queue())  # ready before the cooldown begins
    script, side = [limited(5), OK], scene.side_queue()
    call = scene.tasks.resumes.delay(name, script)
    row = cooled(scene, "resumes", name)
    scene.send("resumes", name, script, task_id=call.id, queue=side)
    scene.redeliver(side)
    scene.wait_for_log(call.id, "rescheduled in", 2)
    scene.consume(scene.queue, other)
    scene.worker.pause()
    if scene.broker == "redis":  # RabbitMQ leaves its messages to a worker whose connection lives
        wait_until(lambda: call.id in other.full_log(), 20, "a copy at the other worker")
    scene.worker.resume()
    assert got(call) == {"name": name, "paid": 2}
    scene.wait_until_drained()
    runs = paid(scene, name)
    assert [run["id"] for run in runs] == [call.id] * 2
    assert runs[1]["wall"] >= row["retry_at"] / 1e6
    assert_sound(scene, "resumes", name, logs=[scene.logs()])


@BOTH
def test_a_group_whose_probe_is_killed_is_opened_by_the_next_one(
    scene_factory: MakeScene, name: str
) -> None:
    scene = scene_factory(visibility=3, home=COOLING, concurrency=4, start=False)
    scene.worker.launch()
    other = scene.new_worker()
    scene.workers.append(other)
    other.launch()
    scene.worker.wait_ready()
    other.wait_ready()
    scene.client.close_group(name, 1.0)
    gate, keys = scene.gate(), [f"{name}-{n}" for n in range(8)]
    results = [scene.tasks.grouped.delay(key, [["when", str(gate), "ok"]], name) for key in keys]

    (probe,) = _runs(scene, keys, 1)
    killed = scene.worker if probe["pid"] in scene.worker.children() else other
    scene.stop_consuming(killed)
    killed.kill()
    killed.wait(20)
    dead = time.monotonic()
    _, second = _runs(scene, keys, 2)
    assert second["t"] - dead < scene.ttl + 8, (
        "a slot that its holder left blocks for a ttl and one reschedule"
    )
    (shown,) = scene.client.groups()
    assert shown.state == "probing"
    wait_until(lambda: time.monotonic() - second["t"] > scene.ttl, 10, "a ttl under renewal")
    assert len(_runs(scene, keys, 2)) == 2
    gate.touch()
    if scene.broker == "redis":
        scene.another()
    assert [got(result)["name"] for result in results] == keys
    assert not scene.client.groups()
    print(f"the next probe began {second['t'] - dead:.1f} s after the kill")


def _runs(scene: Scene, keys: list[str], number: int) -> list[dict[str, float]]:
    """All runs of these keys once there are so many, the oldest first."""

    def found() -> list[dict[str, float]]:
        return [run for run in scene.events("paid") if run["name"] in keys]

    until(lambda: len(found()) >= number, f"{number} runs")
    return found()
