"""The pages about web frameworks: their examples run, eagerly and on records in a file."""

import asyncio
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from celery_leases.stores.sql.schema import Tables
from tests.unit.celery_apps import apps
from tests.unit.doc_pages import blocks, page, section

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
        ("celery_leases_gates", False),
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
