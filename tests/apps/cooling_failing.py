"""The tasks of :mod:`tests.apps.cooling` in a worker whose calls stand still at named steps, until
it is killed.

The test puts a file into the directory FAILPOINTS, named by :func:`armed`, for each call that shall
stop at a step: around the outcome of a failure, or around the publishing of the copy that comes
back.
"""

import os
import time
from contextlib import suppress
from pathlib import Path

from celery_leases.stores.redis.leases import RedisLeaseStore
from celery_leases.stores.sql.leases import DatabaseLeaseStore
from celery_leases.stores.sql.records import SqlRecordStore
from celery_leases.worker import reschedule
from tests.apps.cooling import *  # noqa: F403
from tests.apps.cooling import app  # noqa: F401
from tests.apps.leased import note


def armed(directory: Path | str, step: str, about: str) -> Path:
    """The file that makes what is *about* (a key, or a group) stop at *step*."""
    return Path(directory) / f"{step} {about}"


def stop_at(step: str, about: str) -> None:
    """Stand still here if the test wants it."""
    with suppress(FileNotFoundError):
        armed(os.environ["FAILPOINTS"], step, about).unlink()
        note("failpoint", step=step, about=about)
        time.sleep(600)


def _around(step, method, about):
    """*method*, before and after which a call may stop; *about* tells from its arguments what it is
    about.
    """

    def done(self, *args, **kwargs):
        stop_at(f"before {step}", about(*args))
        answer = method(self, *args, **kwargs)
        stop_at(f"after {step}", about(*args))
        return answer

    return done


def _key(stored_key, *_):
    return stored_key.partition("|")[2]


SqlRecordStore.settle = _around("settle", SqlRecordStore.settle, lambda record, _: record.key)
reschedule.Copies._publish = _around(
    "publish", reschedule.Copies._publish, lambda _task, pin, _delay: pin.key
)
reschedule.Copies.reschedule = _around(
    "rescheduled", reschedule.Copies.reschedule, lambda _task, pin, *_: pin.key
)
for store in (RedisLeaseStore, DatabaseLeaseStore):
    store.cool = _around("cool", store.cool, _key)
    store.close_gate = _around("close", store.close_gate, lambda group, *_: group)
