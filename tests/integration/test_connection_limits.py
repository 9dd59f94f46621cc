"""Workers of many greenlets or threads: few connections to the stores, and no call that suffers
from it.
"""

import json
import time
from collections.abc import Iterator

import pytest
import redis
from sqlalchemy import create_engine, text

from celery_leases.testing.waits import POLL
from tests.integration.conftest import MakeStage
from tests.integration.deployments import REDIS_REDIS_POSTGRES, Stage, got

CALLS = 150
CHILDREN = 4
POOLS = {
    "gevent-redis": ("gevent", 100, REDIS_REDIS_POSTGRES),
    "gevent-database": ("gevent", 100, ("redis", "database", "postgres")),
    "threads": ("threads", 50, REDIS_REDIS_POSTGRES),
    "prefork": ("prefork", CHILDREN, REDIS_REDIS_POSTGRES),
}
AT_MOST = dict.fromkeys(POOLS, (10, 10)) | {"prefork": (CHILDREN * 3 + 2, CHILDREN * 3 + 1)}
"""The number of connections to the database and the lease store, as in docs/how-to/operating.md."""


@pytest.fixture(params=POOLS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def stage(kind: str, stage_factory: MakeStage) -> Iterator[Stage]:
    pool, concurrency, combination = POOLS[kind]
    if pool == "gevent":
        pytest.importorskip(pool)
    # kombu allows a worker ten connections to Redis. A greenlet that finds none to acknowledge its
    # call by breaks the consumer's connection, and calls wait for the visibility timeout then, with
    # plain Celery too.
    options = json.dumps({"max_connections": 2 * concurrency})
    env = {"PREFETCH": "10", "TTL": "30", "BROKER_OPTIONS": options}
    made = stage_factory(combination, worker={"pool": pool, "concurrency": concurrency}, env=env)
    yield made
    made.close()


class Watcher:
    """Counts the connections of a stage's worker to its stores."""

    def __init__(self, stage: Stage) -> None:
        self._database = stage._engine.url.database
        # Its own connection is to another database, which is not counted.
        self._engine = create_engine(stage._engine.url.set(database="postgres"))
        self._redis = redis.Redis.from_url(stage.redis_url)

    def close(self) -> None:
        self._engine.dispose()
        self._redis.close()

    def counted(self) -> tuple[int, int]:
        return self.databases(), self.lease_stores()

    def databases(self) -> int:
        query = text(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = :name AND backend_type = :kind"
        )
        with self._engine.connect() as connection:
            return int(
                connection.execute(
                    query, {"name": self._database, "kind": "client backend"}
                ).scalar_one()
            )

    def lease_stores(self) -> int:
        """Those to Redis whose last command was a script of the lease store."""
        return sum(client["cmd"].startswith("evalsha") for client in self._redis.client_list())


@pytest.mark.every_argument
def test_many_bodies_have_few_connections(stage: Stage, kind: str, name: str) -> None:
    """A hundred and fifty calls, a hundred at once."""
    watcher = Watcher(stage)
    results = [stage.tasks.work.delay(f"{name}-{number}", 0.05) for number in range(CALLS)]
    seen = [watcher.counted()]
    while not results[-1].ready() or len(seen) < 20:
        time.sleep(POLL)
        seen.append(watcher.counted())
    values = [got(result) for result in results]
    seen.append(watcher.counted())
    watcher.close()
    assert [value["name"] for value in values] == [f"{name}-{number}" for number in range(CALLS)]
    assert len(stage.events("begin")) == CALLS
    for most, allowed in zip(map(max, zip(*seen, strict=True)), AT_MOST[kind], strict=True):
        assert most <= allowed, seen
    log = stage.worker.full_log()
    for trouble in ("leases_pool_size", "rescheduled", "lease is lost"):
        assert trouble not in log
