"""A task that kills its own process, again and again, ends."""

import json
import time

import pytest
from sqlalchemy import text

from celery_leases import PermanentFailure
from celery_leases.testing.waits import wait_until
from tests.crash.conftest import MakeScene
from tests.crash.crash_deployments import Scene
from tests.integration.deployments import BOTH_WAYS


def waits(scene: Scene, task: str, name: str, crashes: int) -> float:
    """Seconds from the end of the attempt to its ``retry_at``, after so many crashes."""

    def seen() -> bool:
        row = scene.find_row(task, f"{task}:{name}") or {}
        return bool(
            (row.get("crashes"), row.get("state")) == (crashes, "pending") and row["retry_at"]
        )

    wait_until(seen, 30, f"{crashes} crashes of {name}")
    row = scene.row(task, f"{task}:{name}")
    return float(row["retry_at"] - row["finished_at"]) / 1e6


def test_c4_a_crash_loop_ends_in_failed(scene_factory: MakeScene, name: str) -> None:
    """The second attempt at once, the third after 5 s, the fourth after 30 s."""
    scene = scene_factory(BOTH_WAYS[0], ttl=1, visibility=4)
    result = scene.tasks.often.delay(name)
    assert waits(scene, "often", name, 2) == pytest.approx(5.0, abs=0.1)
    began = scene.wait_for("begin", 3, name=name)
    assert began[2]["t"] - began[1]["t"] > 5.0
    assert waits(scene, "often", name, 3) == pytest.approx(30.0, abs=0.1)
    # The half minute itself is the database's to count: let it be over.
    with scene._engine.connect() as connection:
        connection.execute(
            text("UPDATE celery_leases_records SET retry_at = 1 WHERE key = :k"),
            {"k": f"often:{name}"},
        )
    again = scene.tasks.often.delay(name)
    with pytest.raises(PermanentFailure, match="died 4 times in a row"):
        again.get(timeout=60)
    row = scene.wait_for_state("often", f"often:{name}", "failed")
    assert (row["crashes"], row["reason"]) == (4, "crash_loop")
    assert json.loads(row["error"])["rule"] == "crash_loop"
    assert len(scene.events("begin", name=name)) == 4
    asked = time.monotonic()
    with pytest.raises(PermanentFailure):
        scene.tasks.often.delay(name).get(timeout=20)
    assert time.monotonic() - asked < 5
    assert len(scene.events("begin", name=name)) == 4
    assert result.id == began[0]["id"]


@pytest.mark.parametrize(
    ("how", "combination"), [("sys", BOTH_WAYS[0]), ("os", BOTH_WAYS[1])], ids=["sys", "os"]
)
def test_a_body_that_ends_its_process_counts_as_a_crash_and_ends(
    scene_factory: MakeScene, name: str, how: str
) -> None:
    scene = scene_factory(ttl=1, visibility=30)
    result = scene.tasks.exits.delay(name, how)
    with pytest.raises(PermanentFailure):
        result.get(timeout=40)
    began = scene.events("begin", name=name)
    assert [event["attempt"] for event in began] == [1, 2]
    assert began[1]["previous"] == ("terminated" if how == "sys" else "crashed")
    row = scene.wait_for_state("exits", f"exits:{name}", "failed")
    assert (row["crashes"], row["reason"]) == (2, "crash_loop")
    scene.wait_until_drained()


def test_what_ends_a_worker_counts_as_a_crash(scene_factory: MakeScene, name: str) -> None:
    """In a pool process it is a crash."""
    scene = scene_factory(BOTH_WAYS[0], ttl=1, visibility=30)
    results = {how: scene.tasks.stops.delay(name, how) for how in scene.tasks.STOPS}
    for how, result in results.items():
        error = result.get(timeout=60, propagate=False)
        ends = how in ("shutdown", "terminate", "exit")
        assert isinstance(error, PermanentFailure if ends else RuntimeError), how
        assert len(scene.events("begin", name=name, how=how)) == (2 if ends else 1), how
        row = scene.wait_for_state("stops", f"stops:{name}:{how}", "failed" if ends else "cooling")
        assert (row["crashes"], row["failures"]) == ((2, 0) if ends else (0, 1)), how
    scene.wait_until_drained()
