"""pytest-celery's cluster fixtures with local processes. ``node_plugin`` registers them unless
``--leases-docker`` is given.
"""

from collections.abc import Iterator

import pytest
from pytest_celery import (
    CeleryBackendCluster,
    CeleryBrokerCluster,
    CeleryTestBackend,
    CeleryTestBroker,
    CeleryTestWorker,
    CeleryWorkerCluster,
)

from tests.support.nodes import ServerNode, WorkerNode
from tests.support.plugin import WorkerFactory
from tests.support.servers import RedisServer


@pytest.fixture
def celery_broker_cluster(
    leases_redis: RedisServer, leases_redis_url: str
) -> Iterator[CeleryBrokerCluster]:
    """One broker node: the shared private Redis, emptied. It is started again if the test killed
    it.
    """
    cluster = CeleryBrokerCluster(CeleryTestBroker(ServerNode(leases_redis)))
    yield cluster
    cluster.teardown()
    leases_redis.start()


@pytest.fixture
def celery_backend_cluster(
    leases_redis: RedisServer, leases_redis_url: str
) -> CeleryBackendCluster:
    """One backend node: the shared private Redis."""
    return CeleryBackendCluster(CeleryTestBackend(ServerNode(leases_redis)))


@pytest.fixture
def leases_node_app() -> str:
    """The module of the app that the worker node runs (``celery -A``). Override it in your
    tests.
    """
    return "celery_app"


@pytest.fixture
def celery_worker_cluster(
    leases_node_app: str,
    worker_factory: WorkerFactory,
    celery_broker_cluster: CeleryBrokerCluster,
    celery_backend_cluster: CeleryBackendCluster,
) -> CeleryWorkerCluster:
    """One worker node: a prefork worker with one child."""
    worker = worker_factory(
        leases_node_app,
        broker=celery_broker_cluster.config()["host_urls"][0],
        backend=celery_backend_cluster.config()["host_urls"][0],
    )
    return CeleryWorkerCluster(CeleryTestWorker(WorkerNode(worker), None))
