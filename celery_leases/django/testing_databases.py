"""Test databases of Django's test runner: the connections to the records follow them, and end
before they do.
"""

from __future__ import annotations

from functools import wraps
from typing import Any, Final

from django.db import connections

from celery_leases.django import configuration
from celery_leases.errors import LeaseConfigurationError
from celery_leases.worker import processes

_CLOSING: Final = "_celery_leases_closes"


def follow(using: str, **_: Any) -> None:
    """Let go the connections to another database than that of now, after the tables of *using* were
    migrated.

    Django's test runner migrates each test database once it has put its name into the settings.
    From then on the connections to it are closed before the runner destroys it, as some servers do
    not drop a database that is in use.
    """
    if not configuration.under_test():
        return
    try:
        if using != configuration.alias_of_records():
            return
    except LeaseConfigurationError:  # the checks tell of it
        return
    processes.close_if_other_database(configuration.url_of_records())
    creation: Any = connections[using].creation
    if getattr(creation, _CLOSING, False):
        return
    destroy = creation.destroy_test_db

    @wraps(destroy)
    def close_and_destroy(*args: Any, **kwargs: Any) -> Any:
        processes.close_all()
        return destroy(*args, **kwargs)

    creation.destroy_test_db = close_and_destroy
    setattr(creation, _CLOSING, True)
