"""The queue of a delivery, from which its copies must be delivered too."""

from __future__ import annotations

import socket

import pytest
from kombu import Connection, Exchange, Queue

from celery_leases.worker.routes import origin_of


@pytest.mark.parametrize(
    "route",
    [{}, {"exchange": "", "routing_key": ""}, {"exchange": None, "routing_key": None}],
    ids=["absent", "empty", "null"],
)
def test_the_queue_of_a_message_without_exchange_and_routing_key_is_known(route) -> None:
    seen = []
    with Connection("memory://") as connection, connection.channel() as channel:
        queues = [Queue(name, Exchange(name), name) for name in ("first", "second")]
        with connection.Consumer(
            queues,
            callbacks=[lambda _, message: seen.append(origin_of(message, None))],
            no_ack=True,
            channel=channel,
        ):
            properties = {"delivery_info": route, "delivery_tag": "1", "body_encoding": "utf-8"}
            message = {"body": "1", "properties": properties, "content-type": "application/json"}
            channel._put("second", message)
            while not seen:
                try:
                    connection.drain_events(timeout=1)
                except socket.timeout:  # noqa: UP041
                    break
    assert [origin["queue"] for origin in seen] == ["second"]
