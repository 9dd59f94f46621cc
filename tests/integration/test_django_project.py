"""A small project of Django's: its own test command, and the tables that its migrations make."""

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, inspect, text

from celery_leases.stores.sql.connections import engine_for
from celery_leases.stores.sql.schema import Tables
from tests.support.commands import run_command
from tests.support.plugin import WorkerFactory
from tests.unit.doc_pages import ROOT, blocks, page

PROJECT = Path(__file__).parents[1] / "projects" / "django"
IMPORTED = (
    *("django.core.management", "django.core.management.commands.migrate", "django.core.checks"),
    *("django.contrib.admin.decorators", "django.contrib.messages", "django.core.handlers.wsgi"),
    *("django.db.migrations.autodetector", "django.db.models.sql.compiler", "django.forms"),
    *("django.db.backends.sqlite3.base", "django.db.backends.postgresql.base", "django.urls"),
    *("django.template.defaultfilters", "django.views.generic.base"),
)
"""What each command finds imported: what needs no settings, and nothing of ``django.test``, because
the package looks whether that was imported.
"""
Manage = Callable[..., str]


@pytest.fixture(params=["sqlite", "postgresql", "mariadb"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'shop.db'}"
    name = "leases_postgres_url" if request.param == "postgresql" else "leases_mariadb_url"
    return str(request.getfixturevalue(name))


def manage_with(database_url: str, **env: str) -> Manage:
    def manage(*command: str, code: int = 0) -> str:
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("CELERY_", "DJANGO_"))
        }
        done = run_command(
            [sys.executable, "manage.py", *command],
            cwd=PROJECT,
            env={**inherited, "SHOP_DATABASE_URL": database_url, **env},
            timeout=100,
            modules=IMPORTED,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    return manage


@pytest.fixture
def manage(database_url: str) -> Manage:
    return manage_with(database_url)


def test_the_projects_own_tests_pass(manage: Manage) -> None:
    said = manage("test", "--noinput", "orders.tests")
    assert "Destroying test database" in said
    assert "\nOK" in said


def test_the_admin_shows_records_and_acts_on_them(leases_postgres_url: str) -> None:
    said = manage_with(leases_postgres_url)("test", "--noinput")
    assert "Destroying test database" in said
    assert "\nOK\n" in said


SETTINGS = "SHOP_SETTINGS"
ELSEWHERE = {"CELERY_LEASES": {"url": "redis://127.0.0.1:1/0"}}
"""A lease store that does not answer."""


def test_tests_without_a_test_database_do_not_meet_the_configured_one() -> None:
    manage = manage_with(
        "postgresql://nobody@127.0.0.1:1/shop", **{SETTINGS: json.dumps(ELSEWHERE)}
    )
    said = manage("test", "orders.tests.WithoutDatabaseTests")
    assert "Ran 1 test" in said
    assert "\nOK" in said


def test_leases_of_tests_are_in_the_test_database(leases_postgres_url: str) -> None:
    manage = manage_with(leases_postgres_url, **{SETTINGS: json.dumps(ELSEWHERE)})
    said = manage("test", "--noinput", "orders.tests.CommittingTests")
    assert "\nOK" in said


WITHOUT_MIGRATIONS = """
from shop.settings import *


class MIGRATION_MODULES:
    def __contains__(self, label):
        return True

    def __getitem__(self, label):
        return None


MIGRATION_MODULES = MIGRATION_MODULES()
"""
"""As pytest-django's option --nomigrations has it."""


def test_without_migrations_tests_have_our_tables(leases_postgres_url: str, tmp_path: Path) -> None:
    (tmp_path / "quick.py").write_text(WITHOUT_MIGRATIONS)
    env = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "DJANGO_SETTINGS_MODULE": "quick"}
    said = manage_with(leases_postgres_url, **env)(
        "test", "--noinput", "orders.tests.CommittingTests"
    )
    assert "\nOK" in said


def checked(database_url: str, *command: str, code: int = 0, **settings: Any) -> dict[str, str]:
    """The messages of `manage.py check` by their ids, with these *settings*."""
    said = manage_with(database_url, **{SETTINGS: json.dumps(settings)})(
        "check", *command, code=code
    )
    found = re.findall(
        r"\(celery_leases\.(\w+)\) (.*?)(?=\n\?:|\nSystem check|\n\n|\Z)", said, re.DOTALL
    )
    return dict(found)


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'shop.db'}"


def test_a_healthy_project_passes_the_checks(sqlite_url: str) -> None:
    assert checked(sqlite_url) == {}
    assert list(checked(sqlite_url, "--database", "default")) == ["W006"]
    manage_with(sqlite_url)("migrate", "--verbosity", "0")
    assert checked(sqlite_url, "--database", "default") == {}


def test_records_and_brokers_that_do_not_fit_are_named(sqlite_url: str) -> None:
    found = checked(
        sqlite_url,
        CELERY_BROKER_URL="redis://:secret@elsewhere/0",
        CELERY_LEASES={"url": "database"},
        CELERY_LEASES_DATABASE_URL="sqlite:///elsewhere.db",
    )
    assert found.keys() == {"W001", "W005"}
    assert "not in DATABASES['default']" in found["W001"]
    assert "redis://elsewhere/0 is on another machine" in found["W005"]
    assert "secret" not in str(found)


def test_a_schema_that_django_does_not_look_into_is_named(sqlite_url: str) -> None:
    found = checked(sqlite_url, CELERY_LEASES_DATABASE_SCHEMA="leases")
    assert found.keys() == {"W001"}
    assert "The records are in the schema leases" in found["W001"]


def test_checks_name_tasks_whose_options_have_no_effect(sqlite_url: str) -> None:
    found = checked(sqlite_url, CELERY_BEAT_SCHEDULE={}, MORE_APPS=["faulty"])
    assert found.keys() == {"W003", "W004", "W007"}
    assert "faulty.tasks.retrying" in found["W003"]
    assert "Task faulty.tasks.bare has lease_key" in found["W004"]
    assert found["W007"].startswith("faulty.tasks calls delay_in()")


def test_checks_name_calls_inside_a_transaction(sqlite_url: str) -> None:
    settings: dict[str, Any] = {"MORE_APPS": ["faulty"], "ROOT_URLCONF": "faulty.urls"}
    found = checked(sqlite_url, **settings)["W009"]
    assert re.findall(r"(\S+)\(\) in line (\d+)", found) == [
        ("tasks.charge.delay", "21"),
        ("tasks.charge.delay", "27"),
    ]
    assert found.startswith("faulty.views publishes")
    found = checked(sqlite_url, ATOMIC_REQUESTS=True, **settings)["W009"]
    assert re.findall(r"(\S+)\(\) in line (\d+)", found) == [
        ("tasks.charge.delay", "13"),
        ("refund.apply_async", "14"),
        ("tasks.charge.delay", "21"),
        ("tasks.charge.delay", "27"),
    ]
    assert "W009" not in checked(sqlite_url, ATOMIC_REQUESTS=True)


def test_views_submit_and_show_the_status(sqlite_url: str) -> None:
    said = manage_with(sqlite_url)("test", "--noinput", "orders.test_web")
    assert "\nOK" in said


NIGHTLY = {"task": "faulty.tasks.nightly", "schedule": 86_400}
ENTRY_IN_TABLES = """
from django_celery_beat.models import IntervalSchedule, PeriodicTask
for name, one_off in (("each night", False), ("one night", True)):
    every, _ = IntervalSchedule.objects.get_or_create(every=1, period="days")
    PeriodicTask.objects.create(name=name, task="faulty.tasks.nightly", interval=every, one_off=one_off)
"""


def test_checks_name_tasks_of_beat_that_would_run_once(sqlite_url: str) -> None:
    """In the settings, and in the tables of django-celery-beat if they may be read."""
    pytest.importorskip("django_celery_beat")
    found = checked(sqlite_url, CELERY_BEAT_SCHEDULE={"settings": NIGHTLY}, MORE_APPS=["faulty"])
    assert "Beat calls faulty.tasks.nightly with the same key each time" in found["W008"]
    assert 'HINT: Write lease_runs="each"' in found["W008"]
    settings: dict[str, Any] = {"MORE_APPS": ["faulty", "django_celery_beat"]}
    manage = manage_with(sqlite_url, **{SETTINGS: json.dumps(settings)})
    assert "W008" not in checked(sqlite_url, "--database", "default", **settings)
    manage("migrate", "--verbosity", "0")
    manage("shell", "--command", ENTRY_IN_TABLES)
    assert "W008" not in checked(sqlite_url, **settings)
    found = checked(sqlite_url, "--database", "default", **settings)
    assert "schedule: each night)" in found["W008"]
    assert "schedule: each night)" in manage("leases", "doctor", code=1)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"CELERY_LEASES": {"database": "elsewhere"}},
            "CELERY_LEASES['database']='elsewhere' is not an alias",
        ),
        ({"CELERY_LEASES": {"tll": "30s"}}, "unknown setting leases_tll; did you mean leases_ttl?"),
        ({"MORE_APPS": ["wrong"]}, "lease_ttl"),
        (
            {"CELERY_LEASES_URL": "redis://localhost/1"},
            "CELERY_LEASES['url'] and the setting LEASES_URL",
        ),
    ],
)
def test_wrong_settings_are_errors(sqlite_url: str, settings: dict[str, Any], said: str) -> None:
    found = checked(sqlite_url, code=1, **settings)
    assert said in found["E001"]


def test_the_command_line_is_a_command_of_the_project(sqlite_url: str) -> None:
    manage = manage_with(sqlite_url)
    manage("migrate", "--verbosity", "0")
    assert json.loads(
        manage("leases", "--settings", "shop.settings", "show", "charge:1", "--json", code=1)
    )
    assert "not a leased task of this app" in manage("leases", "list", "--task", "nobody", code=2)
    assert "rate_limited" in manage(
        "leases", "explain", "--task", "orders.tasks.charge", "--status", "429"
    )


def reflected(engine: Engine) -> dict[str, Any]:
    found = inspect(engine)
    return {
        name: {
            "columns": [
                {**column, "type": repr(column["type"])} for column in found.get_columns(name)
            ],
            "key": found.get_pk_constraint(name)["constrained_columns"],
            "indexes": sorted(_index_text(index) for index in found.get_indexes(name)),
            "options": found.get_table_options(name)
            if engine.dialect.name in ("mysql", "mariadb")
            else None,
        }
        for name in found.get_table_names()
        if name.startswith("celery_leases")
    }


def _index_text(index: Any) -> str:
    """The condition of a partial index on SQLite is an object without a text of its own."""
    options = {name: str(value) for name, value in index.get("dialect_options", {}).items()}
    return str({**index, "dialect_options": options})


def test_migrations_make_the_commands_tables(database_url: str, manage: Manage) -> None:
    manage("migrate", "--verbosity", "0")
    engine = create_engine(engine_for(database_url).url)
    by_django = reflected(engine)
    manage("makemigrations", "--check", "--dry-run")
    manage("migrate", "celery_leases", "zero", "--verbosity", "0")
    assert reflected(engine) == {}
    engine.dispose()
    ours = engine_for(database_url)
    Tables().create(ours)
    ours.dispose()
    assert by_django == reflected(engine)
    assert len(by_django) == 5
    engine.dispose()


def test_every_check_is_explained() -> None:
    source = (ROOT / "celery_leases" / "django" / "checks.py").read_text()
    given = set(re.findall(r'"celery_leases\.([EW]\d+)"', source))
    assert given == set(re.findall(r"### celery_leases\.([EW]\d+)", page("warnings")))


BUY = """
from django.db import connection, transaction
from orders.models import Order
from orders.tasks import charge
with transaction.atomic():
    Order.objects.create(number=1)
    charge.delay_in(connection, 1)
charge.delay_on_commit(1)
"""

EARLY = """
import time
from django.db import transaction
from orders.models import Order
from orders.tasks import late
with transaction.atomic():
    Order.objects.create(number=2)
    late.delay(2)
    while late.lease_status(2).error is None:
        time.sleep(0.02)
"""
"""Commits when the worker has not found the row."""


def test_a_worker_runs_what_a_transaction_has_enqueued(
    worker_factory: WorkerFactory, leases_redis_url: str, leases_postgres_url: str
) -> None:
    env = {
        "SHOP_BROKER_URL": leases_redis_url,
        "SHOP_DATABASE_URL": leases_postgres_url,
        SETTINGS: json.dumps({"MORE_APPS": ["faulty"]}),
    }
    manage = manage_with(leases_postgres_url, **env)
    manage("migrate", "--verbosity", "0")
    worker = worker_factory("shop", broker=leases_redis_url, cwd=PROJECT, env=env)
    worker.wait_for_log(r"task faulty\.tasks\.retrying has autoretry_for")
    manage("shell", "-c", BUY)
    worker.wait_for_log(r"key charge:1: attempt 1 returned", timeout=60)
    worker.wait_for_log(r"key charge:1: answered with the saved result", timeout=60)
    manage("shell", "-c", EARLY)
    worker.wait_for_log(r"key late:2: attempt 1 failed .* by rule not-there-yet", timeout=60)
    worker.wait_for_log(r"key late:2: attempt \d returned", timeout=60)
    shown = json.loads(
        manage("leases", "show", "charge:1", "--task", "orders.tasks.charge", "--json")
    )
    assert (shown["state"], shown["result"]) == ("done", {"order": 1, "attempt": 1})
    engine = engine_for(leases_postgres_url)
    with engine.connect() as connection:
        assert (
            connection.execute(
                text("SELECT charges FROM orders_order WHERE number = 1")
            ).scalar_one()
            == 1
        )
    engine.dispose()


def test_the_examples_of_the_page_pass(tmp_path: Path) -> None:
    settings, task, configured, views, buying, testing = blocks(page("django"), "python")
    assert "celery_leases.django" in settings
    names: dict[str, Any] = {}
    exec(configured, names)  # noqa: S102 - our own page
    told = tmp_path / "told"
    told.mkdir()
    (told / "__init__.py").touch()
    (told / "tasks.py").write_text(task)
    (told / "urls.py").write_text(f"from told.tasks import charge\n{views}")
    called = "with self.captureOnCommitCallbacks(execute=True):\n            buy(Order(number=8))"
    (told / "tests.py").write_text(
        f"from orders.models import Order\nfrom told.tasks import charge\n{buying}{testing}\n"
        f"    def test_buying(self):\n        {called}\n"
        "        assert charge.lease_status(8).state == 'done'\n"
        "    def test_paying(self):\n"
        "        with self.captureOnCommitCallbacks(execute=True):\n"
        "            assert self.client.post('/pay/9').json()['message'] == 'Queued'\n"
        "        assert self.client.post('/pay/9').json()['result'] == {'order': 9}\n"
        "        assert self.client.get('/leases/charge:9').status_code == 403\n"
    )
    given = {"MORE_APPS": ["told"], "CELERY_TASK_ALWAYS_EAGER": True, "ROOT_URLCONF": "told.urls"}
    given["CELERY_LEASES"] = names["CELERY_LEASES"]
    env = {SETTINGS: json.dumps(given), "PYTHONPATH": str(tmp_path)}
    said = manage_with(f"sqlite:///{tmp_path / 'shop.db'}", **env)("test", "told")
    assert "Ran 3 tests" in said
