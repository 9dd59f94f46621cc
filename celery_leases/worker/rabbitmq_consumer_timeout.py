"""How long RabbitMQ lets a worker hold a delivery, and the tasks that need longer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from celery import Celery
from celery.utils.quorum_queues import detect_quorum_queues

from celery_leases.settings import Settings


def consumer_timeout_of(queues: Any) -> float | None:
    """The shortest ``x-consumer-timeout`` of the app's ``task_queues``, in seconds; ``None`` if
    none has one.
    """
    if isinstance(queues, Mapping):
        given = [
            options.get("queue_arguments")
            for options in queues.values()
            if isinstance(options, Mapping)
        ]
    else:
        given = [getattr(queue, "queue_arguments", None) for queue in queues or ()]
    timeouts = [(arguments or {}).get("x-consumer-timeout") for arguments in given]
    known = [
        timeout / 1000 for timeout in timeouts if isinstance(timeout, int | float) and timeout > 0
    ]
    return min(known, default=None)


def consumer_timeout_warning(
    app: Celery, tasks: Mapping[str, float], settings: Settings
) -> tuple[str, str] | None:
    """A warning about those of *tasks* whose hard time limit, with the wait before it, may be
    longer than RabbitMQ allows, and what to write; ``None``: there are none.
    """
    if app.connection_for_read().transport.driver_type != "amqp":
        return None
    # With native delayed delivery, a message waits at the broker and not in a worker.
    hop = 0.0 if detect_quorum_queues(app, "amqp")[0] else settings.longest_countdown
    long = {name: limit for name, limit in tasks.items() if limit + hop > settings.consumer_timeout}
    if not long:
        return None
    named = ", ".join(f"{name} ({limit:g} s)" for name, limit in sorted(long.items()))
    return (
        (
            "RabbitMQ stops a worker that holds a delivery for longer than its consumer_timeout, here "
            f"{settings.consumer_timeout:g} s; a wait of up to {hop:g} s and the time_limit of these "
            f"tasks are longer together: {named}"
        ),
        (
            "raise consumer_timeout in rabbitmq.conf, and write "
            f'broker_transport_options = {{"consumer_timeout": {1.5 * max(long.values()):.0f}}}'
        ),
    )
