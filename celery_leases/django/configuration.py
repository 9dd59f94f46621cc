"""The settings of a Django project: the dict ``CELERY_LEASES``, and the database of the records.

``CELERY_LEASES = {"database": "default"}`` names an alias of ``DATABASES``. Its other entries are
the settings ``leases_*`` without their prefix, such as ``{"url": "redis://localhost/2", "ttl":
"30s"}``, and ``"board_url"``, the URL of the board that the admin links to. Write each setting in
one place only: in this dict, or as a setting of the Celery app such as ``CELERY_LEASES_URL``.

Under Django's test runner the records and the leases are in the test database. If Django has made
no test database, or one in memory, they are in the memory of the process. So tests never use the
records of the configured database, nor the leases and cooldown groups of the configured lease
store.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Final

from django.conf import settings
from django.db import DEFAULT_DB_ALIAS, connections

from celery_leases.django.databases import IN_MEMORY, url_of
from celery_leases.errors import LeaseConfigurationError
from celery_leases.options import DATABASE as IN_DATABASE

SETTING: Final = "CELERY_LEASES"
DATABASE: Final = "database"
BOARD: Final = "board_url"
_REFUSED: Final = {
    "database_url": 'write the alias of a database, {"database": "<alias>"}, or CELERY_LEASES_DATABASE_URL for a '
    "database that Django does not know",
    "database_schema": "the models are read through Django's own connection; write the schema into the OPTIONS of the "
    'alias, {"options": "-c search_path=<schema>"}',
}

_configured: dict[str, str] = {}
"""The database names in the project's settings; Django's test runner replaces them in Django."""


def remember_names() -> None:
    """Remember the configured name of each database, before a test runner changes it."""
    _configured.update(
        {alias: str(given.get("NAME")) for alias, given in connections.settings.items()}
    )


def given_settings() -> Mapping[str, Any]:
    """The dict ``CELERY_LEASES``.

    Raises :class:`~celery_leases.errors.LeaseConfigurationError` if it is wrong.
    """
    given = getattr(settings, SETTING, None)
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise LeaseConfigurationError(
            f'{SETTING} is of type {type(given).__name__}: write a dict, such as {{"database": "default"}}'
        )
    for name, advice in _REFUSED.items():
        if name in given:
            raise LeaseConfigurationError(f"{SETTING}[{name!r}]: {advice}")
    wrong = next(
        (name for name in given if not isinstance(name, str) or name.startswith("lease")),
        None,
    )
    if wrong is not None:
        raise LeaseConfigurationError(
            f"{SETTING}[{wrong!r}]: write the name of a setting without its prefix"
        )
    return given


def board_url() -> str | None:
    """The URL of the board, with a slash at the end; ``None`` if the settings have none."""
    url = given_settings().get(BOARD)
    if url is None:
        return None
    if not isinstance(url, str) or not url.startswith(("/", "http://", "https://")):
        raise LeaseConfigurationError(
            f'{SETTING}[{BOARD!r}]={url!r} is not usable; write a path or a URL, such as "/leases/"'
        )
    return f"{url.rstrip('/')}/"


def alias_of_records() -> str:
    """The alias in ``DATABASES`` of the database with the records."""
    alias = given_settings().get(DATABASE, DEFAULT_DB_ALIAS)
    if not isinstance(alias, str) or alias not in connections.settings:
        known = ", ".join(sorted(connections.settings))
        raise LeaseConfigurationError(
            f"{SETTING}[{DATABASE!r}]={alias!r} is not an alias of DATABASES; its aliases are {known}"
        )
    return alias


def url_of_alias(alias: str) -> str:
    """The URL of the database of *alias*; under a test runner, of the test database."""
    connection = connections[alias]
    return url_of(alias, connection.vendor, connection.settings_dict)


def url_of_records() -> str:
    """The URL of the records database; in a test without a test database, that of the memory."""
    alias = alias_of_records()
    name = str(connections[alias].settings_dict.get("NAME"))
    if under_test() and name == _configured.get(alias, name):
        return IN_MEMORY
    return url_of_alias(alias)


def under_test() -> bool:
    """Whether Django's test environment is set up.

    Its ``_TestState`` has ``saved_data`` then. ``django.core.mail.outbox`` does not show it: the
    ``locmem`` mail backend creates that anywhere.
    """
    utils = sys.modules.get("django.test.utils")
    return hasattr(getattr(utils, "_TestState", None), "saved_data")


def complete(written: Mapping[str, Any]) -> dict[str, Any]:
    """The settings ``leases_*`` of a Celery app whose own configuration has those in *written*.

    Raises :class:`~celery_leases.errors.LeaseConfigurationError` if a setting is written twice.
    """
    given = {
        f"leases_{name}": value
        for name, value in given_settings().items()
        if name not in (DATABASE, BOARD)
    }
    for name, value in given.items():
        if name in written and written[name] != value:
            raise LeaseConfigurationError(
                f"{SETTING}[{name.removeprefix('leases_')!r}] and the setting {name.upper()} of the Celery app differ; "
                "remove one of them"
            )
    if DATABASE in given_settings() and written.get("leases_database_url") and not under_test():
        raise LeaseConfigurationError(
            f"{SETTING}[{DATABASE!r}] and the setting LEASES_DATABASE_URL of the Celery app both name the records' "
            "database; remove one of them"
        )
    found = {**written, **given}
    if under_test():
        found["leases_url"] = IN_DATABASE
    if under_test() or not found.get("leases_database_url"):
        found["leases_database_url"] = url_of_records()
    return found
