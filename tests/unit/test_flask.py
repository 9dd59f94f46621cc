"""Flask's part, in process: eager calls, the application context, the status view, ``flask
leases``.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

flask = pytest.importorskip(
    "flask", reason="Flask is not installed: it is in the dependency group test"
)
pytest.importorskip(
    "flask_sqlalchemy", reason="Flask-SQLAlchemy is not installed: it is in the group test"
)

import click  # noqa: E402
from celery import Celery  # noqa: E402
from flask import Flask, abort, current_app, request  # noqa: E402
from flask_sqlalchemy import SQLAlchemy  # noqa: E402
from sqlalchemy import Column, Integer, String, func, make_url, select  # noqa: E402

from celery_leases import cli  # noqa: E402
from celery_leases.decide.latest import replaced_mark  # noqa: E402
from celery_leases.errors import KeyReused, LeaseConfigurationError, StoreUnavailable  # noqa: E402
from celery_leases.keys import stored_key  # noqa: E402
from celery_leases.web.flask import CeleryLeases, FlaskTask, LeasedTask, leases_blueprint  # noqa: E402
from celery_leases.web.http import idempotency_key  # noqa: E402
from celery_leases.worker.processes import process_of  # noqa: E402
from tests.unit.celery_apps import apps  # noqa: E402

__all__ = ["apps"]

EAGER = {
    "broker_url": "memory://", "task_always_eager": True, "leases_url": "database",
    "leases_eager_stores": True, "task_ignore_result": False,
}  # fmt: skip


@pytest.fixture
def shop(apps: None, tmp_path: Path) -> Any:
    """A shop on Flask, Flask-SQLAlchemy and eager Celery, as its documentation builds one."""
    app = Flask("shop", instance_path=str(tmp_path))
    app.config.update(SQLALCHEMY_DATABASE_URI="sqlite:///shop.db", CELERY=dict(EAGER), TESTING=True)
    db = SQLAlchemy(app)

    class Order(db.Model):  # type: ignore[name-defined]
        id = Column(Integer, primary_key=True)
        key = Column(String)

    leases = CeleryLeases(app)
    celery = app.extensions["celery"]
    seen: list[Any] = []

    @celery.task(base=LeasedTask, bind=True, name="shop.order", lease_key="order:{key}")
    def order(self, key, amount=1):
        seen.append((key, current_app.name, db.session()))
        if amount < 0:
            raise ValueError("secret of the body")
        db.session.add(Order(key=key))
        self.lease.complete({"amount": amount}, db.session)
        db.session.commit()
        return {"amount": amount}

    @celery.task(name="shop.plain")
    def plain():
        return current_app.name

    def may(key: str, task: str | None) -> Any:
        seen.append(("asked", key, task))
        if request.headers.get("Authorization") == "nobody":
            abort(401)
        return request.headers.get("Authorization") == "me"

    app.register_blueprint(leases_blueprint(may))

    @app.post("/orders/<key>")
    def post(key: str) -> Any:
        return leases.submit(order, (key,), {"amount": int(request.args.get("amount", 1))})

    @app.post("/orders")
    def post_once() -> Any:
        key = idempotency_key(request.headers.get("Idempotency-Key"), caller=7)
        return leases.submit(order, (key, int(request.args.get("amount", 1))), idempotent=True)

    @app.get("/broken")
    def broken() -> Any:
        raise StoreUnavailable("secret host does not answer", False)

    with app.app_context():
        db.create_all()
    return SimpleNamespace(
        app=app,
        db=db,
        celery=celery,
        order=order,
        plain=plain,
        seen=seen,
        http=app.test_client(),
        leases=leases,
        Order=Order,
    )


def status_of(shop: Any, key: str, who: str | None = "me", query: str = "") -> Any:
    return shop.http.get(f"/leases/{key}{query}", headers={"Authorization": who} if who else {})


def test_a_body_runs_in_the_application_context_under_its_lease(shop: Any) -> None:
    with shop.app.app_context():
        outside = shop.db.session()
        assert shop.order.delay("1", 3).get() == {"amount": 3}
        assert shop.plain.delay().get() == "shop"
        ((_, name, inside),) = shop.seen
    assert name == "shop"
    assert inside is not outside
    assert shop.order.delay("1", 3).get() == {"amount": 3}  # from the record
    assert len(shop.seen) == 1


def test_the_records_are_in_the_database_of_flask_sqlalchemy(shop: Any, tmp_path: Path) -> None:
    assert shop.celery.conf.leases_database_url == f"sqlite:///{tmp_path / 'shop.db'}"
    shop.order.delay("1")
    with shop.app.app_context():
        assert shop.db.session.scalar(select(func.count()).select_from(shop.Order)) == 1


def test_a_configured_database_is_used(apps: None, tmp_path: Path) -> None:
    for url, named in (
        ("sqlite:///other.db", "sqlite:///records.db"),
        ("sqlite:///:memory:", None),
    ):
        app = Flask("shop", instance_path=str(tmp_path))
        app.config.update(
            SQLALCHEMY_DATABASE_URI=url, CELERY=EAGER | {"leases_database_url": named}
        )
        SQLAlchemy(app)
        CeleryLeases(app)
        assert app.extensions["celery"].conf.leases_database_url == named


def test_a_password_of_any_characters_reaches_the_records(apps: None) -> None:
    pytest.importorskip("psycopg", reason="psycopg is not installed: it is in the group test")
    url = "postgresql+psycopg://me:p%25%40%2F@db:5433/shop?sslmode=disable"
    app = Flask("shop")
    app.config.update(SQLALCHEMY_DATABASE_URI=url, CELERY=EAGER)
    SQLAlchemy(app)
    CeleryLeases(app)
    found = make_url(app.extensions["celery"].conf.leases_database_url)
    assert found == make_url(url)
    assert (found.password, found.port) == ("p%@/", 5433)


def test_an_idempotency_key_is_the_key(shop: Any) -> None:
    assert shop.http.post("/orders").json["code"] == "idempotency_key_refused"
    codes = [
        shop.http.post(f"/orders?amount={amount}", headers={"Idempotency-Key": '"k-1"'}).status_code
        for amount in (1, 1, 2)
    ]
    assert codes == [202, 200, 422]
    assert len(shop.seen) == 1


@pytest.mark.parametrize(("who", "code"), [("me", 200), ("you", 403), (None, 403), ("nobody", 401)])
def test_the_authoriser_decides_before_anything_is_looked_up(shop, who, code) -> None:
    shop.order.delay("1")
    shop.seen.clear()
    assert status_of(shop, "order:1", who, "?task=shop.order").status_code == code
    assert status_of(shop, "order:2", who).status_code == code
    assert shop.seen == [("asked", "order:1", "shop.order"), ("asked", "order:2", None)]


def test_a_stored_key_is_not_a_way_around_the_authoriser(shop: Any) -> None:
    """Under it the key would be another one than the authoriser was asked about."""
    shop.order.delay("1")
    assert status_of(shop, "t:shop.order|order:1").status_code == 404
    assert status_of(shop, "order:1").json["state"] == "done"


def test_shared_keys_are_shown_under_their_own_task_alone(shop: Any) -> None:
    @shop.celery.task(name="shop.shared", base=LeasedTask, lease_key="/all/{x}", shared=False)
    def work(x: int) -> int:
        return x

    work.delay(1)
    shop.order.delay("1")

    def asked(key: str, task: str) -> Any:
        url = f"/leases/{key}?task={task}"
        return shop.http.get(url, headers={"Authorization": "me"}, follow_redirects=True)

    assert asked("/all/1", "shop.shared").json["state"] == "done"
    assert asked("order:1", "shop.order").json["state"] == "done"
    for key, task in (
        ("/shop.order/order:1", "shop.shared"),
        ("/all/1", "shop.order"),
        ("/all/1", "x"),
    ):
        assert asked(key, task).json.get("state") in (None, "absent")


def test_nothing_is_changed_by_the_view(shop: Any) -> None:
    for method in ("post", "put", "delete", "patch"):
        assert getattr(shop.http, method)("/leases/order:1").status_code == 405


@pytest.mark.parametrize("authorise", [None, True, "me"])
def test_a_blueprint_without_an_authoriser_is_refused(authorise: Any) -> None:
    with pytest.raises(LeaseConfigurationError, match="anyone could see"):
        leases_blueprint(authorise)


def test_an_error_is_a_problem_and_its_text_is_in_the_log(shop, caplog) -> None:
    """An operator wants the text that a client must not see."""
    sent = shop.http.get("/broken")
    assert (sent.status_code, sent.headers["Retry-After"]) == (503, "5")
    assert b"secret" not in sent.data
    assert "secret host" in caplog.text


def test_a_task_is_called_in_the_callers_transaction(shop: Any) -> None:
    with shop.app.app_context():
        shop.db.session.add(shop.Order(key="mine"))
        shop.order.delay_in(shop.db.session, "1")
        assert shop.order.lease_status("1").state == "absent"
        shop.db.session.rollback()
        assert shop.order.lease_status("1").state == "absent"
        shop.leases.submit(shop.order, ("1",), session=shop.db.session)
        shop.db.session.commit()
        assert shop.order.lease_status("1").state != "absent"
        with pytest.raises(KeyReused):
            shop.order.delay_in(shop.db.session, "1", 9)


def test_the_celery_app_of_flasks_documentation_is_taken_as_it_is(apps: None) -> None:
    for how in ("extensions", "argument"):
        app = Flask("shop")
        celery = Celery("shop", task_cls=LeasedTask)
        celery.config_from_object(EAGER | {"leases_database_url": "sqlite://"})
        if how == "extensions":
            app.extensions["celery"] = celery
        CeleryLeases(app, celery if how == "argument" else None)

        def name():
            return current_app.name

        named = celery.task(name=f"shop.{how}")(name)
        assert isinstance(named, LeasedTask)
        assert named.apply().get() == "shop"


def test_the_error_of_a_task_without_a_flask_app_shows_what_to_write(apps: None) -> None:
    celery = Celery("lost", task_cls=FlaskTask, broker="memory://")
    celery.conf.task_always_eager = celery.conf.task_eager_propagates = True

    @celery.task(name="lost.body")
    def body():
        raise AssertionError

    with pytest.raises(LeaseConfigurationError, match=r"write CeleryLeases\(app\)"):
        body.delay()


def test_an_app_without_settings_for_celery_is_refused(apps: None) -> None:
    with pytest.raises(LeaseConfigurationError, match=r'app.config\["CELERY"\]'):
        CeleryLeases(Flask("shop"))


def test_flask_leases_is_the_command_line_of_celery_leases(shop: Any) -> None:
    shop.order.delay("1", 4)
    runner = shop.app.test_cli_runner()
    shown = runner.invoke(args=["leases", "show", "order:1", "--json"])
    assert (shown.exit_code, '"amount": 4' in shown.output) == (0, True), shown.output
    missing = runner.invoke(args=["leases", "forget", "order:9", "--task", "shop.order"])
    assert missing.exit_code != 0
    assert "order:9" in missing.output
    assert "migrate" in runner.invoke(args=["leases", "--help"]).output
    assert runner.invoke(args=["leases", "no-such-command"]).exit_code == 2


@pytest.mark.parametrize("wrapped", [False, True], ids=["async def", "a function that calls one"])
def test_an_async_authoriser_is_awaited(shop: Any, wrapped: bool) -> None:
    """A coroutine that is not awaited would be true."""
    pytest.importorskip("asgiref", reason="asgiref is not installed: Django brings it")

    async def only_1(key: str, task: str | None) -> bool:
        return key == "order:1"

    def calls(key: str, task: str | None) -> Any:
        return only_1(key, task)

    shop.app.register_blueprint(
        leases_blueprint(calls if wrapped else only_1, name="waited", url_prefix="/waited")
    )
    codes = [shop.http.get(f"/waited/order:{number}").status_code for number in (1, 2)]
    assert codes == [200, 403]


@pytest.mark.parametrize("code", [0, 3])
def test_flask_leases_exits_as_its_command_does(shop, monkeypatch, code) -> None:
    asked: list[str] = []

    @click.pass_context
    def ends(context: click.Context) -> None:
        asked.append("doctor")
        context.exit(code)

    assert "doctor" in cli.leases.list_commands(None)
    monkeypatch.setitem(cli.leases.commands, "doctor", click.Command("doctor", callback=ends))
    assert shop.app.test_cli_runner().invoke(args=["leases", "doctor"]).exit_code == code
    assert asked == ["doctor"]


def test_a_call_that_a_newer_one_has_replaced_has_a_status_of_its_own(shop: Any) -> None:
    @shop.celery.task(
        base=LeasedTask, name="shop.index", lease_key="index:{page}", lease_runs="latest"
    )
    def index(page):
        return page

    @shop.app.post("/pages/<page>")
    def change(page: str) -> Any:
        return shop.leases.submit(index, (page,))

    where = shop.http.post("/pages/1").headers["Location"]
    marks, key = process_of(shop.celery).leases, stored_key(index.name, "index:1")
    marks.swap_mark(key, replaced_mark("older"), None, "newer", 60.0)
    own = where.partition("call=")[2]
    codes = {}
    for call in (own, "older", "not-begun"):
        sent = shop.http.get(where.replace(own, call), headers={"Authorization": "me"})
        codes[call] = (sent.json["state"], sent.json["message_code"])
    assert codes == {
        own: ("done", "done"),
        "older": ("done", "replaced"),
        "not-begun": ("pending", "waiting"),
    }
