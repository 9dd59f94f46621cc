"""Leased tasks as ``link_error``: published where Celery would call them inside the failed call.

Celery calls a task with more than one parameter as ``errback(request, exc, traceback)`` in the
process of the failed call, without a message. Such a body would run without lease and record, so a
leased task is published with these three arguments. They have no JSON form, so the message carries
mappings in their places, and the body gets them rebuilt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from celery.app.task import Context
from celery.exceptions import NotRegistered
from celery.utils.functional import arity_greater
from celery.utils.serialization import ensure_serializable
from kombu.exceptions import EncodeError
from kombu.serialization import dumps

from celery_leases.keys import OF_ERRBACK
from celery_leases.text.notices import logger
from celery_leases.worker.headers import OURS

_FOLLOWING: Final = {"callbacks", "errbacks", "chain", "chord", "reply_to"}
"""The fields of a failed request that its errbacks do not get: they name other calls."""


def publish_leased(
    backend: Any, request: Any, exc: BaseException, traceback: str | None
) -> Sequence[Any]:
    """Publish the leased errbacks of the failed *request* that Celery would call; return the other
    errbacks.
    """
    others = []
    for each in request.errbacks:
        if (errback := _leased(backend, each)) is None:
            others.append(each)
        else:
            _publish(backend.app, errback, request, exc, traceback)
    return others


def _leased(backend: Any, given: Any) -> Any:
    """The errback as a signature if its task is leased and Celery would call it here; otherwise
    ``None``.
    """
    errback = backend.app.signature(given)
    if not errback._app:  # noqa: SLF001 - as Celery does
        errback._app = backend.app  # noqa: SLF001
    try:
        task = errback.type
    except NotRegistered:
        return None
    header = getattr(task, "__header__", None)
    if not hasattr(task, "lease_options") or header is None or isinstance(header, partial):
        return None
    greater = getattr(backend, "_errback_arity_greater", None)  # since Celery 5.7
    called = greater(errback, 1) if greater is not None else arity_greater(header, 1)
    return errback if called else None


def _publish(
    app: Any, errback: Any, request: Any, exc: BaseException, traceback: str | None
) -> None:
    """Publish *errback*. As in Celery, the failure of one errback does not stop the others."""
    serializer = (
        errback.options.get("serializer") or errback.type.serializer or app.conf.task_serializer
    )
    origin = {"parent_id": request.id, "root_id": request.root_id or request.id}
    try:
        arguments = _as_message(request, exc, traceback, serializer)
        if app.conf.task_always_eager or (request.delivery_info or {}).get("is_eager"):
            errback.apply(arguments, **origin)
        else:
            errback.apply_async(arguments, add_to_parent=False, **origin)
    except Exception:  # noqa: BLE001 - logged, as Celery logs the error of an errback
        logger.exception(
            "%s[%s]: its errback %s is lost",
            request.task,
            request.id,
            errback.task,
            code="errback-lost",
        )


def _as_message(
    request: Any, exc: BaseException, traceback: str | None, serializer: str
) -> tuple[dict[str, Any], ...]:
    """The three arguments of an errback as a message carries them."""

    def check(value: Any) -> None:
        dumps(value, serializer=serializer)

    fields: dict[str, Any] = {}
    for name, value in vars(request).items():
        if name not in _FOLLOWING and not name.startswith(("_", OURS)):
            try:
                check(value)
            except EncodeError:  # such as arguments that were published with pickle
                continue
            fields[name] = value
    error = {
        "exc_type": type(exc).__qualname__,
        "exc_module": type(exc).__module__,
        "exc_message": list(ensure_serializable(exc.args, check)),
    }
    return (
        {OF_ERRBACK: "request", **fields},
        {OF_ERRBACK: "exception", **error},
        {OF_ERRBACK: "traceback", "text": traceback},
    )


def rebuilt(task: Any, args: Sequence[Any]) -> list[Any]:
    """The arguments of a body, with those of :func:`_as_message` rebuilt.

    The exception has its own class if its module is loaded here, as in ``AsyncResult.get()``.
    """
    return [
        _rebuilt(task, value) if type(value) is dict and OF_ERRBACK in value else value
        for value in args
    ]


def _rebuilt(task: Any, value: Mapping[str, Any]) -> Any:
    fields = {name: given for name, given in value.items() if name != OF_ERRBACK}
    match value[OF_ERRBACK]:
        case "request":
            return Context(fields)
        case "exception":
            return task.backend.exception_to_python(fields)
        case _:
            return fields.get("text")
