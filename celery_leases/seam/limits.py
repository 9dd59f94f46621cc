"""How long RabbitMQ lets a worker keep a delivery, and the tasks that need longer."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from celery import Celery
from celery.utils.quorum_queues import detect_quorum_queues

from celery_leases.settings import Settings

logger = logging.getLogger("celery_leases")


def consumer_timeout_of(queues: Any) -> float | None:
    """The shortest ``x-consumer-timeout`` of the app's ``task_queues``, in seconds; ``None`` where none has one."""
    if isinstance(queues, Mapping):
        given = [options.get("queue_arguments") for options in queues.values() if isinstance(options, Mapping)]
    else:
        given = [getattr(queue, "queue_arguments", None) for queue in queues or ()]
    timeouts = [(arguments or {}).get("x-consumer-timeout") for arguments in given]
    known = [timeout / 1000 for timeout in timeouts if isinstance(timeout, int | float) and timeout > 0]
    return min(known, default=None)


def warn_of_consumer_timeout(app: Celery, tasks: Mapping[str, float], settings: Settings) -> None:
    """Warn of *tasks* whose hard time limit, with the wait before it, may be longer than RabbitMQ allows."""
    if app.connection_for_read().transport.driver_type != "amqp":
        return
    # With native delayed delivery a message that waits is not with a worker.
    hop = 0.0 if detect_quorum_queues(app, "amqp")[0] else settings.longest_hop
    long = {name: limit for name, limit in tasks.items() if limit + hop > settings.consumer_timeout}
    if long:
        logger.warning(
            "RabbitMQ stops a worker that keeps a delivery for longer than its consumer_timeout, here %g s; a wait of "
            "up to %g s and the time_limit of these tasks are longer together: %s. Raise consumer_timeout in "
            "rabbitmq.conf, and write leases_consumer_timeout = %.0f",
            settings.consumer_timeout,
            hop,
            ", ".join(f"{name} ({limit:g} s)" for name, limit in sorted(long.items())),
            1.5 * max(long.values()),
        )
