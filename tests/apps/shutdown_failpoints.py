"""The tasks of :mod:`tests.apps.leased` in a greenlet worker that is shut down cold during a step.

STEP is the step: ``prerun`` and ``store`` are Celery's steps before and after the delivery;
``claim``, ``settle`` and ``publish`` belong to the protocol. The first greenlet that reaches the
step waits until the worker has got the signal and has had the time to kill that greenlet. With
SIGNALS, the signal interrupts that very greenlet, and the main one gets the time to end the
process. ``publish`` needs a second call of the key, which is rescheduled.
"""

import os
import signal
import time

from celery.backends.base import Backend
from celery.signals import task_prerun
from celery.worker import state

from celery_leases.stores.sql.records import SqlRecordStore
from celery_leases.worker.publisher import Publisher
from tests.apps.leased import *  # noqa: F403
from tests.apps.leased import app, note  # noqa: F401

_reached: list[str] = []


def _halt(step: str) -> None:
    if step != os.environ.get("STEP") or _reached:
        return
    _reached.append(step)
    note("halted", step=step)
    if "SIGNALS" in os.environ:
        signal.raise_signal(signal.SIGQUIT)
    while state.should_terminate is None:
        time.sleep(0.01)
    time.sleep(3 if "SIGNALS" in os.environ else 0.2)
    note("went on", step=step)


def _halt_before(owner: type, name: str, step: str) -> None:
    real = getattr(owner, name)

    def late(self, *args, **kwargs):
        _halt(step)
        return real(self, *args, **kwargs)

    setattr(owner, name, late)


@task_prerun.connect(weak=False)
def _before_the_call(**_):
    _halt("prerun")


_halt_before(SqlRecordStore, "insert_or_read", "claim")
_halt_before(SqlRecordStore, "settle", "settle")
_halt_before(Publisher, "_publish", "publish")
_halt_before(Backend, "store_result", "store")
