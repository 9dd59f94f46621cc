"""Worker processes: pytest-celery's own fixtures over them, and what a crash test does with a
LocalWorker.
"""

import pytest
from pytest_celery import RESULT_TIMEOUT, CeleryTestSetup

from tests.apps import plain
from tests.support.plugin import WorkerFactory
from tests.support.process import NotReady


@pytest.fixture
def leases_node_app() -> str:
    """The worker node runs the plain app."""
    return "tests.apps.plain"


def add(setup: CeleryTestSetup, x: int, y: int) -> object:
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


def test_a_worker_that_cannot_start_shows_its_log(worker_factory: WorkerFactory) -> None:
    with pytest.raises(NotReady, match=r"tests\.apps\.nothere"):
        worker_factory("tests.apps.nothere")
