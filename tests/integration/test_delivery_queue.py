"""A copy finds its way through a broker whose exchanges live in kombu, also from a process that has
declared none.
"""

from __future__ import annotations

from contextlib import suppress

import pytest
from celery import Celery
from celery.app.task import Context
from kombu import Exchange, Queue
from kombu.transport.virtual.base import BrokerState

from celery_leases.worker.routes import FixedRoute, Routes


@pytest.mark.parametrize(("kind", "key"), [("topic", "orders.paid"), ("fanout", "")])
def test_a_copy_reaches_the_queues_of_the_exchange_it_came_through(
    leases_redis_url: str, leases_queue: str, kind: str, key: str
) -> None:
    app = Celery("routed", broker=leases_redis_url, set_as_current=False)
    queue = Queue(
        leases_queue,
        Exchange(f"{leases_queue}-all", type=kind),
        routing_key="orders.#" if key else "",
    )
    app.conf.task_queues = [queue]
    request = Context(delivery_info={"exchange": queue.exchange.name, "routing_key": key})
    got: list[object] = []
    with (
        app.connection_for_read() as reading,
        app.connection_for_write() as writing,
        reading.Consumer(
            [queue], callbacks=[lambda body, message: got.append((body, message.ack()))]
        ),
    ):
        with suppress(TimeoutError):
            reading.drain_events(timeout=0.2)  # it subscribes
        writing.transport.state = BrokerState()  # as in a pool child
        producer = app.amqp.Producer(writing)
        back = Routes(app).to_queue_of(producer, request, 0.0)
        app.send_task("routed.work", router=FixedRoute(), producer=producer, **back)
        while not got:
            reading.drain_events(timeout=5)
    assert len(got) == 1
