"""The tasks of :mod:`tests.apps.leased` in a worker that dies or waits at a named step.

FAILPOINT is the step, FAILPOINT_TIMES how often it acts, and a file FAILPOINT_FILE plus a number
records each time. ``before publish``, ``after publish`` and ``after mark`` kill the whole worker
during a reschedule. ``never registered`` is a worker that dies before it has registered what it has
fetched. ``noted`` sends the worker the signal of a cold shutdown while a body runs, when kombu has
noted another message and not delivered it yet. ``after release`` kills the child after its success
was written and its lease released. ``after callbacks`` kills the whole worker after Celery has sent
the callbacks and before they are marked as sent. ``slow rescheduled`` delays the publication until
the file FAILPOINT_GATE exists.
"""

import os
import signal

from celery.signals import task_success
from celery.worker import state
from kombu.transport.virtual.base import QoS

from celery_leases.attempt import run
from celery_leases.worker import publisher, takeover
from tests.apps.failpoints import STEP, reach, strikes
from tests.apps.leased import *  # noqa: F403
from tests.apps.leased import app, note, wait_for  # noqa: F401

_publish = publisher.Publisher._publish
_reschedule = publisher.Publisher.reschedule
_run = run.Execution._run


@task_success.connect(weak=False)
def _after_callbacks(**_):
    reach("after callbacks", whole_worker=True)


# The library is connected already, and its receiver would set the mark before this one kills.
task_success.receivers.insert(0, task_success.receivers.pop())


def _publish_and_die(self, *args, **kwargs):
    reach("before publish", whole_worker=True)
    if STEP == "slow rescheduled" and strikes():
        note("failpoint", step=STEP)
        wait_for(os.environ["FAILPOINT_GATE"])
    _publish(self, *args, **kwargs)
    reach("after publish", whole_worker=True)


def _reschedule_and_die(self, *args, **kwargs):
    published = _reschedule(self, *args, **kwargs)
    reach("after mark", whole_worker=True)
    return published


def _run_and_die(self, *args, **kwargs):
    reply = _run(self, *args, **kwargs)
    reach("after release")
    return reply


_append = QoS.append


def _append_and_stop(self, *args):
    if state.active_requests:
        os.kill(os.getpid(), signal.SIGQUIT)
    _append(self, *args)


if STEP == "noted":
    QoS.append = _append_and_stop  # type: ignore[method-assign]
if STEP == "never registered":
    takeover.WorkerLease.received = lambda *_: None  # type: ignore[method-assign,assignment]
publisher.Publisher._publish = _publish_and_die
publisher.Publisher.reschedule = _reschedule_and_die
run.Execution._run = _run_and_die
