"""The authoriser of :mod:`celery_leases.ops.board` for a Django project: users of the admin.

Needs the extras ``django`` and ``web``.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

from django.conf import settings
from django.contrib import auth
from django.db import close_old_connections
from django.http import HttpRequest

from celery_leases.ops.board import Operator

VIEW_PERMISSIONS: Final = ("celery_leases.view_leaserecord", "celery_leases.view_leasegroup")
CHANGE_PERMISSIONS: Final = (
    *(f"celery_leases.{what}_leaserecord" for what in ("retry", "release", "forget", "resolve")),
    "celery_leases.operate_leasegroup",
)


def staff(request: Any) -> Operator | None:
    """The staff member whose session cookie a request has; ``None`` for other users.

    The permissions to view records and groups are required. With the permissions of all admin
    actions the operator may also change keys and groups.
    """
    django_request: Any = HttpRequest()
    store = import_module(settings.SESSION_ENGINE).SessionStore
    close_old_connections()
    try:
        django_request.session = store(request.cookies.get(settings.SESSION_COOKIE_NAME))
        user = auth.get_user(django_request)
        if not (user.is_active and user.is_staff and user.has_perms(VIEW_PERMISSIONS)):
            return None
        return Operator(user.get_username(), may_change=user.has_perms(CHANGE_PERMISSIONS))
    finally:
        close_old_connections()
