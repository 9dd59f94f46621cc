"""Worker processes: pytest-celery's own fixtures over them, and what a crash test does with a
LocalWorker.
"""

import os
import signal

import pytest
from pytest_celery import RESULT_TIMEOUT, CeleryTestSetup

from celery_leases.testing.waits import wait_until
from tests.apps import plain
from tests.support.guard import parents, stopped
from tests.support.plugin import WorkerFactory
from tests.support.process import NotReady


@pytest.fixture
def leases_node_app() -> str:
    """The worker node runs the plain app."""
    return "tests.apps.plain"


def add(setup: CeleryTestSetup, x: int, y: int) -> object:
    """Send ``add`` through the set-up's own app and wait for the result."""
    return setup.app.send_task(plain.add.name, (x, y)).get(timeout=RESULT_TIMEOUT)


def test_pytest_celery_runs_over_local_processes(celery_setup: CeleryTestSetup) -> None:
    worker = celery_setup.worker
    assert celery_setup.ready(control=True)
    assert worker is not None
    assert add(celery_setup, 1, 2) == 3
    worker.assert_log_exists("ready.")
    assert worker.worker_queue == "celery"

    worker.kill()
    assert worker.container.status == "exited"
    worker.restart()
    assert worker.container.status == "running"
    assert add(celery_setup, 3, 4) == 7
    exit_code, output = worker.container.exec_run("python -c 'print(6 * 7)'")
    assert (exit_code, output) == (0, b"42\n")


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo", "gevent", "eventlet"])
def test_every_pool_starts_and_stops_warm(
    pool: str, worker_factory: WorkerFactory, leases_redis_url: str
) -> None:
    if pool in {"gevent", "eventlet"}:
        pytest.importorskip(pool)
    worker = worker_factory("tests.apps.plain", broker=leases_redis_url, pool=pool)
    assert worker.stop() == 0
    assert not worker.alive


def test_a_killed_child_is_replaced_and_a_killed_worker_takes_its_children_along(
    worker_factory: WorkerFactory, leases_redis_url: str
) -> None:
    worker = worker_factory("tests.apps.plain", broker=leases_redis_url, concurrency=2)
    before = worker.wait_for_children()
    victim = worker.kill_child()
    assert victim == before[0]
    wait_until(lambda: victim not in worker.children(), 10, "the end of the child")
    replaced = worker.wait_for_children()

    worker.kill()
    assert worker.wait() == -signal.SIGKILL
    wait_until(lambda: not set(replaced) & set(parents()), 10, "the end of the children")
    assert worker.children() == []
    with pytest.raises(LookupError, match="no pool child"):
        worker.kill_child()


def test_a_paused_worker_does_not_answer(
    worker_factory: WorkerFactory, leases_redis_url: str
) -> None:
    """SIGSTOP of the tree and of one child."""
    app = plain.app
    app.conf.update(broker_url=leases_redis_url, result_backend=leases_redis_url)
    worker = worker_factory("tests.apps.plain", broker=leases_redis_url, backend=leases_redis_url)
    with app.connection_for_write() as connection:
        result = plain.hang.apply_async((0.5,), connection=connection)
        child = int(worker.wait_for_log(r"hanging in (\d+)")[1])
        worker.pause(pid=child)
        assert stopped([child])
        assert not stopped([worker.pid])
        worker.resume(pid=child)
        worker.pause()
        assert stopped([worker.pid, child])
        worker.resume()
        assert result.get(timeout=30) == "done"


def test_a_worker_that_cannot_start_shows_its_log(worker_factory: WorkerFactory) -> None:
    with pytest.raises(NotReady, match=r"tests\.apps\.nothere"):
        worker_factory("tests.apps.nothere")


def test_two_workers_share_the_work_of_one_queue(
    worker_factory: WorkerFactory, leases_redis_url: str, leases_queue: str
) -> None:
    app = plain.app
    app.conf.update(broker_url=leases_redis_url, result_backend=leases_redis_url)
    urls = {"broker": leases_redis_url, "backend": leases_redis_url, "queue": leases_queue}
    workers = [
        worker_factory("tests.apps.plain", wait=False, pool="solo", **urls) for _ in range(2)
    ]
    for worker in workers:
        worker.wait_ready()
    results = [plain.child_pid.apply_async(queue=leases_queue) for _ in range(20)]
    assert {result.get(timeout=30) for result in results} <= {worker.pid for worker in workers}
    assert all(worker.pid != os.getpid() for worker in workers)
