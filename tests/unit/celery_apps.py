"""Celery apps that a test makes, and that must not turn up in other tests."""

from collections.abc import Iterator

import pytest
from celery import _state as state


@pytest.fixture
def apps() -> Iterator[None]:
    """Forget afterwards the apps, the shared tasks and the current app of the test."""
    finalizers, known = set(state._on_app_finalizers), set(state._apps)
    default, current = state.default_app, state._tls.current_app
    yield
    for app in set(state._apps) - known:
        state._deregister_app(app)
    state._on_app_finalizers.intersection_update(finalizers)
    state.default_app, state._tls.current_app = default, current
