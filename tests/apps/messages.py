"""Leased tasks that write down their messages, and a serializer that a worker can only read.

While the file REFUSED exists, no call can be rescheduled. DELIVERY_LIMIT is that of the worker's
queue, a quorum queue.
"""

import json
import os
from pathlib import Path

from celery.signals import task_received, worker_init
from kombu import Exchange, Queue
from kombu.serialization import register

from celery_leases import LeasedTask, Snooze
from celery_leases.decide import waiting
from celery_leases.worker.publisher import Publisher
from tests.apps.leased import app, note, wait_for

if "DELIVERY_LIMIT" in os.environ:
    _name, _limit = app.conf.task_default_queue, int(os.environ["DELIVERY_LIMIT"])
    _arguments = {"x-queue-type": "quorum", "x-delivery-limit": _limit}
    app.conf.task_queues = [Queue(_name, Exchange(_name), _name, queue_arguments=_arguments)]
    app.conf.broker_transport_options = {"consumer_timeout": 3.0}

    @worker_init.connect(weak=False)
    def _hold_shortly(sender, **_):
        if sender.app is app:  # the tests run workers of other apps in their own process
            vars(waiting)["FIRST_PUBLISH_RETRY_TIME"] = 0.5


app.conf.accept_content = ["json", "pickle", "read-only"]
_in_worker: list[bool] = []


def _write(value):
    if _in_worker:
        raise TypeError("a worker does not write this")
    return json.dumps(value)


register(
    "read-only",
    _write,
    json.loads,
    content_type="application/x-read-only",
    content_encoding="utf-8",
)


_publish = Publisher._publish


def _publish_unless_refused(self, task, *args, **kwargs):
    if Path(os.environ.get("REFUSED", "-")).exists():
        note("refused", id=task.request.id)
        raise OSError("the broker takes nothing")
    return _publish(self, task, *args, **kwargs)


Publisher._publish = _publish_unless_refused


@worker_init.connect(weak=False)
def _now_in_worker(**_):
    _in_worker.append(True)


@task_received.connect(weak=False)
def _received(request, **_):
    message = request.message
    note(
        "received",
        id=request.id,
        headers=json.loads(json.dumps(message.headers, default=repr)),
        content=[message.content_type, message.content_encoding],
        properties={
            name: value for name, value in message.properties.items() if name in _PROPERTIES
        },
    )


_PROPERTIES = ("correlation_id", "reply_to", "priority", "delivery_mode")


@app.task(base=LeasedTask, bind=True, lease_key="reschedules_once:{name}", lease_fingerprint=False)
def reschedules_once(self, name, payload=None, delay=0.2):
    """Be rescheduled once, then write the type of *payload*."""
    first = not self.request.headers["celery_leases"].get("copy")
    note("begin", name=name, id=self.request.id)
    if first:
        raise Snooze(delay)
    return type(payload).__name__


@app.task(base=LeasedTask, lease_key="stays:{name}")
def stays(name, gate):
    note("begin", name=name)
    wait_for(gate)
    return name
