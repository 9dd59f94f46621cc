"""Counters in files, gauges from the records, and ``leases exporter``, on eager calls with their
records in a SQLite file.
"""

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
from celery_leases.decide import claim
from celery_leases.errors import StoreUnavailable
from celery_leases.events import CrashSeen, LeaseRenewed
from celery_leases.ops import metrics
from celery_leases.ops.client import OperatorClient
from celery_leases.ops.gauges import GAUGES, RecordGauges
from celery_leases.ops.metrics import METRICS, PREFIX, CountedEvents
from celery_leases.ops.tuning import Lateness
from celery_leases.worker import processes

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]
PROJECT = """
from celery import Celery
app = Celery("exported", broker="memory://", set_as_current=False)
app.conf.update(leases_url="database", leases_database_url="sqlite:///{path}/r.db")
"""
FORKS = """
import os, threading
from celery_leases.events import CrashSeen
from celery_leases.ops import metrics

CRASH = CrashSeen(task="t", key="k", call_id="c", crashes=1, host=None)
metrics.count_events()
receive = metrics._counter.receive
threads = [threading.Thread(target=lambda: [receive(CRASH) for _ in range(2000)]) for _ in range(4)]
for thread in threads:
    thread.start()
for _ in range(30):
    child = os.fork()
    if not child:
        metrics._enter_pool()
        receive(CRASH)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
for thread in threads:
    thread.join()
"""


@pytest.fixture
def app(tmp_path: Path) -> Iterator[Celery]:
    """An app with a leased task."""
    app = Celery("exported", broker="memory://", set_as_current=False)
    app.conf.update(
        leases_url="database",
        leases_database_url=f"sqlite:///{tmp_path}/r.db",
        leases_eager_stores=True,
    )

    @app.task(base=LeasedTask, name="exported.work", lease_key="secret-{number}", shared=False)
    def work(number: int) -> int:
        if number < 0:
            raise ValueError("negative")
        return number

    yield app
    for eager in (True, False):
        processes.process_of(app, eager=eager).close()


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory into which this process counts."""
    monkeypatch.setenv(processes.METRICS_DIRECTORY, str(tmp_path / "counts"))
    monkeypatch.setattr(metrics, "_counter", None)
    yield tmp_path / "counts"
    if metrics._counter is not None:
        for each in metrics.COUNTED:
            each.disconnect(metrics._counter.receive)


@pytest.fixture
def counter(directory: Path) -> metrics.EventCounter:
    """Counts the events of this process."""
    metrics.count_events()
    assert metrics._counter is not None
    return metrics._counter


def scraped(app: Celery, directory: Path) -> tuple[Samples, str]:
    """What a scrape gives, as values and as text."""
    registry = CollectorRegistry()
    registry.register(RecordGauges(app))
    registry.register(CountedEvents(str(directory)))
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


def crashes(directory: Path) -> Any:
    """The crashes in all files."""
    return sum(
        sample.value
        for family in CountedEvents(str(directory)).collect()
        for sample in family.samples
        if sample.name == "celery_leases_crashes_total"
    )


def test_a_scrape_has_every_metric_and_no_key(app: Celery, directory: Path) -> None:
    """Three runs of which one fails, and two calls that the first result answers."""
    work = app.tasks["exported.work"]
    for number in (1, 2, 2, 2, -1):
        work.apply((number,))
    found, text = scraped(app, directory)
    assert found[of("attempts_total", outcome="returned", rule="")] == 2
    assert found[of("attempts_total", outcome="failed", rule="anything-else")] == 1
    assert found[of("saved_runs_total", how="replayed")] == 2
    assert found[of("duplicate_terminal_states_total")] == 0
    assert found[of("run_seconds_count")] == found[of("run_seconds_bucket", le="+Inf")] == 3
    assert found[of("hold_seconds_sum")] >= found[of("run_seconds_sum")]
    assert found[of("cooldown_seconds_count")] == 1
    assert (found[of("records", state="done")], found[of("records", state="cooling")]) == (2, 1)
    assert found["up", frozenset()] == found["lease_store_up", frozenset()] == 1
    known = {metric.full_name for metric in METRICS.values()} | {PREFIX + name for name in GAUGES}
    helped = {line.split()[2] for line in text.splitlines() if line.startswith("# HELP")}
    assert known - helped == {f"{PREFIX}renewal_lateness_seconds"}  # nothing was renewed
    assert helped <= known
    assert "secret" not in text


def test_work_that_is_done_twice_is_seen(
    app: Celery, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim that lets a second call in where the first has finished."""
    work = app.tasks["exported.work"]
    work.apply((1,))
    monkeypatch.setattr(claim, "refusal", lambda *_: None)
    work.apply((1,))
    assert scraped(app, directory)[0][of("duplicate_terminal_states_total")] == 1


def test_without_a_database_the_counters_are_served(
    app: Celery, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And of the gauges only ``up``, in any scrape."""
    app.tasks["exported.work"].apply((1,))
    gauges = RecordGauges(app)
    assert len([*gauges.collect()]) == len(GAUGES)

    def away() -> Any:
        raise StoreUnavailable("away")

    monkeypatch.setattr(gauges._records, "now", away)
    assert [(family.name, family.samples[0].value) for family in gauges.collect()] == [
        (f"{PREFIX}up", 0.0)
    ]


def test_records_are_counted_for_at_most_a_twentieth_of_the_time(app: Celery) -> None:
    now, counted = [0.0], []
    app.tasks["exported.work"].apply((1,))
    collector = RecordGauges(app, count_every=60.0, clock=lambda: now[0])
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


CRASH = CrashSeen(task="t", key="k", call_id="c", crashes=1, host=None)


def test_events_of_many_threads_are_counted_once_each(
    counter: metrics.EventCounter, directory: Path
) -> None:
    """Also those that come while another thread counts."""

    def observe() -> None:
        for _ in range(1000):
            counter.receive(CRASH)

    threads = [threading.Thread(target=observe) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert crashes(directory) == 8000


def test_an_event_that_a_signal_handler_observes_while_another_is_counted_is_counted(
    counter: metrics.EventCounter, directory: Path
) -> None:
    """Without waiting for a lock that its own thread holds."""
    add = counter._add

    def interrupted(*given: Any, **more: Any) -> None:
        counter._add = add
        counter.receive(CRASH)
        add(*given, **more)

    counter.receive(CRASH)
    counter._add = interrupted
    counter.receive(CRASH)
    assert crashes(directory) == 3


def test_children_that_are_forked_while_threads_count_count_in_the_files_of_their_place(
    directory: Path,
) -> None:
    """No lock stays taken, nothing is counted twice, and each child makes no new file."""
    subprocess.run([sys.executable, "-c", FORKS], check=True, timeout=120)
    assert crashes(directory) == 4 * 2000 + 30
    assert len([*directory.iterdir()]) == 2


def test_how_late_renewals_are_is_read_from_the_files(
    app: Celery, counter: metrics.EventCounter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A time on a bound counts to its bucket; of one task or of all."""
    for task, late in (("t", 0.0), ("t", 0.005), ("t", 0.3), ("u", 99.0), ("u", None)):
        counter.receive(LeaseRenewed(task=task, key="k", call_id="c", remaining=1.0, late=late))
    operator = OperatorClient.from_app(app)
    assert operator.lateness(task="t") == Lateness(3, 0.5, 0.5)
    assert operator.lateness() == Lateness(4, 10.0, 10.0, beyond=True)
    monkeypatch.delenv(processes.METRICS_DIRECTORY)
    assert operator.lateness() is None


def test_a_directory_that_cannot_be_made_is_logged(
    app: Celery, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And the calls run."""
    directory.write_text("a file")
    assert app.tasks["exported.work"].apply((1,)).get() == 1
    assert "PROMETHEUS_MULTIPROC_DIR is set, but nothing is counted: " in caplog.text


# -- the command -----------------------------------------------------------------------------------


@pytest.fixture
def types(app: Celery) -> Callable[..., Result]:
    """Runs ``celery leases exporter`` with some words."""

    def run(*words: str) -> Result:
        return CliRunner().invoke(leases, ["exporter", *words], obj=SimpleNamespace(app=app))

    return run


@pytest.mark.parametrize("words", [(), ("--no-gauges",)])
def test_the_command_serves_on_the_loopback_until_it_is_stopped(
    tmp_path: Path, counter: metrics.EventCounter, words: tuple[str, ...]
) -> None:
    """Port 0 takes a free one, which the command names; SIGTERM ends it with 0."""
    counter.receive(CRASH)
    (tmp_path / "exported.py").write_text(PROJECT.format(path=tmp_path))
    command = [
        sys.executable,
        *["-m", "celery", "-A", "exported", "leases", "exporter", "--port", "0"],
        *words,
    ]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with subprocess.Popen(
        command, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True
    ) as made:
        try:
            assert made.stderr is not None
            address = made.stderr.readline().strip()
            assert address.startswith("http://127.0.0.1:")
            with urllib.request.urlopen(address, timeout=60) as answer:  # noqa: S310
                text = answer.read()
            assert (b"celery_leases_up 1.0" in text) is not bool(words)
            assert b'celery_leases_crashes_total{task="t"} 1.0' in text
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
