"""The shop's own tests: eager tasks, requests without a server."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from shop import create_app, db
from shop.tasks import Order

EAGER = {
    "broker_url": "memory://",
    "task_always_eager": True,
    "leases_url": "database",
    "leases_eager_stores": True,
}
CUSTOMER = {"Authorization": "customer"}


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOP_LEDGER", str(tmp_path / "ledger"))
    monkeypatch.delenv("SHOP_GATE", raising=False)
    return tmp_path / "ledger"


@pytest.fixture
def http(tmp_path: Path, ledger: Path) -> Iterator[Any]:
    app = create_app(
        TESTING=True, SQLALCHEMY_DATABASE_URI=f"sqlite:///{tmp_path / 'shop.db'}", CELERY=EAGER
    )
    with app.app_context():
        db.create_all()
        yield app.test_client()


def test_an_order_is_charged_once(http: Any, ledger: Path) -> None:
    """However often the button is pressed."""
    codes = [http.post("/orders/7?amount=3").status_code for _ in range(3)]
    assert codes == [202, 200, 200]
    assert len(ledger.read_text().splitlines()) == 1
    assert [(order.number, order.amount) for order in Order.query.all()] == [("7", 3)]


def test_only_the_customer_sees_the_order(http: Any) -> None:
    """At the place that the first answer names."""
    place = http.post("/orders/7").headers["Location"]
    assert http.get(place).status_code == 403
    assert http.get(place, headers=CUSTOMER).json["result"] == {"order": "7", "attempt": 1}


def test_other_content_is_refused(http: Any) -> None:
    """The order was another one."""
    http.post("/orders/7?amount=3")
    assert http.post("/orders/7?amount=4").json["code"] == "key_reused"


def test_what_is_rolled_back_is_never_ordered(http: Any, ledger: Path) -> None:
    """And what is committed is."""
    http.post("/saved/8?fails=1")
    assert (
        http.get("/leases/order:8?task=shop.tasks.order", headers=CUSTOMER).json["state"]
        == "absent"
    )
    assert not ledger.exists()
