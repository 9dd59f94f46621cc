"""Small projects on Flask and FastAPI: their own tests, their own web server, and a real worker."""

import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from celery_leases.testing.waits import wait_until
from tests.support.commands import run_command
from tests.support.plugin import WorkerFactory
from tests.support.process import GuardedProcess

httpx = pytest.importorskip("httpx", reason="httpx is not installed: it is in the group test")

PROJECTS = Path(__file__).parents[1] / "projects"
PATIENCE = 60.0
NEEDED = {
    "flask": ("flask", "flask_sqlalchemy", "flask_migrate"),
    "fastapi": ("fastapi", "uvicorn"),
}
SERVERS = {
    "flask": ("-m", "flask", "--app", "make_celery:flask_app", "run", "--port", "0"),
    "fastapi": ("-m", "uvicorn", "shop.web:app", "--port", "0"),
}
STARTED = re.compile(r"unning on (http://127\.0\.0\.1:\d+)")
WORKERS = {"flask": "make_celery", "fastapi": "shop.tasks"}


class Shop:
    """A project whose settings are in the environment: commands, a web server, a ledger, a gate."""

    def __init__(self, name: str, where: Path, database_url: str, broker_url: str) -> None:
        self.name = name
        self.home = PROJECTS / name
        self.ledger, self.gate = where / "ledger", where / "gate"
        self.env = {
            "SHOP_DATABASE_URL": database_url,
            "SHOP_BROKER_URL": broker_url,
            "SHOP_LEDGER": str(self.ledger),
            "SHOP_GATE": str(self.gate),
        }
        self._log = where / "server.log"
        self._server: GuardedProcess | None = None

    @property
    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("CELERY_")}
        path = os.pathsep.join(filter(None, (str(self.home), os.environ.get("PYTHONPATH"))))
        return {**kept, **self.env, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}

    def runs(self, *command: str) -> str:
        argv = [sys.executable, *command]
        done = run_command(argv, cwd=self.home, env=self._environment, timeout=100)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def served(self) -> Any:
        self._server = GuardedProcess(
            [sys.executable, "-u", *SERVERS[self.name]],
            log=self._log,
            env=self._environment,
            cwd=self.home,
        )
        found = self._server.wait_for_log(STARTED.pattern, PATIENCE)
        return httpx.Client(base_url=found[1], timeout=PATIENCE)

    def charges(self) -> list[str]:
        return self.ledger.read_text().splitlines() if self.ledger.exists() else []

    def close(self) -> None:
        if self._server is not None:
            self._server.end()


@pytest.fixture
def shop_of(
    tmp_path: Path, leases_postgres_url: str, leases_redis_url: str
) -> Iterator[Callable[[str], Shop]]:
    """``shop_of(name)`` gives a project on an empty database and an empty broker."""
    made: list[Shop] = []

    def make(name: str) -> Shop:
        for module in NEEDED[name]:
            pytest.importorskip(
                module, reason=f"{module} is not installed: it is in the group test"
            )
        made.append(Shop(name, tmp_path, leases_postgres_url, leases_redis_url))
        return made[-1]

    yield make
    for shop in made:
        shop.close()


@pytest.mark.every_argument
@pytest.mark.parametrize("name", ["flask", "fastapi"])
def test_the_projects_own_tests_pass(shop_of: Callable[[str], Shop], name: str) -> None:
    assert " passed" in shop_of(name).runs("-m", "pytest", "-q")


def test_an_order_on_flask_is_charged_once_though_its_worker_is_killed(
    shop_of: Callable[[str], Shop], worker_factory: WorkerFactory
) -> None:
    shop = shop_of("flask")
    flask = ("-m", "flask", "--app", "make_celery:flask_app")
    shop.runs(*flask, "db", "upgrade")

    def worker() -> Any:
        return worker_factory(WORKERS["flask"], cwd=shop.home, env=shop.env)

    customer = {"Authorization": "customer"}
    with shop.served() as http:
        first = worker()
        sent = http.post("/orders/7?amount=3")
        assert sent.status_code == 202
        place = sent.headers["Location"]
        assert http.get(place).status_code == 403
        wait_until(lambda: len(shop.charges()) == 1, PATIENCE, "the charge")
        shown = http.get(place, headers=customer)
        # On a machine that is very busy the lease may have run out.
        assert (shown.status_code, shown.json()["state"] in {"running", "abandoned"}) == (200, True)
        assert http.post("/orders/7?amount=4").json()["code"] == "key_reused"
        first.kill(signal.SIGKILL)
        assert http.post("/orders/7?amount=3").status_code == 202
        worker()
        shop.gate.touch()

        def state() -> Any:
            return http.get(place, headers=customer).json()

        wait_until(lambda: state()["state"] == "done", PATIENCE, "the order to be done")
        assert state()["result"]["attempt"] >= 2
        again = http.post("/orders/7?amount=3")
        assert (again.status_code, again.json()["result"]) == (200, state()["result"])
    assert len(shop.charges()) == 1
    shown = json.loads(shop.runs(*flask, "leases", "show", "order:7", "--json"))
    assert (shown["key"], shown["state"]) == ("order:7", "done")


def test_a_browser_on_fastapi_sees_an_order_from_the_queue_to_its_end(
    shop_of: Callable[[str], Shop], worker_factory: WorkerFactory
) -> None:
    shop = shop_of("fastapi")
    shop.runs("-m", "celery", "-A", WORKERS["fastapi"], "leases", "migrate")
    anne = {"Authorization": "anne", "Idempotency-Key": '"1"'}
    seen: list[tuple[str, Any]] = []
    with shop.served() as http:
        sent = http.post("/orders?amount=3", headers=anne)
        assert sent.status_code == 202
        place = sent.headers["Location"]
        assert http.get(place).status_code == 401
        stream = anne | {"Accept": "text/event-stream"}
        with http.stream("GET", place, headers=stream) as events:
            for line in events.iter_lines():
                if not line.startswith("data: "):
                    continue
                body = json.loads(line.removeprefix("data: "))
                seen.append((body["state"], body["progress"]))
                if body["state"] == "absent":
                    worker_factory(WORKERS["fastapi"], cwd=shop.home, env=shop.env)
                elif body["state"] == "running":
                    shop.gate.touch()
        assert http.post("/orders?amount=3", headers=anne).json()["result"]["amount"] == 3
        assert http.post("/orders?amount=4", headers=anne).status_code == 422
    assert (seen[0], seen[-1]) == (("absent", None), ("done", {"charged": 3}))
    assert "running" in {state for state, _ in seen}
    assert shop.charges() == ["anne:1 3"]
