"""What a worker checks before it starts: missing rights, tables with another layout, a Redis
that evicts keys.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery, _state
from sqlalchemy import Connection, Engine, create_engine, make_url, text

from celery_leases import LeaseClient, LeasedTask
from celery_leases.decide.answers import Renewal, RenewalResult
from celery_leases.decide.repairs import NewCall
from celery_leases.keys import CallKey
from celery_leases.record import State
from celery_leases.stores.sql import migrations
from celery_leases.stores.sql.connections import engine_for
from celery_leases.stores.sql.effects import SqlEffectStore
from celery_leases.stores.sql.leases import DatabaseLeaseStore
from celery_leases.stores.sql.outbox import Outbox
from celery_leases.stores.sql.records import SqlRecordStore
from celery_leases.stores.sql.schema import Tables
from celery_leases.stores.sql.transactions import JoinedTransaction
from celery_leases.testing.contracts.calls import fresh_key, make_call
from celery_leases.testing.contracts.effect_case import finished, sent
from celery_leases.testing.contracts.record_case import closed, outcome, row, won
from celery_leases.worker import processes
from celery_leases.worker.checks import startup
from tests.contract.sql_stores import operator_of
from tests.support.servers import RedisServer
from tests.unit.doc_pages import blocks, page, section

TABLES = ("records", "effects", "marks", "groups")
PASSWORD = "a-secret-password"


class AWorker:
    """The attributes of a starting worker that are read."""

    pool_cls = "threads"
    soft_time_limit = time_limit = None

    def __init__(self, app: Celery) -> None:
        self.app = app


@pytest.fixture(scope="module")
def server(leases_redis: RedisServer) -> Iterator[RedisServer]:
    with RedisServer() as started:
        yield started


@pytest.fixture
def app() -> Iterator[Celery]:
    made = Celery("checked", broker="memory://", set_as_current=False)

    @made.task(base=LeasedTask, name="checked.send", lease_key="c:{number}", shared=False)
    def send(number: int) -> None:
        """Do nothing."""

    made.finalize()
    yield made
    processes.close_all()


def started(app: Celery, **conf: Any) -> None:
    app.conf.update(conf)
    processes.close_all()
    startup.check_before_work(AWorker(app))


def refusal(app: Celery, **conf: Any) -> str:
    with pytest.raises(SystemExit) as caught:
        started(app, **conf)
    return str(caught.value)


def migrated(url: str) -> Engine:
    engine = engine_for(url)
    Tables().create(engine)
    return engine


@pytest.fixture(params=["postgres", "mariadb"])
def owner(request: pytest.FixtureRequest) -> Engine:
    return migrated(request.getfixturevalue(f"leases_{request.param}_url"))


def a_user(owner: Engine, *, rights: str = "SELECT", extra: str = "") -> str:
    mysql = owner.dialect.name != "postgresql"
    name = f"few_{owner.url.database}"[:30]
    with owner.connect() as connection:
        if mysql:
            connection.execute(
                text(f"CREATE OR REPLACE USER '{name}'@'%' IDENTIFIED BY '{PASSWORD}'")
            )
            connection.execute(text(f"GRANT {rights} ON {owner.url.database}.* TO '{name}'@'%'"))
        else:
            connection.execute(text(f"CREATE ROLE {name} LOGIN PASSWORD '{PASSWORD}' {extra}"))
            connection.execute(text(f"GRANT {rights} ON ALL TABLES IN SCHEMA public TO {name}"))
    return owner.url.set(username=name, password=PASSWORD).render_as_string(hide_password=False)


def granted(owner: Engine, name: str, statements: str) -> str:
    """The URL of a user with the rights that *statements* grant to ``worker``."""
    mysql = owner.dialect.name != "postgresql"
    on_mysql = f"CREATE OR REPLACE USER '{name}'@'%' IDENTIFIED BY '{PASSWORD}'"
    with owner.connect() as connection:
        connection.execute(
            text(on_mysql if mysql else f"CREATE ROLE {name} LOGIN PASSWORD '{PASSWORD}'")
        )
        for statement in statements.strip().split(";\n"):
            given = (
                statement.replace("billing.", f"{owner.url.database}.")
                .replace("worker", name)
                .removesuffix(";")
            )
            connection.execute(text(given))
    return owner.url.set(username=name, password=PASSWORD).render_as_string(hide_password=False)


def test_the_rights_that_are_documented_are_enough(app: Celery, owner: Engine) -> None:
    """For everything that workers and clients do."""
    on_postgres, on_mysql = blocks(section(page("databases"), "Rights"), "sql")
    mysql = owner.dialect.name != "postgresql"
    url = granted(owner, "worker_" + str(owner.url.database), on_mysql if mysql else on_postgres)
    started(app, leases_url="database", leases_database_url=url)
    records = SqlRecordStore(engine_for(url))
    records.check()
    leases, effects = DatabaseLeaseStore(records), SqlEffectStore(records.database, records.tables)
    client = operator_of(leases, records)
    record = won(records, make_call(fresh_key()), leases.name)
    assert leases.renew([Renewal(record.stored_key, record.owner, 15.0)]) == [RenewalResult.OURS]
    assert effects.save_progress(record, '{"generation": 0, "value": "1", "positions": {}}')
    assert finished(effects, sent(effects, record))
    closed(records, record)
    assert client.status(record.stored_key).state == "done"
    assert client.page().statuses
    assert client.close_group("g", 60.0).state == "closed"
    assert client.groups()
    assert client.open_group("g")
    assert leases.swap_mark(record.stored_key, "m", None, "v", 60.0)
    assert client.forget(record.stored_key).state == "absent"
    while records.purge(100):
        pass
    records.purge_in_turn(100, 60.0)
    few = "GRANT SELECT, INSERT, UPDATE ON {}celery_leases_records TO {}"
    few = few.format(*(("billing.", "'worker'@'%'") if mysql else ("", "worker")))
    own = create_engine(granted(owner, "own_" + str(owner.url.database), few))
    record = won(records, make_call(fresh_key()), leases.name)
    with own.begin() as connection:
        transaction = JoinedTransaction(connection, records)
        key = CallKey("enqueued", fresh_key(), None, None)
        assert transaction.write(
            Outbox(records).enqueue_writes(NewCall("t", key, "first", "{}", 7.0, 60.0)), "k"
        )
        transaction.guard(record)
        transaction.complete(record, outcome(record, result="1"))
    assert row(records, record.stored_key).state is State.DONE
    records.database.close()


def test_the_rights_for_migrations_that_are_documented_are_enough(leases_mariadb_url: str) -> None:
    asked = (
        section(page("databases"), "Rights").partition("a user with ")[2].partition(" beside")[0]
    )
    rights = ", ".join([*re.findall(r"`([A-Z ]+)`", asked), "SELECT, INSERT, UPDATE, DELETE"])
    url = a_user(engine_for(leases_mariadb_url), rights=rights)
    records = SqlRecordStore(engine_for(url))
    assert records.migrate().before is None

    def up(connection: Connection, tables: Tables) -> None:
        connection.execute(text(f"ALTER TABLE {tables.records.name} ADD COLUMN colour INTEGER"))
        connection.execute(text(f"CREATE INDEX by_colour ON {tables.records.name} (colour)"))

    assert migrations.migrate(records.database.engine, records.tables, (up,)).after == 2
    records.database.close()


@pytest.mark.parametrize("rights", ["SELECT", "SELECT, INSERT, UPDATE", "SELECT, UPDATE, DELETE"])
def test_a_user_who_may_not_write_stops_the_worker(app: Celery, owner: Engine, rights: str) -> None:
    said = refusal(app, leases_url="database", leases_database_url=a_user(owner, rights=rights))
    assert "SELECT, INSERT, UPDATE and DELETE on celery_leases_records" in said
    assert PASSWORD not in said


def test_a_read_only_role_stops_the_worker(app: Celery, leases_postgres_url: str) -> None:
    owner = migrated(leases_postgres_url)
    url = a_user(owner, rights="ALL")
    with owner.connect() as connection:
        connection.execute(
            text(f"ALTER ROLE {make_url(url).username} SET default_transaction_read_only = on")
        )
    assert "whose server and user may write" in refusal(
        app, leases_url="database", leases_database_url=url
    )


@pytest.mark.parametrize("table", TABLES)
def test_a_column_that_is_missing_stops_the_worker(app: Celery, owner: Engine, table: str) -> None:
    with owner.connect() as connection:
        columns = {"records": "reason", "effects": "reference", "marks": "value", "groups": "slots"}
        column = columns.get(table, "version")
        connection.execute(text(f"ALTER TABLE celery_leases_{table} DROP COLUMN {column}"))
    said = refusal(app, leases_url="database", leases_database_url=_url(owner))
    assert column in said
    assert f"change celery_leases_{table} to what" in said
    assert "leases migrate --sql" in said


def test_a_sqlite_file_that_has_another_form_stops_the_worker(app: Celery, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'records.db'}"
    with migrated(url).connect() as connection:
        connection.execute(text("ALTER TABLE celery_leases_records DROP COLUMN reason"))
    assert "reason" in refusal(app, leases_url="database", leases_database_url=url)


def test_a_sqlite_file_that_another_process_writes_does_not(app: Celery, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'records.db'}"
    migrated(url)
    other = create_engine(url)
    with other.connect() as connection:
        connection.exec_driver_sql("BEGIN IMMEDIATE")
        started(app, leases_url="database", leases_database_url=url)
        connection.exec_driver_sql("ROLLBACK")


def test_a_web_process_may_ask_with_the_right_to_read_alone(owner: Engine) -> None:
    with closing(LeaseClient("database", a_user(owner))) as leases:
        assert leases.status("c:1", task="checked.send").state == "absent"


@pytest.mark.parametrize("server", ["postgres", "mariadb", "sqlite"])
def test_a_worker_starts_on_tables_that_are_in_use(
    app: Celery,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    server: str,
) -> None:
    """The checks lock no row, not even the mark that identifies the database."""
    url = (
        f"sqlite:///{tmp_path / 'r.db'}"
        if server == "sqlite"
        else request.getfixturevalue(f"leases_{server}_url")
    )
    migrated(url)
    named = SqlRecordStore(engine_for(url)).identity()
    started(app, leases_url="database", leases_database_url=url)
    assert not caplog.records
    with engine_for(url).connect() as connection:
        assert connection.execute(
            text("SELECT value FROM celery_leases_marks")
        ).scalars().all() == [named]


def _url(engine: Engine) -> str:
    return engine.url.render_as_string(hide_password=False)


@pytest.fixture
def in_redis(app: Celery, server: RedisServer, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    def settings(*words: str) -> dict[str, Any]:
        user = ""
        if words:
            with redis.Redis.from_url(server.url) as admin:
                admin.execute_command(
                    "ACL", "SETUSER", "few", "reset", "on", f">{PASSWORD}", *words
                )
            user = f"few:{PASSWORD}@"
        url = server.url.replace("redis://", f"redis://{user}")
        return {"leases_url": url, "leases_database_url": f"sqlite:///{tmp_path / 'records.db'}"}

    return settings


@pytest.mark.parametrize("missing", ["-evalsha", "-eval", "-set", "~other:*"])
def test_a_user_of_the_lease_store_without_its_rights_stops_the_worker(
    app: Celery, server: RedisServer, in_redis: Callable[..., dict[str, Any]], missing: str
) -> None:
    with redis.Redis.from_url(server.url) as admin:
        admin.script_flush()
    words = [
        "+@all",
        missing if missing.startswith("~") else "~*",
        *([missing] if missing.startswith("-") else []),
    ]
    said = refusal(app, **in_redis(*words))
    assert "+evalsha +eval +get +set" in said
    assert PASSWORD not in said


def test_a_wrong_password_stops_it(app: Celery, in_redis: Callable[..., dict[str, Any]]) -> None:
    conf = in_redis("+@all", "~*")
    conf["leases_url"] = conf["leases_url"].replace(PASSWORD, "another")
    assert "user and password of the server into leases_url" in refusal(app, **conf)


def test_a_server_without_scripts_stops_the_worker(app: Celery, tmp_path: Path) -> None:
    with RedisServer(options=("--rename-command", "EVALSHA", "")) as bare:
        said = refusal(
            app, leases_url=bare.url, leases_database_url=f"sqlite:///{tmp_path / 'records.db'}"
        )
    assert "leases need EVALSHA and EVAL" in said


@pytest.mark.parametrize(
    ("words", "warned"),
    [((), True), (("+@all", "~*", "-info"), True), (("+@all", "~*", "-info", "-config"), False)],
)
def test_a_lease_store_that_evicts_is_a_warning(
    app: Celery,
    server: RedisServer,
    in_redis: Callable[..., dict[str, Any]],
    caplog: pytest.LogCaptureFixture,
    words: tuple[str, ...],
    warned: bool,
) -> None:
    """The policy is read by INFO or CONFIG."""
    with redis.Redis.from_url(server.url) as admin:
        admin.config_set("maxmemory-policy", "allkeys-lru")
        try:
            started(app, **in_redis(*words))
        finally:
            admin.config_set("maxmemory-policy", "noeviction")
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [
        ("maxmemory-policy allkeys-lru" in line, "maxmemory-policy noeviction" in line)
        for line in said
    ] == ([(True, True)] if warned else [])


def test_stores_that_are_silent_are_warnings(app: Celery, caplog: pytest.LogCaptureFixture) -> None:
    nowhere = "127.0.0.1:9"
    started(
        app,
        leases_url=f"redis://{nowhere}/0",
        leases_database_url=f"postgresql+psycopg://{nowhere}/x",
    )
    said = " ".join(record.getMessage() for record in caplog.records)
    assert "the records database does not answer yet" in said
    assert "the lease store does not answer yet" in said


def test_options_on_a_task_without_a_lease_are_a_warning(
    app: Celery, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_state, "_on_app_finalizers", set())  # shared tasks of other tests
    bare = Celery("bare", broker="memory://", set_as_current=False)

    @bare.task(name="bare.send", lease_key="c:{number}", lease_ttl=30, shared=False)
    def send(number: int) -> None:
        """Do nothing."""

    bare.finalize()
    startup.check_before_work(AWorker(bare))
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith(
        "task bare.send has lease_key, lease_ttl, but runs without a lease; write base=LeasedTask"
    )


def test_a_task_that_beat_would_run_once_is_a_warning(
    app: Celery, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    entry = {"task": "checked.send", "schedule": 60.0, "args": (1,)}
    url = f"sqlite:///{tmp_path / 'records.db'}"
    conf = {"leases_url": "database", "leases_database_url": url}
    started(app, beat_schedule={"hourly": entry}, **conf)
    [warning] = [line for line in caplog.messages if "beat calls checked.send" in line]
    assert "schedule: hourly" in warning
    assert 'write lease_runs="each"' in warning
