"""``leases exporter`` and its collector, on eager calls with their records in a SQLite file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from click.testing import CliRunner, Result
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from celery_leases import LeasedTask
from celery_leases.cli import leases
from celery_leases.decide import claim as claim_rules
from celery_leases.errors import StoreUnavailable
from celery_leases.events import CrashSeen, LeaseRenewed
from celery_leases.metrics_counting import Counting
from celery_leases.metrics_totals import METRICS, PREFIX, Tally, Written
from celery_leases.ops.client import OperatorClient
from celery_leases.ops.prometheus import GAUGES, LeaseCollector
from celery_leases.ops.reports import SavedRuns
from celery_leases.worker import processes

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]
PROJECT = """
from celery import Celery
app = Celery("exported", broker="memory://", set_as_current=False)
app.conf.update(leases_url="database", leases_database_url="sqlite:///{path}/r.db", leases_metrics=True)
"""


@pytest.fixture
def app(tmp_path: Path) -> Iterator[Celery]:
    """An app that counts."""
    app = Celery("exported", broker="memory://", set_as_current=False)
    app.conf.update(
        leases_url="database",
        leases_database_url=f"sqlite:///{tmp_path}/r.db",
        leases_eager_stores=True,
        leases_metrics=True,
    )

    @app.task(base=LeasedTask, name="exported.work", lease_key="secret-{number}", shared=False)
    def work(number: int) -> int:
        if number < 0:
            raise ValueError("negative")
        return number

    yield app
    for eager in (True, False):
        processes.process_of(app, eager=eager).close()


def scraped(app: Celery) -> tuple[Samples, str]:
    """What a scrape gives once all is written, as values and as text."""
    counting = processes.process_of(app, eager=True).counting
    assert counting is not None
    counting.end()
    registry = CollectorRegistry()
    registry.register(LeaseCollector(app))
    text = generate_latest(registry).decode()
    found = {
        (sample.name.removeprefix(PREFIX), frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    return found, text


def of(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    """A series of the task."""
    return name, frozenset({"task": "exported.work", **labels}.items())


def test_a_scrape_has_every_metric_and_no_key(app: Celery) -> None:
    work = app.tasks["exported.work"]
    for number in (1, 2, 2, 2, -1):
        work.apply((number,))
    found, text = scraped(app)
    assert found[of("attempts_total", outcome="returned", rule="")] == 2
    assert found[of("attempts_total", outcome="failed", rule="anything-else")] == 1
    assert found[of("saved_runs_total", how="replayed")] == 2
    saved = OperatorClient.from_app(app, eager=False).stats().saved_runs
    assert saved == [SavedRuns("exported.work", 2, replayed=2, dropped=0)]
    assert found[of("duplicate_terminal_states_total")] == 0
    assert found[of("run_seconds_count")] == found[of("run_seconds_bucket", le="+Inf")] == 3
    assert found[of("hold_seconds_sum")] >= found[of("run_seconds_sum")]
    assert found[of("cooldown_seconds_count")] == 1
    assert (found[of("records", state="done")], found[of("records", state="cooling")]) == (2, 1)
    assert found["up", frozenset()] == found["lease_store_up", frozenset()] == 1
    for name in (*(metric.full_name for metric in METRICS.values()), *(PREFIX + g for g in GAUGES)):
        assert f"# HELP {name} " in text
    assert "secret" not in text


def test_work_that_is_done_twice_is_seen(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    work = app.tasks["exported.work"]
    work.apply((1,))
    monkeypatch.setattr(claim_rules, "refusal", lambda *_: None)
    work.apply((1,))
    assert scraped(app)[0][of("duplicate_terminal_states_total")] == 1


def test_without_a_database_nothing_looks_like_a_restart(app, monkeypatch) -> None:
    app.tasks["exported.work"].apply((1,))
    collector = LeaseCollector(app)

    def away() -> Any:
        raise StoreUnavailable("away")

    monkeypatch.setattr(collector._metrics, "read", away)
    assert [(family.name, family.samples[0].value) for family in collector.collect()] == [
        (f"{PREFIX}up", 0.0)
    ]


def test_records_are_counted_for_at_most_a_twentieth_of_the_time(app: Celery) -> None:
    now, counted = [0.0], []
    app.tasks["exported.work"].apply((1,))
    collector = LeaseCollector(app, count_every=60.0, clock=lambda: now[0])
    stats = collector._client.stats

    def slow(**given: Any) -> Any:
        counted.append(now[0])
        now[0] += 10.0
        return stats(**given)

    collector._client.stats = slow
    while now[0] < 500.0:
        list(collector.collect())
        now[0] += 5.0
    assert counted == [0.0, 210.0, 420.0]


class StoredCounts:
    """Stores what a process writes; fails while ``away``."""

    def __init__(self) -> None:
        self.rows: dict[str, tuple[Written, bool]] = {}
        self.away = False

    def write(self, process: str, written: Written, *, first: bool, closed: bool) -> bool:
        """Write the sums."""
        if self.away:
            raise StoreUnavailable("away")
        assert first is (process not in self.rows)
        self.rows[process] = written, closed
        return True

    def fold(self) -> int:
        """Nothing."""
        return 0


class NoReceivers:
    """Has no receiver for any event."""

    def observe(self, event: Any) -> None:
        """Nothing."""

    def wants(self, kind: Any) -> bool:
        """Never."""
        return False


CRASH = CrashSeen(task="t", key="k", call_id="c", crashes=1, host=None)


def counts(kept: StoredCounts) -> int:
    """The crashes that were written."""
    return sum(written.tally.counts["crashes", "t"] for written, _ in kept.rows.values())


def test_events_of_many_threads_are_counted_once_each_and_the_last_are_written_at_the_end() -> None:
    kept = StoredCounts()
    counting = Counting(NoReceivers(), kept, "{}:{}".format)

    def observe() -> None:
        for _ in range(1000):
            counting.observe(CRASH)

    threads = [threading.Thread(target=observe) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counting.end()
    assert counts(kept) == 8000
    counting.observe(CRASH)
    counting.end()
    assert counts(kept) == 8001
    assert [closed for _, closed in kept.rows.values()] == [True, True]


def test_what_could_not_be_written_is_written_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counting, "_start", lambda _: None)
    kept, now = StoredCounts(), [0.0]
    counting = Counting(NoReceivers(), kept, "{}:{}".format, lambda: now[0])
    kept.away = True
    for _ in range(2):
        counting.observe(CRASH)
        with pytest.raises(StoreUnavailable):
            counting.flush()
    kept.away = False
    counting.flush()
    assert counts(kept) == 2
    kept.away = True
    counting.flush()
    now[0] += 30.0
    with pytest.raises(StoreUnavailable):
        counting.flush()


def test_renewals_on_time_and_late_ones_are_counted_separately() -> None:
    tally = Tally()
    for late in (0.0, 0.005, 0.3, 99.0, None):
        tally.add(LeaseRenewed(task="t", key="k", call_id="c", remaining=1.0, late=late))
    span = tally.spans["renewal_lateness", "t"]
    assert (span[0], span[6], span[-2], span[-1]) == (2, 1, 1, 99_305_000)
    assert Written.load(Written(tally, 3, (2,)).dump()) == Written(tally, 3, (2,))


# -- the command -----------------------------------------------------------------------------------


@pytest.fixture
def types(app: Celery) -> Callable[..., Result]:
    """Runs ``celery leases exporter`` with some words."""

    def run(*words: str) -> Result:
        return CliRunner().invoke(leases, ["exporter", *words], obj=SimpleNamespace(app=app))

    return run


def test_the_command_serves_on_the_loopback_until_it_is_stopped(tmp_path: Path) -> None:
    (tmp_path / "exported.py").write_text(PROJECT.format(path=tmp_path))
    command = [
        sys.executable, "-m", "celery", "-A", "exported", "leases", "exporter", "--port", "0",
    ]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with subprocess.Popen(
        command, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True
    ) as made:
        try:
            assert made.stderr is not None
            address = made.stderr.readline().strip()
            assert address.startswith("http://127.0.0.1:")
            with urllib.request.urlopen(address, timeout=60) as answer:  # noqa: S310
                assert b"celery_leases_up 1.0" in answer.read()
            made.send_signal(signal.SIGTERM)
            assert made.wait(60) == 0
        finally:
            made.kill()


def test_a_missing_library_or_a_port_in_use_is_an_error(types, monkeypatch) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        found = types("--port", str(taken.getsockname()[1]))
    assert (found.exit_code, "in use" in found.output) == (1, True)
    assert types("--port", "65536").exit_code == 2
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    found = types()
    assert (found.exit_code, "celery-leases[metrics]" in found.output) == (2, True)
