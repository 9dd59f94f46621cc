"""What the pages of the admin share: nobody adds, changes or deletes rows, and the client that
looks and repairs.
"""

from __future__ import annotations

from typing import Any

from celery import _state
from django.contrib import admin

from celery_leases.client import LeaseClient
from celery_leases.contrib.django import configuration
from celery_leases.errors import LeaseConfigurationError

STYLES = {"all": ["celery_leases/admin.css"]}


class Operated(admin.ModelAdmin):
    """Rows that are shown, and changed by the actions of this package only."""

    def has_add_permission(self, request: Any) -> bool:
        """Rows cannot be added."""
        return False

    def has_change_permission(self, request: Any, obj: Any = None) -> bool:
        """Rows cannot be edited."""
        return False

    def has_delete_permission(self, request: Any, obj: Any = None) -> bool:
        """Rows cannot be deleted; the action `forget` makes a key as good as new."""
        return False

    def board_url(self) -> str | None:
        """The address of the board, if the settings have one."""
        return configuration.board_url()

    def may(self, request: Any, what: str) -> bool:
        """Whether the user has the permission *what*, such as ``retry``, on this model."""
        return bool(request.user.has_perm(f"{self.opts.app_label}.{what}_{self.opts.model_name}"))


def client() -> LeaseClient:
    """The client of the project's Celery app, on the stores that its workers use."""
    if _state.default_app is None:
        raise LeaseConfigurationError(
            "this project has no Celery app: import it in the package of the settings, as Celery's documentation says"
        )
    return LeaseClient.from_app(_state.get_current_app(), eager=False)
