"""``celery leases tune``, on records of a SQLite file."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from celery import Celery
from click.testing import CliRunner, Result
from sqlalchemy import update

from celery_leases import LeaseClient, LeasedTask
from celery_leases.cli import leases
from celery_leases.events import LeaseRenewed
from celery_leases.ops.metrics import EventCounter

Types = Callable[..., Result]
RUN_TIMES = [number / 10 for number in range(1, 201)]
"""Seconds: p50 is 10.0, p95 19.0, p99 19.8, and the longest run takes 20.0."""


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Celery]:
    """Two hundred finished runs of one task, and a task without any."""
    path = tmp_path_factory.mktemp("tuned")
    app = Celery("tuned", broker="memory://", set_as_current=False)
    app.conf.update(
        leases_url="database",
        leases_database_url=f"sqlite:///{path}/r.db",
        leases_eager_stores=True,
    )

    @app.task(
        base=LeasedTask, name="tuned.work", lease_key="k:{number}", time_limit=90, shared=False
    )
    def work(number: int) -> None:
        pass

    @app.task(base=LeasedTask, name="tuned.idle", lease_key="k", lease_ttl="2m", shared=False)
    def idle() -> None:
        pass

    for number in range(len(RUN_TIMES)):
        work.apply((number,))
    records = LeaseClient.from_app(app, eager=True)._records
    table = records.tables.records
    with records.database.engine.begin() as connection:
        for number, took in enumerate(RUN_TIMES):
            connection.execute(
                update(table)
                .where(table.c.key == f"k:{number}")
                .values(finished_at=table.c.started_at + round(took * 1e6))
            )
    yield app
    LeaseClient.from_app(app)._records.database.close()


@pytest.fixture
def types(app: Celery) -> Types:
    """Runs ``celery leases tune`` with some words."""

    def run(*words: str) -> Result:
        return CliRunner().invoke(leases, ["tune", *words], obj=SimpleNamespace(app=app))

    return run


def test_the_numbers_are_those_of_the_recorded_run_times(types: Types) -> None:
    found = types("--json", "--task", "tuned.work").stdout
    work, advice = map(json.loads, found.splitlines())
    assert (work["runs"], work["p50"], work["p95"], work["p99"]) == (200, 10.0, 19.0, 19.8)
    assert (work["longest"], work["time_limit"], work["ttl"]) == (20.0, 90, 15.0)
    assert work["unrenewed_ttl"] == pytest.approx(22.0)
    assert advice["ttl"] == 10.0
    assert advice["missed"] == []


def test_the_options_change_jitter_and_guard(types: Types) -> None:
    found = types("--json", "--task", "tuned.work", "--jitter", "4s", "--guard", "1s").stdout
    assert json.loads(found.splitlines()[0])["unrenewed_ttl"] == pytest.approx(24.8)


def test_a_process_that_stands_still_needs_a_longer_ttl(types: Types) -> None:
    advice = json.loads(types("--json", "--lateness", "10s").stdout.splitlines()[-1])
    assert advice["ttl"] >= 33.0


@pytest.fixture
def counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Counts the lateness of renewals as a process of the app does."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))

    def count(*groups: tuple[int, str, float]) -> None:
        counter = EventCounter()
        for number, task, late in groups:
            event = LeaseRenewed(task=task, key="k", call_id="c", remaining=1.0, late=late)
            for _ in range(number):
                counter.receive(event)

    return count


def test_measured_lateness_counts(types: Types, counts: Callable[..., None]) -> None:
    """Of 1000 renewals the 990th was 4 s late, so in the bucket up to 5 s: (5 s + 2 x p99 of the
    store) / 0.307 for the ttl, and 19.8 + 0.2 + 5 s + 2 x p99 without renewal.
    """
    counts((580, "tuned.work", 0.001), (10, "tuned.work", 9.0))
    counts((400, "tuned.idle", 0.004), (10, "tuned.idle", 4.0))
    *_, work, advice = map(json.loads, types("--json").stdout.splitlines())
    told = (advice["lateness"], advice["lateness_from"], advice["renewals"])
    assert told == (5.0, "measured", 1000)
    assert advice["latest_renewal"] == 10.0
    slow = 2 * advice["store_p99"]
    assert advice["guard"] == pytest.approx(5.0 + slow)
    assert advice["ttl"] == math.ceil(max((5.0 + slow) / (0.99 - 1 / 6 - 1 / 3 - 0.1 - 1 / 12), 10))
    assert advice["ttl"] >= 17.0
    assert work["unrenewed_ttl"] == pytest.approx(25.0 + slow)
    said = types().stdout
    assert "5s of standstill." in said
    assert "how late renewals were: 5s (p99 of 1000 that metrics have counted; the" in said
    assert "latest 10s)." in said


def test_the_lateness_of_one_task_and_a_given_one(
    types: Types, counts: Callable[..., None]
) -> None:
    """``--task`` takes the renewals of that task alone; ``--lateness`` and ``--guard`` win."""
    counts((200, "tuned.work", 0.2), (50, "tuned.idle", 9.0))
    advice = json.loads(types("--json", "--task", "tuned.work").stdout.splitlines()[-1])
    assert (advice["lateness"], advice["renewals"], advice["guard"]) == (0.25, 200, 2.0)
    few = json.loads(types("--json", "--task", "tuned.idle").stdout.splitlines()[-1])
    assert (few["lateness"], few["lateness_from"], few["renewals"]) == (1.0, "assumed", 50)
    assert (
        "assumed: 50 renewals were counted, 100 are needed" in types("--task", "tuned.idle").stdout
    )
    given = types("--json", "--lateness", "3s", "--guard", "1s").stdout
    advice = json.loads(given.splitlines()[-1])
    assert (advice["lateness"], advice["lateness_from"], advice["guard"]) == (3.0, "given", 1.0)
    assert "that of --lateness" in types("--lateness", "3s").stdout


def test_without_metrics_the_standstill_is_said_to_be_assumed(types: Types) -> None:
    """With the variable that lets workers measure it."""
    found = types().stdout
    assert "1s of standstill." in found
    assert "assumed: with PROMETHEUS_MULTIPROC_DIR workers count how late renewals are" in found


def test_an_slo_that_is_missed_is_exit_code_1_with_the_line_to_write(types: Types) -> None:
    found = types("--takeover-slo", "40s")
    assert found.exit_code == 1
    assert "tuned.idle: with lease_ttl=120" in found.stdout
    assert "write at most lease_ttl=18" in found.stdout
    assert "tuned.work: with" not in found.stdout
    assert types("--takeover-slo", "5m").exit_code == 0
    assert "No lease_ttl meets a takeover within 5.0s" in types("--takeover-slo", "5s").stdout


def test_few_runs_are_said_to_be_few(types: Types) -> None:
    found = types("--task", "tuned.idle").stdout
    assert "Fewer than 100 finished runs, so p99 is a guess: tuned.idle." in found
    assert "Fewer than" not in types("--task", "tuned.work").stdout


@pytest.mark.parametrize("kind", ["svg", "png"])
def test_the_picture_shows_ttl_and_limits(types: Types, tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"runs.{kind}"
    assert types("--picture", str(path)).exit_code == 0
    begin = path.read_bytes()[:200]
    assert begin.startswith(b"\x89PNG" if kind == "png" else b"<?xml")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--picture", "runs.pdf"), "must end with .svg or .png"),
        (("--task", "nothing"), "not a leased task of this app"),
        (("--takeover-slo", "soon"), "--takeover-slo"),
        (("--runs", "0"), "--runs"),
    ],
)
def test_wrong_use_is_exit_code_2(types: Types, words: tuple[str, ...], said: str) -> None:
    found = types(*words)
    assert found.exit_code == 2
    assert said in found.stderr
