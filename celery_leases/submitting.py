"""A web request that asks for the work of a key: look, publish if that is needed, and say what to
answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kombu.exceptions import OperationalError

from celery_leases.common.redaction import redact
from celery_leases.errors import AlreadyQueued, BrokerUnavailable, LeaseConfigurationError
from celery_leases.http import POLL_AFTER, HttpAnswer, answer
from celery_leases.protocol.records import State
from celery_leases.protocol.status import ABSENT, LeaseStatus
from celery_leases.worker import outbox

__all__ = ["submit"]


def submit(
    task: Any,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    location: Callable[[LeaseStatus], str | None] | str | None = None,
    idempotent: bool = False,
    session: Any = None,
    poll_after: float = POLL_AFTER,
    **options: Any,
) -> HttpAnswer:
    """Ask for the work of a leased *task* with a ``lease_key``, and say what to answer; see
    ``docs/http.md``.

    The call is published only where the answer is 202 and neither a message nor a worker has the
    work already. *location* is the URL of the status, or makes it. *idempotent*: the key is that of
    an ``Idempotency-Key``. *session*, a SQLAlchemy session or a connection on the records'
    database: the call is published by ``apply_async_in`` once the caller has committed. *options*
    are those of ``apply_async``. Two requests at the same moment may both publish; one of the calls
    then replays the other's result. With a *session* one of them waits.

    Raises :class:`~celery_leases.errors.KeyReused` for a key that stands for other content,
    :class:`~celery_leases.errors.BrokerUnavailable` where the broker does not answer, and
    what else ``lease_status`` and publishing raise; :func:`celery_leases.http.answer` knows those
    too.
    """
    given, named = tuple(args), dict(kwargs or {})
    if getattr(task, "lease_options", None) is None:
        raise LeaseConfigurationError(
            f"{getattr(task, 'name', task)!s} is not a leased task: give it base=LeasedTask and a lease_key"
        )

    def look() -> tuple[LeaseStatus, HttpAnswer]:
        status: LeaseStatus = task.lease_status(*given, **named)
        if status.state == State.DONE and task.lease_options.rerun:
            status = replace(status, state=ABSENT, result=None)  # each call is work of its own
        where = location(status) if callable(location) else location
        asked: Any = {"asked": "work", "idempotent": idempotent, "poll_after": poll_after}
        return status, answer(status, location=where, **asked)

    status, sent = look()
    if status.state in (State.FAILED, State.UNCERTAIN):
        return sent
    if outbox.is_wanted(task, given, named) and sent.accepted:
        try:
            if session is not None:
                task.apply_async_in(session, given, named, **options)
            else:
                task.apply_async(given, named, **options)
        except AlreadyQueued:  # by another request, since the look
            return look()[1]
        except OperationalError as error:
            raise BrokerUnavailable(
                f"{status.key}: the broker does not take the call: {redact(str(error))}", status.key
            ) from error
    return sent
