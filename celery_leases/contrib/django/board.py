"""The authoriser of :mod:`celery_leases.board` for a Django project: whoever is logged in to the
admin.

Needs the extras ``django`` and ``web``.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

from django.conf import settings
from django.contrib import auth
from django.db import close_old_connections
from django.http import HttpRequest

from celery_leases.board import Operator

TO_SEE: Final = ("celery_leases.view_leaserecord", "celery_leases.view_leasegate")
TO_CHANGE: Final = (
    *(f"celery_leases.{what}_leaserecord" for what in ("retry", "release", "forget", "resolve")),
    "celery_leases.operate_leasegate",
)


def staff(request: Any) -> Operator | None:
    """The member of the staff whose session a request has; ``None`` for anybody else.

    They look with the permissions to view records and groups, and change with all those of the
    admin's actions.
    """
    asked: Any = HttpRequest()
    store = import_module(settings.SESSION_ENGINE).SessionStore
    close_old_connections()
    try:
        asked.session = store(request.cookies.get(settings.SESSION_COOKIE_NAME))
        user = auth.get_user(asked)
        if not (user.is_active and user.is_staff and user.has_perms(TO_SEE)):
            return None
        return Operator(user.get_username(), may_change=user.has_perms(TO_CHANGE))
    finally:
        close_old_connections()
