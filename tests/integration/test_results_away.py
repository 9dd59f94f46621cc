"""The result backend is away when calls end: Celery has their results once it is back."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from celery import chain, chord

from tests.integration.conftest import MakeStage
from tests.integration.deployments import POOL_STORES, Stage, got

POOLS = {pool: POOL_STORES[pool] for pool in ("prefork", "threads", "solo", "gevent")}


@pytest.fixture(
    scope="module", params=POOLS.items(), ids=lambda pool: "-".join((pool[0], *pool[1]))
)
def module_stage(
    request: pytest.FixtureRequest,
    stage_factory: MakeStage,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Stage]:
    """A worker of each pool with a result backend that a test can take away."""
    pool, combination = request.param
    if pool == "gevent":
        pytest.importorskip(pool)
    away = tmp_path_factory.mktemp("results") / "away"
    env = {"RESULTS_AWAY": str(away)}
    made = stage_factory(combination, worker={"pool": pool}, env=env)
    yield made
    made.close_when_drained(request.session)


def test_results_are_stored_once_the_backend_is_back(stage: Stage, name: str) -> None:
    """A delivery is not acknowledged before Celery has its outcome."""
    tasks, away = stage.tasks, Path(stage.env["RESULTS_AWAY"])
    away.touch()
    alone = tasks.work.delay(f"{name}-alone", answer=1)
    failing = tasks.fails.delay(f"{name}-failing")
    chained = chain(tasks.work.s(f"{name}-first", answer=2), tasks.leased_link.s())()
    parts = [tasks.work.s(f"{name}-{part}", answer=part) for part in (3, 4)]
    gathered = chord(parts)(tasks.gather.s())
    for call in (alone, failing, chained.parent, *gathered.parent.results):
        stage.wait_for_log(call.id, "Celery could not store")
    away.unlink()
    assert got(alone) == 1
    assert type(got(failing, propagate=False)).__name__ == "PermanentFailure"
    assert got(chained) == 2
    assert got(gathered) == [3, 4]
    names = [event["name"] for event in stage.events("begin") if name in event["name"]]
    assert len(names) == len(set(names)) == 5
