"""The shop's own tests: eager tasks, requests without a server."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from shop import tasks
from shop.web import app

ANNE = {"Authorization": "anne", "Idempotency-Key": '"1"'}


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOP_LEDGER", str(tmp_path / "ledger"))
    monkeypatch.delenv("SHOP_GATE", raising=False)
    return tmp_path / "ledger"


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    url = f"sqlite:///{tmp_path_factory.mktemp('shop') / 'shop.db'}"
    tasks.app.conf.update(task_always_eager=True, leases_eager_stores=True, leases_database_url=url)
    with TestClient(app) as client:
        yield client


def test_an_order_is_charged_once(http: Any, ledger: Path) -> None:
    """However often the client repeats it; with other content it is refused."""
    codes = [
        http.post(f"/orders?amount={amount}", headers=ANNE).status_code for amount in (3, 3, 4)
    ]
    assert codes == [202, 200, 422]
    assert ledger.read_text() == "anne:1 3\n"


def test_a_customer_sees_orders_of_their_own(http: Any, ledger: Path) -> None:
    """Without a customer: 401. Another customer: 403."""
    place = http.post("/orders", headers=ANNE | {"Idempotency-Key": "2"}).headers["Location"]
    assert http.get(place).status_code == 401
    assert http.get(place, headers={"Authorization": "bob"}).status_code == 403
    assert http.get(place, headers=ANNE).json()["result"] == {"amount": 1, "attempt": 1}


def test_a_request_without_a_key_is_refused(http: Any) -> None:
    """With a line for the client."""
    sent = http.post("/orders", headers={"Authorization": "anne"})
    assert (sent.status_code, sent.json()["code"]) == (400, "idempotency_key_refused")
