"""The pages about Sentry, OpenTelemetry and changes of a running system: their examples run,
eagerly.
"""

import asyncio
import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from celery_leases import signals, testing
from celery_leases.events import AttemptSettled, CrashSeen
from celery_leases.options import OPTION_NAMES
from celery_leases.record import Failure
from celery_leases.settings import _SETTINGS
from celery_leases.stores.sql.schema import Tables
from celery_leases.testing.crash_points import PACKAGE
from tests.unit.celery_apps import apps
from tests.unit.doc_pages import blocks, eagerly, executed, markdown_rows, page, section

DATABASE = "postgresql+psycopg://localhost/billing"


@pytest.fixture
def reports() -> Iterator[list[dict[str, Any]]]:
    """What Sentry would be sent; its client of before is back afterwards."""
    sentry_sdk = pytest.importorskip(
        "sentry_sdk", reason="Sentry's SDK is not installed: it is in the group test"
    )
    before, sent = sentry_sdk.get_global_scope().client, []

    def keep(event: dict[str, Any], _: Any) -> None:
        sent.append(event)

    real = sentry_sdk.init

    def init(dsn: None, integrations: Any) -> None:
        assert dsn is None
        assert [one.identifier for one in integrations] == ["celery"]
        # Without its integrations, which would change Celery for the tests after this one.
        real(dsn="http://key@127.0.0.1:9/1", before_send=keep, default_integrations=False)

    sentry_sdk.init = init
    yield sent
    sentry_sdk.init = real
    sentry_sdk.get_global_scope().set_client(before)


def test_the_sentry_page_reports_what_only_a_person_can_mend(reports, tmp_path) -> None:
    (source,) = blocks(page("sentry"), "python")
    with executed(eagerly(source, tmp_path, DATABASE), "billing") as names:
        try:
            assert names["send_invoice"].delay(7).get() == {"customer": 7}
            told: Any = {"task": "billing.send_invoice", "key": "invoice:7", "call_id": "c"}
            for state, operator in (
                ("cooling", False),
                ("cooling", True),
                ("failed", False),
                ("uncertain", False),
            ):
                failure = Failure("E", "secret", "a-rule", "out_of_quota", operator=operator)
                ended: Any = {"ended": "failed", "attempt": 1, "runtime": 0.1, "failure": failure}
                signals.Announcer().observe(AttemptSettled(**told, state=state, **ended))
            signals.Announcer().observe(CrashSeen(**told, crashes=2, host="h"))
        finally:
            signals.attempt_settled.disconnect(names["report_what_only_a_person_can_mend"])
            signals.crash_seen.disconnect(names["report_a_crash"])
    assert [event["message"] for event in reports] == [
        "billing.send_invoice is cooling: out_of_quota",
        "billing.send_invoice is failed: out_of_quota",
        "billing.send_invoice is uncertain: out_of_quota",
        "billing.send_invoice: 2 crashes in a row",
    ]
    assert {event["tags"]["lease_key"] for event in reports} == {"invoice:7"}
    assert "secret" not in str(reports)


def test_the_errors_that_sentry_does_not_see_are_those_that_a_task_throws(tmp_path: Path) -> None:
    (row,) = (row for row in markdown_rows(page("sentry")) if "throws" in row[1])
    (source,) = blocks(page("opentelemetry"), "python")
    pytest.importorskip("opentelemetry.sdk", reason="the SDK of OpenTelemetry is not installed")
    with executed(eagerly(source, tmp_path, DATABASE), "billing") as names:
        thrown = {kind.__name__ for kind in names["send_invoice"].throws}
    assert set(re.findall(r"`(\w+)`", row[0])) == thrown


def test_the_opentelemetry_page_makes_spans_of_its_own_in_the_body(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="the SDK of OpenTelemetry is not installed")
    (source,) = blocks(page("opentelemetry"), "python")
    with executed(eagerly(source, tmp_path, DATABASE), "billing") as names:
        assert names["send_invoice"].delay(7).get() == {"customer": 7}


def test_what_was_done_under_an_old_template_is_not_done_again(tmp_path: Path) -> None:
    _, source = blocks(page("deploy"), "python")
    template = '"invoice:{tenant}:{customer}:{month}"'
    assert template in source
    old = source.replace(template, '"invoice:{customer}:{month}"')
    old = old.replace("before = LeaseClient", "return _old()\n    before = LeaseClient")
    old += "\n_old = lambda: {'made': 'before'}\n"
    with executed(eagerly(old, tmp_path, DATABASE), "billing") as names:
        assert names["send_invoice"].delay("t", 1, "04").get() == {"made": "before"}
    with executed(eagerly(source, tmp_path, DATABASE), "billing") as names:
        send = names["send_invoice"]
        assert send.lease_status("t", 1, "04").state == "absent"
        assert send.delay("t", 1, "04").get() == {"made": "before"}
        assert send.delay("t", 2, "04").get() == {"customer": 2, "mailed": "04"}


def test_a_record_is_kept_for_longer_on_request(tmp_path: Path) -> None:
    from celery_leases import LeaseClient, errors

    first, _ = blocks(page("deploy"), "python")
    for theirs, ours in (
        (DATABASE, f"sqlite:///{tmp_path / 'records.db'}"),
        ("redis://localhost/2", "database"),
    ):
        assert theirs in first
        first = first.replace(theirs, ours)
    with pytest.raises(errors.UnknownKey):
        exec(first, {})  # noqa: S102 - our own page
    assert callable(LeaseClient.resolve)


def test_the_tables_of_changes_name_what_there_is() -> None:
    known = {f"lease_{name}" for name in OPTION_NAMES} | {
        f"leases_{name}" for name in (*_SETTINGS, *OPTION_NAMES)
    }
    for title in ("What is safe in any order", "What needs all workers stopped"):
        rows = markdown_rows(section(page("deploy"), title).split("\n### ")[0])[1:]
        assert rows
        for row in rows:
            assert set(re.findall(r"`(\w+)`", row[0])) <= known, row


__all__ = ["apps"]

EAGER = {
    "broker_url": "memory://",
    "task_always_eager": True,
    "leases_url": "database",
    "leases_eager_stores": True,
}


def test_the_flask_page_makes_an_invoice_once(apps, tmp_path, monkeypatch) -> None:
    pytest.importorskip(
        "flask", reason="Flask is not installed: it is in the dependency group test"
    )
    pytest.importorskip(
        "flask_sqlalchemy", reason="Flask-SQLAlchemy is not installed: it is in the group test"
    )
    billing: Any = ModuleType("billing")
    monkeypatch.setitem(sys.modules, "billing", billing)
    source = "".join(blocks(page("flask"), "python"))
    exec(compile(source, "billing", "exec"), billing.__dict__)  # noqa: S102 - our own page
    url = f"sqlite:///{tmp_path / 'billing.db'}"
    app = billing.create_app(
        SQLALCHEMY_DATABASE_URI=url, CELERY=EAGER, SECRET_KEY="k", TESTING=True
    )
    app.add_url_rule("/payments", view_func=billing.payment, methods=["POST"])
    with app.app_context():
        billing.db.create_all()
    http = app.test_client()
    sent = http.post("/invoices/7")
    assert sent.status_code == 202
    assert http.get(sent.headers["Location"]).status_code == 403
    with http.session_transaction() as session:
        session["user"] = 1
    assert http.get(sent.headers["Location"]).json["result"] == {"invoice": 1}
    assert http.post("/invoices/7").json["result"] == {"invoice": 1}
    paid = [
        http.post("/payments", json={"amount": 3}, headers={"Idempotency-Key": "k"})
        for _ in range(2)
    ]
    assert [one.status_code for one in paid] == [202, 200]
    assert app.test_cli_runner().invoke(args=["leases", "list"]).output.count("invoice:7") == 1


def test_the_fastapi_page_makes_an_invoice_and_waits_for_it(apps, tmp_path, capsys) -> None:
    pytest.importorskip(
        "fastapi", reason="FastAPI is not installed: it is in the dependency group test"
    )
    httpx = pytest.importorskip(
        "httpx", reason="httpx is not installed: it is in the dependency group test"
    )
    source = "".join(blocks(page("fastapi"), "python"))
    settings = EAGER | {"leases_database_url": f"sqlite:///{tmp_path / 'records.db'}"}
    made = 'celery_app.conf.leases_url = "redis://localhost/2"\n'
    named = 'celery_app.conf.leases_database_url = "postgresql+psycopg://localhost/billing"\n'
    assert made in source
    assert named in source
    source = source.replace(made, "").replace(named, f"celery_app.conf.update({settings!r})\n")
    names: dict[str, Any] = {"__name__": "billing"}
    exec(compile(source, "billing", "exec"), names)  # noqa: S102 - our own page

    async def ask() -> None:
        transport = httpx.ASGITransport(app=names["app"])
        async with httpx.AsyncClient(
            transport=transport, base_url="http://billing", timeout=30
        ) as http:
            sent = await http.post("/invoices/7")
            assert sent.status_code == 202
            assert (await http.get(sent.headers["Location"])).status_code == 401
            known = {"Authorization": "Bearer of-the-shop"}
            shown = await http.get(sent.headers["Location"], headers=known)
            assert shown.json()["result"] == {"customer": 7}
        async with names["AsyncLeaseClient"].from_app(names["celery_app"]) as reads:
            assert (await names["finished"](reads, 7)).state == "done"

    asyncio.run(ask())
    assert capsys.readouterr().out == "Done\n"


def test_the_revision_of_the_alembic_page_makes_and_drops_the_tables(tmp_path: Path) -> None:
    pytest.importorskip(
        "alembic", reason="Alembic is not installed: it is in the dependency group test"
    )
    from alembic import op
    from alembic.migration import MigrationContext
    from alembic.operations import Operations
    from sqlalchemy import create_engine

    of_filter, of_revision = blocks(page("alembic"), "python")
    names: dict[str, Any] = {}
    exec(of_filter, names)  # noqa: S102 - our own page
    exec(of_revision, names)  # noqa: S102 - our own page
    for table, wanted in (
        ("orders", True),
        ("legacy_orders", False),
        ("celery_leases_groups", False),
    ):
        assert names["include_object"](None, table, "table", True, None) is wanted
    tables = Tables()
    engine = create_engine(f"sqlite:///{tmp_path / 'a.db'}")
    for step, version in (("upgrade", 1), ("upgrade", 1), ("downgrade", None)):
        with engine.connect() as connection:
            context = MigrationContext.configure(connection)
            with context.begin_transaction(_per_migration=True), Operations.context(context):
                names[step]()
        assert tables.existing_version(engine) == version
    engine.dispose()
    assert names["op"] is op
    calls = re.findall(r"\| `(\w+)\(op", section(page("alembic"), "A revision"))
    assert set(calls) == {"upgrade", "downgrade"}


PAGE = page("testing-your-tasks")


def test_the_project_of_the_page_passes_its_tests(pytester: pytest.Pytester) -> None:
    written = 0
    for block in blocks(PAGE, "python"):
        name = re.match(r"# ([\w/]+\.py)", block)
        assert name
        if "import Flask" in block and find_spec("flask") is None:
            continue
        path = pytester.path / name[1].replace("tests.py", "test_unittest.py")
        path.parent.mkdir(exist_ok=True)
        path.write_text(block)
        written += block.count("def test_")
    (pytester.path / "shop" / "__init__.py").touch()
    result = pytester.runpytest_subprocess("-q", "-p", "no:cacheprovider", timeout=240)
    result.assert_outcomes(passed=written)


def test_the_page_names_every_function() -> None:
    assert {*re.findall(r"`(\w+)\(", page("testing-kit"))} >= {*testing.__all__}
    assert "charge: 2 calls instead of 1" in PAGE
    number, line = re.search(r"attempt 1  tasks\.py:(\d+): (.*)", PAGE).groups()  # type: ignore[union-attr]
    assert blocks(PAGE, "python")[0].splitlines()[int(number) - 1].strip() == line
    assert PACKAGE.endswith("celery_leases")


@pytest.mark.usefixtures(apps.__name__)
def test_the_first_task_of_a_project_runs_once(capsys: pytest.CaptureFixture[str]) -> None:
    (source,) = blocks(page("add-to-your-project"), "python")
    with executed(source, "billing") as names:
        names["app"].conf.task_always_eager = True
        results = [names["send_invoice"].delay(1, "2026-04").get() for _ in "ab"]
    assert results == [{"customer": 1}] * 2
    assert capsys.readouterr().out == "the mail for 1 of 2026-04\n"
