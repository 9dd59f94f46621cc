"""RabbitMQ's consumer timeout: how long a delivery may wait, and when it may be returned."""

from __future__ import annotations

import pytest
from celery import Celery
from kombu import Queue

from celery_leases.decide.waiting import may_be_returned, publish_retry_pause, publish_retry_time
from celery_leases.settings import read_settings
from celery_leases.worker.app_settings import settings_of
from celery_leases.worker.rabbitmq_consumer_timeout import consumer_timeout_warning
from celery_leases.worker.routes import without_broker_headers

DATABASE = {"leases_database_url": "sqlite://"}


def an_app(**conf: object) -> Celery:
    """An app on RabbitMQ, which is not connected to."""
    app = Celery("limits", broker="amqp://127.0.0.1:1//", set_as_current=False)
    app.conf.update(DATABASE | conf)
    return app


@pytest.mark.parametrize(
    ("broker", "timeout", "countdown"),
    [
        ("amqp://rabbit//", None, 600.0),
        ("amqp://rabbit//", "1h", 600.0),
        ("amqps://rabbit//", 30, 10.0),
        ("redis://redis/0", 30, 600.0),
    ],
)
def test_a_hop_leaves_the_body_two_thirds_of_the_consumer_timeout(broker, timeout, countdown):
    options = {"consumer_timeout": timeout}
    assert read_settings(DATABASE, broker, options).longest_countdown == countdown


def test_the_shortest_consumer_timeout_of_a_queue_counts() -> None:
    queues = [Queue("a", queue_arguments={"x-consumer-timeout": 60_000}), Queue("b")]
    assert settings_of(an_app(task_queues=queues)).consumer_timeout == 60.0
    given = {"task_queues": queues, "broker_transport_options": {"consumer_timeout": "2m"}}
    assert settings_of(an_app(**given)).consumer_timeout == 120.0
    assert settings_of(an_app()).consumer_timeout == 1800.0


def test_a_time_limit_that_with_its_wait_exceeds_the_timeout_is_reported() -> None:
    for conf, told in (({}, True), ({"task_default_queue_type": "quorum"}, False)):
        app = an_app(**conf)
        over = consumer_timeout_warning(app, {"short": 1200.0, "long": 1201.0}, settings_of(app))
        assert (over is not None) is told
        if over is not None:
            assert "long (1201 s)" in over[0]
            assert "short (" not in over[0]
            assert over[1].endswith('broker_transport_options = {"consumer_timeout": 1802}')


def test_a_delivery_is_held_longer_the_more_often_it_was_given_back() -> None:
    assert [publish_retry_time(before, None, 600.0) for before in (0, 1, 4, 99)] == [
        5.0, 10.0, 60.0, 60.0,
    ]  # fmt: skip
    assert [publish_retry_time(before, 20, 600.0) for before in (18, 19, 20)] == [
        60.0,
        600.0,
        600.0,
    ]
    assert [may_be_returned(before, 20) for before in (19, 20)] == [True, False]
    assert may_be_returned(10**6, None)
    assert [publish_retry_pause(tries) for tries in (0, 1, 3, 4, 2000)] == [
        1.0,
        2.0,
        8.0,
        15.0,
        15.0,
    ]


def test_headers_of_the_broker_are_not_sent_back_to_it() -> None:
    own = {"x-tenant": "north", "x-request-id": "7", "visit": 1}
    added = (
        "x-death", "x-first-death-queue", "x-last-death-reason", "x-delivery-count",
        "x-acquired-count", "CC",
    )  # fmt: skip
    assert without_broker_headers(own | dict.fromkeys(added, 1)) == own
