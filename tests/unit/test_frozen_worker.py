"""What a worker has loaded before its pool starts is no more work for the garbage collector."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from celery import Celery, _state

from celery_leases import LeasedTask
from celery_leases.worker import celery_signal_receivers
from tests.unit.celery_apps import apps

__all__ = ["apps"]


@pytest.mark.parametrize("leased", [True, False], ids=["leased", "plain"])
@pytest.mark.parametrize("pool", ["prefork", "gevent", "thread"])
@pytest.mark.usefixtures("apps")
def test_a_worker_with_leased_tasks_freezes_what_it_has_loaded(
    monkeypatch: pytest.MonkeyPatch, pool: str, leased: bool
) -> None:
    monkeypatch.setattr(_state, "_on_app_finalizers", set())  # shared tasks of other tests
    collector = Mock()
    monkeypatch.setattr(celery_signal_receivers, "gc", collector)
    monkeypatch.setattr(celery_signal_receivers, "sys", collector)
    app = Celery("frozen", set_as_current=False)
    options = {"base": LeasedTask} if leased else {}

    @app.task(name="work", **options)
    def work() -> None: ...

    worker = SimpleNamespace(app=app, pool_cls=f"celery.concurrency.{pool}:TaskPool")
    celery_signal_receivers._before_pool(worker)
    assert [called for called, *_ in collector.method_calls] == [
        *("collect", "_clear_internal_caches", "freeze")
    ] * leased
