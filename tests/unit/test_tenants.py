"""Tenants: a message has the headers of its caller, whichever process publishes it, and a key
begins with the tenant.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.signals import before_task_publish
from kombu.pools import reset
from sqlalchemy import create_engine

from celery_leases import LeasedTask
from celery_leases.errors import KeyUnusable, LeaseConfigurationError
from celery_leases.keys import call_key
from celery_leases.ops.client import OperatorClient
from celery_leases.outbox import calls as outbox
from celery_leases.worker.headers import key_of

TENANT: list[str] = ["public"]


class TenantApp(Celery):
    """Adds the tenant to each message, as tenant-schemas-celery does."""

    def send_task(self, *args: Any, **options: Any) -> Any:
        """Publish with the tenant of this process."""
        options["headers"] = {"tenant": TENANT[-1]} | (options.get("headers") or {})
        return super().send_task(*args, **options)


class TenantTask(LeasedTask):
    """Replaces the tenant of each message, as a careless task class may."""

    abstract = True

    def apply_async(self, *args: Any, **options: Any) -> Any:
        """Publish with the tenant of this process."""
        options["headers"] = {**(options.get("headers") or {}), "tenant": TENANT[-1]}
        return super().apply_async(*args, **options)


def by_signal(headers: dict[str, Any], **_: Any) -> None:
    """Add the tenant as a receiver of Celery's signal."""
    headers["tenant"] = TENANT[-1]


@pytest.fixture(params=["app", "task", "signal"])
def tenants(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Celery]:
    """An app whose messages get the tenant of the publishing process, in one of three ways."""
    kind = TenantApp if request.param == "app" else Celery
    app = kind("tenants", broker="memory://", set_as_current=False)
    app.conf.update(
        leases_url="database",
        leases_database_url=f"sqlite:///{tmp_path}/leases.db",
        # Messages in memory are those of the whole process.
        task_default_queue=f"queue-{tmp_path.name}",
        leases_tenant=lambda headers: headers["tenant"] if headers else TENANT[-1],
    )
    base = TenantTask if request.param == "task" else LeasedTask

    @app.task(base=base, name="bill", lease_key="bill:{name}", shared=False)
    def bill(name: str) -> None:
        """Never called."""

    @app.task(base=base, name="once", lease_key="once:{name}", lease_outbox="once", shared=False)
    def once(name: str) -> None:
        """Never called."""

    if request.param == "signal":
        before_task_publish.connect(by_signal)
    try:
        yield app
    finally:
        before_task_publish.disconnect(by_signal)
        app.close()
        reset()


@pytest.fixture
def sent(tenants: Celery, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The headers of all messages that reach the broker."""
    headers: list[dict[str, Any]] = []
    publish = tenants.amqp.Producer.publish

    def noted(self: Any, *args: Any, **named: Any) -> Any:
        headers.append(named["headers"])
        return publish(self, *args, **named)

    monkeypatch.setattr(tenants.amqp.Producer, "publish", noted)
    return headers


def stored_keys(app: Celery) -> dict[str, str]:
    """The stored keys of all records, by their keys."""
    return {
        status.key: str(status.stored_key) for status in OperatorClient.from_app(app).matching()
    }


@pytest.fixture
def caller() -> Iterator[None]:
    """The process works for a tenant."""
    TENANT.append("a:b")
    yield
    del TENANT[1:]


def test_a_call_that_the_relay_publishes_has_the_headers_of_its_caller(tenants, sent, caller):
    engine = create_engine(tenants.conf.leases_database_url)
    with engine.begin() as connection:
        call = tenants.tasks["bill"].delay_in(connection, "x")
    TENANT.append("other")
    assert not sent
    assert outbox.publish_stored(tenants, stored_keys(tenants)["a%3Ab:bill:x"])
    (headers,) = sent
    assert (headers["id"], headers["tenant"]) == (call.id, "a:b")
    engine.dispose()


def test_a_stored_message_of_a_call_that_is_queued_once_has_them_too(tenants, sent, caller) -> None:
    first = tenants.tasks["once"].delay("x")
    assert tenants.tasks["once"].delay("x").id == first.id
    TENANT.append("other")
    assert tenants.tasks["once"].delay("x").id != first.id
    stored = stored_keys(tenants)
    assert stored.keys() == {"a%3Ab:once:x", "other:once:x"}
    assert outbox.publish_stored(tenants, stored["a%3Ab:once:x"])
    assert [headers["tenant"] for headers in sent[:2]] == ["a:b", "other"]
    if not before_task_publish.receivers:  # what receivers add is not known before the message
        assert sent[2]["tenant"] == "a:b"


def test_the_worker_and_the_caller_make_the_same_key(tenants: Celery, caller: None) -> None:
    task = tenants.tasks["bill"]
    headers = outbox.headers_of(task, ("x",), {})
    if not before_task_publish.receivers:
        assert headers["tenant"] == "a:b"
    assert key_of(task, None, "id", ("x",), {}, 0, headers).key == "a%3Ab:bill:x"
    assert task.lease_status("x").key == "a%3Ab:bill:x"
    TENANT.append("a")
    assert task.lease_status("x").key == "a:bill:x"


@pytest.mark.parametrize("tenant", [None, "", " ", 7])
def test_a_call_without_a_tenant_has_no_key(tenants: Celery, tenant: Any) -> None:
    """It would share the keys of other calls without one."""
    task = tenants.tasks["bill"]
    with pytest.raises(KeyUnusable, match=f"leases_tenant returned {tenant!r}"):
        key_of(task, None, "id", ("x",), {}, 0, {"tenant": tenant})
    with pytest.raises(KeyUnusable, match="leases_tenant raised KeyError"):
        call_key("bill", task.lease_options, task.lease_signature, "id", ("x",), {}, {"user": 1})


def test_a_tenant_is_a_function() -> None:
    """A constant would be the same for all."""
    app = Celery("tenants", broker="memory://", set_as_current=False)
    app.conf.leases_tenant = "public"
    task = app.task(base=LeasedTask, name="bill", shared=False)(test_a_tenant_is_a_function)
    with pytest.raises(LeaseConfigurationError, match="a function of the message headers"):
        bool(task.name)


def test_a_schema_of_tenant_schemas_celery_is_the_tenant(tmp_path, monkeypatch) -> None:
    library = pytest.importorskip("tenant_schemas_celery.task")
    schema = SimpleNamespace(schema_name="acme")
    monkeypatch.setattr(library, "connection", schema)

    class CeleryApp(Celery):
        """As ``tenant_schemas_celery.app.CeleryApp``, which only Django can import."""

        def send_task(self, *args: Any, **options: Any) -> Any:
            options["headers"] = library.headers_with_schema(options.get("headers") or {})
            return super().send_task(*args, **options)

    app = CeleryApp("schemas", broker="memory://", set_as_current=False)
    app.conf.update(
        leases_url="database",
        leases_database_url=f"sqlite:///{tmp_path}/leases.db",
        leases_tenant=lambda headers: headers["_schema_name"],
    )
    named: dict[str, Any] = {"base": LeasedTask, "name": "bill", "shared": False}
    task = app.task(lease_key="{name}", **named)(tenant_body)
    assert task.lease_status("x").key == "acme:x"
    schema.schema_name = "public"
    assert task.lease_status("x").key == "public:x"
    app.close()


def tenant_body(name: str) -> None:
    """Never called."""
