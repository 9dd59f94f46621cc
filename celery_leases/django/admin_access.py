"""What the admin pages share: rows that cannot be edited, and the client that changes records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from celery import Celery, _state
from django.contrib import admin

from celery_leases.django import configuration
from celery_leases.errors import LeaseConfigurationError
from celery_leases.ops.client import OperatorClient
from celery_leases.worker import processes
from celery_leases.worker.answering import NO_WORKER, worker_answers

KEYS_AT_ONCE: Final = 500
STYLES = {"all": ["celery_leases/admin.css"]}


class ReadOnlyAdmin(admin.ModelAdmin):
    """Shows rows; only the actions of this package change them."""

    def has_add_permission(self, request: Any) -> bool:
        """Rows cannot be added."""
        return False

    def has_change_permission(self, request: Any, obj: Any = None) -> bool:
        """Rows cannot be edited."""
        return False

    def has_delete_permission(self, request: Any, obj: Any = None) -> bool:
        """Rows cannot be deleted; the action `forget` clears a key."""
        return False

    def board_url(self) -> str | None:
        """The URL of the board, if the settings have one."""
        return configuration.board_url()

    def is_permitted(self, request: Any, what: str) -> bool:
        """Whether the user has the permission *what* on this model, such as ``retry``."""
        return bool(request.user.has_perm(f"{self.opts.app_label}.{what}_{self.opts.model_name}"))


def client() -> OperatorClient:
    """A client for the stores that the workers of the project's Celery app use."""
    return OperatorClient.from_app(_app(), eager=False)


def held(stored_keys: Sequence[str]) -> set[str]:
    """Those of the keys whose lease an attempt holds now."""
    leases = processes.process_of(_app(), eager=False).leases
    return {
        key
        for first in range(0, len(stored_keys), KEYS_AT_ONCE)
        for key in leases.held(stored_keys[first : first + KEYS_AT_ONCE])
    }


def no_worker() -> str | None:
    """A text if no worker of the project answers."""
    return NO_WORKER if worker_answers(_app()) is False else None


def _app() -> Celery:
    if _state.default_app is None:
        raise LeaseConfigurationError(
            "this project has no Celery app; import it in the project's __init__.py, as Celery's "
            "documentation shows"
        )
    app: Celery = _state.get_current_app()
    return app
