"""The workers of an app on a Redis broker, with their leases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from celery import Celery
from kombu.exceptions import OperationalError

from celery_leases.errors import BrokerUnavailable, LeaseConfigurationError
from celery_leases.text.durations import in_short
from celery_leases.text.redaction import redact
from celery_leases.worker.takeover import prefix_of


@dataclass(frozen=True, slots=True)
class WorkerLeaseState:
    """The host name and process id of a worker, the number of leased messages that it has not
    acknowledged, and the seconds until its lease ends (negative: it has ended; ``None``: its
    messages are being returned).
    """

    worker: str
    pid: int
    messages: int
    lease_ends_in: float | None

    @property
    def lease(self) -> str:
        """Until when the lease lasts, in words."""
        if self.lease_ends_in is None:
            return "ended, its messages are being returned"
        if self.lease_ends_in > 0:
            return f"ends in {in_short(self.lease_ends_in)}"
        return f"ended {in_short(-self.lease_ends_in)} ago"


def workers_of(app: Celery) -> Sequence[WorkerLeaseState]:
    """The workers of *app* on its broker, by name.

    Raises :class:`LeaseConfigurationError` for a broker other than Redis, and
    :class:`BrokerUnavailable`.
    """
    from celery_leases.stores.redis.workers import Workers

    options = {**(app.conf.broker_transport_options or {}), "max_retries": 1}
    with app.connection_for_read(transport_options=options) as connection:
        if connection.transport.driver_type != "redis":
            raise LeaseConfigurationError(
                "only workers on a Redis broker have leases: other brokers return the messages of a dead worker "
                "when its connection ends"
            )
        errors: Any = (
            OperationalError,
            *connection.connection_errors,
            *connection.channel_errors,
        )
        try:
            channel = connection.default_channel
            found = Workers(channel.pool, prefix_of(channel)).listed()
        except errors as error:
            raise BrokerUnavailable(f"the broker: {redact(str(error))}") from error
    states = []
    for state in found:
        name, pid, _, _ = state.name.rsplit("/", 3)
        states.append(WorkerLeaseState(name, int(pid), state.messages, state.remaining))
    return sorted(states, key=lambda state: (state.worker, state.pid))
