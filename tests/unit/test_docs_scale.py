"""docs/explanation/scale.md: the records of several servers, by hash of the key."""

from typing import Self

import pytest

from celery_leases.status import LeaseStatus
from tests.unit.doc_pages import blocks, executed, page


def test_each_key_has_one_queue_and_its_status_is_read_on_its_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SERVER", "3")
    (source,) = blocks(page("scale"), "python")
    with executed(source, "billing") as names:
        app = names["app"]
        assert app.conf.leases_database_url == names["records_of"](3)

        def queue(*args: object) -> str:
            routed = app.amqp.router.route({}, "billing.send_invoice", args, {})
            return str(routed["queue"].name)

        keys = [(customer, "2026-04") for customer in range(200)]
        used = {key: queue(*key) for key in keys}
        assert {queue(*key) for key in keys} == {f"server-{number}" for number in range(8)}
        assert used == {key: queue(*key) for key in keys}
        assert app.amqp.router.route({}, "another", (), {})["queue"].name == "celery"

        asked = []

        class Client:
            def __init__(self, leases: str, records: str) -> None:
                self.server = records

            def __enter__(self) -> Self:
                return self

            def __exit__(self, *_: object) -> None:
                pass

            def status(self, key: str, *, task: str) -> LeaseStatus | None:
                asked.append((self.server, key, task))
                return None

        names["status"].__globals__["LeaseClient"] = Client
        names["status"](7, "2026-04")
    server = used[7, "2026-04"].removeprefix("server-")
    expected = f"postgresql+psycopg://records-{server}/billing"
    assert asked == [(expected, "invoice:7:2026-04", "billing.send_invoice")]
