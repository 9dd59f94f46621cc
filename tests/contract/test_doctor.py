"""``leases doctor`` on broken set-ups, each of which it names, and on healthy ones, for which it
reports nothing.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import celery
import pytest
import redis
from celery import Celery
from click.testing import CliRunner
from sqlalchemy import create_engine, text

from celery_leases import LeaseClient, LeasedTask
from celery_leases.cli import leases
from celery_leases.errors import LeaseConfigurationError
from celery_leases.ops import doctor, server_checks, server_facts
from celery_leases.stores.redis.errors import ACL_COMMANDS
from celery_leases.stores.redis.leases import RedisLeaseStore
from celery_leases.stores.sql.connections import engine_for
from celery_leases.stores.sql.schema import Tables
from celery_leases.testing.contracts.calls import make_call
from celery_leases.testing.contracts.record_case import closed, won
from celery_leases.worker import answering, processes
from celery_leases.worker.checks import startup
from celery_leases.worker.checks.settings import Finding, Severity
from tests.support.servers import RedisSentinels
from tests.support.servers.redis import RedisServer

TIMEOUT = 90
NOWHERE = "127.0.0.1:9"
Makes = Callable[..., Celery]


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine answers late, which must not be reported."""
    monkeypatch.setattr(server_checks, "SLOW", 30.0)
    monkeypatch.setattr(server_checks, "CLOCKS_APART", 30.0)
    monkeypatch.setattr(doctor, "worker_answers", lambda _: True)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    """A server that writes to its disk, as a broker should."""
    with RedisServer(options=("--save", "3600 1")) as started:
        yield started


@pytest.fixture
def makes(server: RedisServer, tmp_path: Path) -> Iterator[Makes]:
    """Makes an app with one leased task, which is healthy except for the given settings."""

    def make(*, task: dict[str, Any] | None = None, **conf: Any) -> Celery:
        base = server.url.removesuffix("/0")
        app = Celery("examined", broker=conf.pop("broker", f"{base}/0"), set_as_current=False)
        healthy: dict[str, Any] = {
            "result_backend": f"{base}/2",
            "leases_url": f"{base}/1",
            "leases_database_url": f"sqlite:///{tmp_path / 'records.db'}",
            "leases_prefix": f"examined-{tmp_path.name}",
            "broker_transport_options": {
                "visibility_timeout": TIMEOUT,
                "unacked_restore_interval": 5,
                "unacked_restore_throttle": 1,
            },
            "broker_connection_retry": False,
            "beat_schedule": {"rescue": {"task": "celery_leases.rescue", "schedule": 300.0}},
        }
        app.conf.update(healthy | conf)

        @app.task(
            base=LeasedTask, name="examined.send", lease_key="c:{n}", shared=False, **(task or {})
        )
        def send(n: int) -> None:
            """Do nothing."""

        app.finalize()
        for name in [name for name in app.tasks if not name.startswith(("examined.", "celery"))]:
            app.tasks.unregister(name)  # shared tasks of other tests
        return app

    yield make
    processes.close_all()


def nothing() -> None:
    """Do nothing."""


def found(app: Celery) -> dict[str, Finding]:
    examination = doctor.examine(app)
    for finding in examination.findings:
        assert finding.problem
    return {finding.code: finding for finding in examination.findings}


BROKEN: dict[str, dict[str, Any]] = {
    "short-visibility-timeout": {"task": {"time_limit": 2 * TIMEOUT}},
    "prefetch-beyond-visibility-timeout": {"task": {"time_limit": TIMEOUT / 2}},
    "few-broker-connections": {"worker_pool": "gevent", "worker_concurrency": 100},
    "unlimited-prefetch": {"worker_prefetch_multiplier": 0},
    "autoretry": {"task": {"autoretry_for": (OSError,)}},
    "retry-on-worker-lost": {"task": {"retry_on_worker_lost": True}},
    "tight-soft-limit": {"task": {"soft_time_limit": 20, "time_limit": 20}},
    "short-ttl": {"task": {"lease_ttl": 2}},
    "always-eager": {"task_always_eager": True},
    "periodic-once": {
        "task": {"lease_outbox": False},
        "beat_schedule": {"hourly": {"task": "examined.send", "schedule": 3600.0, "args": (1,)}},
    },
    "no-result-backend": {"result_backend": None},
    "no-rescue": {"task": {"lease_outbox": "store"}, "beat_schedule": {}},
    "short-result-expiry": {"result_expires": 60},
    "lease-store-away": {"leases_url": f"redis://{NOWHERE}/0"},
    "records-away": {"leases_database_url": f"postgresql+psycopg://me:hunter2@{NOWHERE}/x"},
    "broker-away": {"broker": f"redis://:hunter2@{NOWHERE}/0"},
    "consumer-timeout": {"broker": f"amqp://me:hunter2@{NOWHERE}//", "task": {"time_limit": 3600}},
    "settings": {"leases_databse_url": "sqlite://"},
}
BESIDES = {"prefetch-beyond-visibility-timeout", "broker-away", "short-visibility-timeout"}


@pytest.mark.parametrize("code", BROKEN)
def test_a_broken_set_up_is_named_with_what_to_write(makes: Makes, code: str) -> None:
    """Only what is broken, and its consequences; no password is shown."""
    try:
        app = makes(**BROKEN[code])
    except LeaseConfigurationError:  # a task with wrong settings cannot be registered
        app = Celery("examined", broker="memory://", set_as_current=False)
        app.conf.update(BROKEN[code])
    seen = found(app)
    assert code in seen
    assert seen[code].advice or code == "settings"
    assert set(seen) - {code} <= BESIDES
    assert "hunter2" not in str(seen)


def test_wrong_settings_are_named_where_they_keep_a_task_from_being_registered() -> None:
    shared = Celery("other", broker="memory://", set_as_current=False)
    shared.conf.leases_database_url = "sqlite://"

    def nothing() -> None:
        pass

    with forgotten_shared_tasks():
        shared.task(nothing, base=LeasedTask, name="other.shared", lease_key="k", shared=True)
        app = Celery("examined", broker="memory://", set_as_current=False)
        app.conf.update(BROKEN["settings"])
        assert "did you mean leases_database_url?" in found(app)["settings"].text


@contextmanager
def forgotten_shared_tasks() -> Iterator[None]:
    """A shared task that is made in this context is not registered in the apps of other tests."""
    before = set(celery._state._on_app_finalizers)
    yield
    celery._state._on_app_finalizers &= before


@pytest.mark.parametrize("records", ["sqlite", "postgres", "mariadb"])
def test_a_healthy_set_up_passes(
    makes: Makes, request: pytest.FixtureRequest, records: str
) -> None:
    conf: dict[str, Any] = {}
    if records != "sqlite":
        url = request.getfixturevalue(f"leases_{records}_url")
        Tables().create(engine_for(url))
        conf = {"leases_database_url": url}
    if records == "mariadb":
        conf |= {"broker": "memory://", "leases_url": "database"}
    examination = doctor.examine(makes(**conf))
    assert [finding.text for finding in examination.findings] == []
    assert examination.healthy
    parts = {server.part: server for server in examination.servers}
    assert set(parts) == {"broker", "records"} | (
        {"lease store"} if records != "mariadb" else set()
    )
    assert parts["records"].latency is not None
    assert abs(parts["records"].clock_ahead or 0.0) < 30.0
    if records != "mariadb":
        assert (parts["lease store"].version or "").startswith("Redis ")


@pytest.mark.parametrize("rights", [ACL_COMMANDS, ACL_COMMANDS.replace("+scan +info", "")])
def test_few_rights_are_no_finding(makes: Makes, server: RedisServer, rights: str) -> None:
    with redis.Redis.from_url(server.url) as admin:
        admin.execute_command("ACL", "SETUSER", "few", "on", ">pw", "~*", *rights.split())
        try:
            url = server.url.replace("://", "://few:pw@")
            examination = doctor.examine(makes(leases_url=url))
        finally:
            admin.execute_command("ACL", "DELUSER", "few")
    assert [finding.text for finding in examination.findings] == []


def test_tables_that_are_missing_are_named(makes: Makes, leases_postgres_url: str) -> None:
    app = makes(leases_database_url=leases_postgres_url)
    assert "leases migrate" in found(app)["tables"].text


def test_rights_that_are_missing_are_named(makes: Makes, leases_postgres_url: str) -> None:
    owner = create_engine(leases_postgres_url, isolation_level="AUTOCOMMIT")
    Tables().create(owner)
    name = f"reads_{owner.url.database}"[:30]
    with owner.connect() as connection:
        connection.execute(text(f"CREATE ROLE {name} LOGIN PASSWORD 'p'"))
        connection.execute(text(f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {name}"))
    url = owner.url.set(username=name, password="p").render_as_string(hide_password=False)
    try:
        assert "INSERT, UPDATE and DELETE" in found(makes(leases_database_url=url))["rights"].text
    finally:
        processes.close_all()
        with owner.connect() as connection:
            connection.execute(text(f"DROP OWNED BY {name}"))
            connection.execute(text(f"DROP ROLE {name}"))
        owner.dispose()


@pytest.mark.parametrize(
    ("option", "value", "codes"),
    [
        ("maxmemory-policy", "allkeys-lru", {"evicting-lease-store", "evicting-broker"}),
        ("maxmemory-policy", "volatile-lru", {"evicting-lease-store"}),
        ("save", "", {"forgetful-broker"}),
    ],
)
def test_a_redis_that_deletes_or_forgets_is_named(
    makes: Makes, server: RedisServer, option: str, value: str, codes: set[str]
) -> None:
    with redis.Redis.from_url(server.url) as admin:
        (before,) = admin.config_get(option).values()
        admin.config_set(option, value)
        try:
            assert set(found(makes())) == codes
        finally:
            admin.config_set(option, before)


def test_a_primary_behind_sentinel_that_accepts_writes_alone_is_named(makes: Makes) -> None:
    with RedisSentinels() as sentinels:
        app = makes(leases_url=sentinels.url)
        assert "min-replicas-to-write" in found(app)["lonely-primary"].advice
        with redis.Redis(port=sentinels.primary.port) as admin:
            admin.config_set("min-replicas-to-write", 1)
        assert found(app) == {}


def test_two_environments_on_one_prefix_are_named(makes: Makes, server: RedisServer) -> None:
    app = makes()
    store = RedisLeaseStore.from_url(app.conf.leases_url, prefix=app.conf.leases_prefix)
    store.acquire(make_call("t:x|k", database="another"))
    assert found(app)["shared-prefix"].severity is Severity.ERROR
    store.close()


def test_runs_of_the_records_count_where_there_is_no_time_limit(makes: Makes) -> None:
    app = makes()
    records = LeaseClient.from_app(app, eager=False)._records
    records.migrate()
    request = make_call("t:examined.send|c:1", task="examined.send", key="c:1")
    closed(records, won(records, request, "database"))
    with records.database.engine.connect() as connection:
        connection.execute(
            text("UPDATE celery_leases_records SET started_at = finished_at - 200000000")
        )
    assert "examined.send ran for 200 s" in found(app)["short-visibility-timeout"].problem


def test_clocks_and_versions_are_named(makes: Makes, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = server_facts.RedisServerFacts("6.0.16", 60.0, -70.0, "noeviction", True)
    monkeypatch.setattr(server_checks, "redis_facts", lambda _: facts)
    seen = found(makes())
    assert set(seen) == {"old-redis", "slow-server", "clocks-apart"}
    assert "70.0 s behind" in seen["clocks-apart"].problem


def test_a_set_up_without_a_worker_is_named(makes: Makes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "worker_answers", answering.worker_answers)
    monkeypatch.setattr(doctor, "WORKER_TIMEOUT", 0.1)
    assert "published calls do not run" in found(makes())["no-worker"].problem
    assert "no-worker" not in found(makes(broker=f"redis://{NOWHERE}/0"))


def test_calls_that_nobody_publishes_are_named(
    makes: Makes, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = makes(task={"lease_outbox": "once"})
    task = app.tasks["examined.send"]
    task.delay(1)
    with app.connection_for_read() as connection:
        connection.default_channel.queue_purge("celery")  # as a worker that does not know the task
    assert found(app) == {}
    records = processes.process_of(app).records
    with records.database.engine.begin() as connection:
        long_ago = "published_at = 1, started_at = started_at - 7200000000"
        connection.execute(text(f"UPDATE celery_leases_records SET {long_ago}"))  # noqa: S608
    seen = found(app)["unrescued-calls"]
    assert f"{task.name}, key c:1, pending" in seen.problem
    assert "celery_leases.rescue" in seen.advice
    shown = LeaseClient.from_app(app).status("c:1")
    assert shown.message() == "Queued"
    assert "It has been queued for 2 hours" in shown.what_next()


def test_options_without_a_lease_are_named() -> None:
    bare = Celery("bare", broker="memory://", set_as_current=False)
    bare.conf.update(leases_url="database", leases_database_url="sqlite://")

    @bare.task(name="bare.send", lease_key="c:{n}", shared=False)
    def send(n: int) -> None:
        """Do nothing."""

    bare.finalize()
    assert "bare.send has lease_key" in found(bare)["options-without-lease"].problem


def test_a_worker_logs_a_line_for_each(makes: Makes, caplog: pytest.LogCaptureFixture) -> None:
    app = makes(
        result_backend=None, task={"autoretry_for": (OSError,)}, worker_prefetch_multiplier=0
    )
    worker = SimpleNamespace(app=app, pool_cls="threads", soft_time_limit=None, time_limit=None)
    startup.check_before_work(worker)
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [line.split(":")[0] for line in said] == [
        "task examined.send has autoretry_for",
        "worker_prefetch_multiplier=0",
    ]
    assert all("\n" not in line and "; " in line for line in said)


def test_a_timeout_below_the_run_of_a_plain_task_is_named(makes: Makes) -> None:
    """Of a task that acknowledges late, and whose time limit is not below the timeout."""
    app = makes()
    app.task(name="examined.early", shared=False)(nothing)
    app.task(name="examined.short", acks_late=True, time_limit=TIMEOUT, shared=False)(nothing)
    assert "plain-tasks-run-twice" not in found(app)
    app.task(name="examined.late", acks_late=True, shared=False)(nothing)
    (finding,) = (one for one in found(app).values() if one.code == "plain-tasks-run-twice")
    assert finding.problem.endswith("it runs twice: examined.late")
    app.conf.broker_transport_options = {}
    assert "plain-tasks-run-twice" not in found(app)


def test_greenlet_workers_know_their_pool(makes: Makes, caplog: pytest.LogCaptureFixture) -> None:
    limits = {"soft_time_limit": None, "time_limit": None}
    for pool, concurrency, said in (
        ("celery.concurrency.gevent:TaskPool", 10, 0),
        ("gevent", 11, 1),
    ):
        worker = SimpleNamespace(app=makes(), pool_cls=pool, concurrency=concurrency, **limits)
        startup.check_before_work(worker)
        assert sum("11 greenlets share 10" in line for line in caplog.messages) == said


def test_the_command_prints_its_findings_and_exits_with_their_severity(makes: Makes) -> None:

    def types(app: Celery, *words: str) -> Any:
        return CliRunner().invoke(leases, ["doctor", *words], obj=SimpleNamespace(app=app))

    well = types(makes())
    assert (well.exit_code, well.stderr) == (0, "")
    assert well.stdout.splitlines()[0].split() == [
        *("PART", "VERSION", "ROUND", "TRIP", "CLOCK", "ADDRESS")
    ]
    assert len(well.stdout.splitlines()) == 4
    assert types(makes(result_backend=None)).exit_code == 0
    ill = types(makes(worker_prefetch_multiplier=0))
    assert ill.exit_code == 1
    assert "warning: unlimited-prefetch" in ill.stdout
    assert "what happens   worker_prefetch_multiplier=0: the first worker" in ill.stdout
    assert "what to write  write app.conf.worker_prefetch_multiplier = 1" in ill.stdout
    report = json.loads(types(makes(worker_prefetch_multiplier=0), "--json").stdout)
    assert [finding["code"] for finding in report["findings"]] == ["unlimited-prefetch"]
