"""Which sessions and connections of the user's own can be joined, and what the others are told."""

from collections.abc import Iterator
from typing import Any

import pytest
from django import setup
from django.conf import settings
from django.db.utils import ConnectionHandler

from celery_leases.core.keys import CallKey
from celery_leases.stores.outbox import Outbox
from celery_leases.stores.sql import SqlRecordStore
from celery_leases.stores.sql_leases import DatabaseLeaseStore
from celery_leases.stores.transactions import JoinedTransaction
from celery_leases.testing.contracts.bids import fresh_key, make_bid
from celery_leases.testing.contracts.record_case import outcome, row, won
from tests.contract.sql_stores import database_url, server_records, server_url, sql_records

__all__ = ["database_url", "server_records", "server_url", "sql_records"]


@pytest.fixture(params=["plain", "debug"])
def django(sql_records: SqlRecordStore, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Django's connection to the records; under ``DEBUG`` its cursors write down what they execute."""
    if not settings.configured:
        settings.configure(LOGGING_CONFIG=None)
        setup()
    url = sql_records.database.engine.url
    if url.get_backend_name() == "mysql":
        pytest.skip("Django asks for mysqlclient there")
    where = {"HOST": url.host, "PORT": url.port, "USER": url.username, "NAME": url.database}
    kind = {"sqlite": "sqlite3"}.get(url.get_backend_name(), url.get_backend_name())
    made = ConnectionHandler({"default": {"ENGINE": f"django.db.backends.{kind}", **where}})["default"]
    made.force_debug_cursor = request.param == "debug"
    yield made
    made.close()


def test_the_connections_of_django_are_joined_under_debug_too(sql_records: SqlRecordStore, django: Any) -> None:
    """What is guarded, completed and enqueued is Django's to commit."""
    record = won(sql_records, make_bid(fresh_key()), DatabaseLeaseStore(sql_records).name)
    django.set_autocommit(False)
    transaction = JoinedTransaction(django, sql_records)
    transaction.guard(record)
    transaction.complete(record, outcome(record, result='"50%"'))
    key = CallKey("k", fresh_key(), None)
    enqueuing = Outbox(sql_records).enqueuing("contract", key, "first", '["50%"]', ttl=15.0, retention=60.0)
    assert transaction.write(enqueuing, "k")
    django.commit()
    assert row(sql_records, record.stored_key).result == '"50%"'
    assert row(sql_records, key.stored).message == '["50%"]'
