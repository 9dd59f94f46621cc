"""One real error of each client library, judged in the child of a prefork worker that runs them
all.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.catalog import IN_A_WORKER
from tests.clients.expectations import Case
from tests.integration.deployments import imported_anew
from tests.support.servers import RedisServer
from tests.support.workers import LocalWorker

APP = "tests.apps.clients"
QUEUE = "clients"
PATIENCE = 60.0
"""Seconds for all of them."""


class Bench:
    """One worker and its classification of each case; all cases run at the same time."""

    def __init__(self, url: str, directory: Path, root: Path) -> None:
        env = {"CELERY_BROKER_URL": url, "CELERY_RESULT_BACKEND": url}
        self.worker = LocalWorker(
            APP, directory=directory, concurrency=1, queue=QUEUE, env=env, cwd=root
        )
        self.app = imported_anew(APP, env).app
        # Celery reads its own variables from the environment of the moment, and that is not the
        # caller's any more.
        self.app.conf.update(broker_url=url, result_backend=url)
        self._results: dict[str, Any] = {}

    def start(self) -> None:
        """Start the worker and give it its work."""
        self.worker.start()
        self.children = self.worker.wait_for_children()
        for name in IN_A_WORKER:
            self._results[name] = self.app.send_task(f"{APP}.judge", (name,), queue=QUEUE)

    def judged(self, case: Case) -> dict[str, Any]:
        """How the rules classified the case in the worker."""
        found: dict[str, Any] = self._results[case.name].get(timeout=PATIENCE)
        return found

    def close(self) -> None:
        """End the worker and let all connections go."""
        self.worker.teardown()
        self.app.close()


@pytest.fixture(scope="module")
def bench(
    leases_redis: RedisServer, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[Bench]:
    """The worker of this module."""
    made = Bench(
        f"{leases_redis.url.rpartition('/')[0]}/9",
        tmp_path_factory.mktemp("bench"),
        pytestconfig.rootpath,
    )
    try:
        made.start()
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("case", IN_A_WORKER.values(), ids=IN_A_WORKER)
def test_a_real_error_lands_in_its_row_in_a_worker(
    case: Case, bench: Bench, request: pytest.FixtureRequest
) -> None:
    """Errors are classified in a worker's child as in any other process."""
    found = bench.judged(case)
    request.node.add_report_section(
        "call", "log of the worker", "\n".join(bench.worker.full_log().splitlines()[-20:])
    )
    case.check(found)


def test_the_children_of_the_worker_lived_through_it_all(bench: Bench) -> None:
    """No client library has brought down the child that it failed in."""
    assert bench.worker.children() == bench.children
