"""What we write into a message and a request, and what a call is known by: its id, its pin, its key, its group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from celery_leases.core.errors import KeyUnusable
from celery_leases.core.keys import CallKey, call_group, call_key, stored_key

TOKEN = "celery_leases_token"  # noqa: S105 - the name of a field, not a password
"""Where the owner token travels to the pool child: a field of the request, and so of ``task.request``."""

WATCHED = "celery_leases_watched"
"""Tells the pool child, in the same way, whether the worker sends task events now."""

HEADER = "celery_leases"
"""The message header that pins key and fingerprint of a call, and names its copies."""


def owner_of(token: str, pid: int) -> str:
    """The owner token of one attempt: that of its delivery, in one process.

    When several children die at once, billiard may give the delivery of one that had begun to another child
    without telling anybody: two processes run under one token, and must not take each other's row for their own.
    """
    return f"{token}-{pid:x}"


def call_id_of(request_id: str, nesting: int | None) -> str:
    """The id of a call. A task that replaces itself goes on under the id it has, and must not be taken for done."""
    return f"{request_id}~{nesting}" if nesting else request_id


def pinned(headers: Mapping[str, Any] | None, task: str, call_id: str) -> dict[str, Any]:
    """What an earlier delivery of this very call wrote into the message; empty for anybody else's pin."""
    pin = (headers or {}).get(HEADER)
    if isinstance(pin, dict) and (pin.get("task"), pin.get("id")) == (task, call_id):
        return dict(pin)
    return {}


def key_of(task: Any, pin: Mapping[str, Any], call_id: str, args: Any, kwargs: Any) -> CallKey:
    """The key of the arguments of a leased *task*; a pinned one stays, whatever arguments a retry brought.

    Raises :class:`~celery_leases.KeyUnusable` where there is neither.
    """
    options = task.lease_options
    try:
        made = call_key(task.name, options, task.lease_signature, call_id, args, kwargs)
    except KeyUnusable:
        if "key" not in pin:
            raise
        made = None
    if "key" not in pin or (made and (made.key, made.fingerprint) == (pin["key"], pin.get("fingerprint"))):
        assert made is not None
        return made
    return CallKey(pin["key"], stored_key(task.name, pin["key"], options.scope), pin.get("fingerprint"))


def group_of(task: Any, pin: Mapping[str, Any], args: Any, kwargs: Any) -> str | None:
    """The cooldown group of the arguments; the pinned one where a retry brought arguments that make none."""
    try:
        return call_group(task.name, task.lease_options, task.lease_signature, args, kwargs)
    except KeyUnusable:
        if "key" not in pin:
            raise
        group: str | None = pin.get("group")
        return group
