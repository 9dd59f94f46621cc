"""The tasks of :mod:`tests.apps.cooling` in a worker whose calls stop at named steps until the
worker is killed.

For each call that must stop, the test creates a file in the directory FAILPOINTS, named by
:func:`armed`. The steps are around the write of a failure's outcome and around the publication of
the rescheduled copy.
"""

import os
import time
from contextlib import suppress
from pathlib import Path

from celery_leases.stores.redis.cooldown_groups import RedisGroups
from celery_leases.stores.redis.leases import RedisLeaseStore
from celery_leases.stores.sql.cooldown_groups import SqlGroups
from celery_leases.stores.sql.leases import DatabaseLeaseStore
from celery_leases.stores.sql.records import SqlRecordStore
from celery_leases.worker import publisher
from tests.apps.cooling import *  # noqa: F403
from tests.apps.cooling import app  # noqa: F401
from tests.apps.leased import note


def armed(directory: Path | str, step: str, about: str) -> Path:
    """The file that makes a call *about* a key or a group stop at *step*."""
    return Path(directory) / f"{step} {about}"


def stop_at(step: str, about: str) -> None:
    """Stop here if the test has armed this step."""
    with suppress(FileNotFoundError):
        armed(os.environ["FAILPOINTS"], step, about).unlink()
        note("failpoint", step=step, about=about)
        time.sleep(600)


def _around(step, method, about):
    """*method* with a possible stop before and after it; *about* names key or group."""

    def done(self, *args, **kwargs):
        stop_at(f"before {step}", about(*args))
        answer = method(self, *args, **kwargs)
        stop_at(f"after {step}", about(*args))
        return answer

    return done


def _key(stored_key, *_):
    return stored_key.partition("|")[2]


SqlRecordStore.settle = _around("settle", SqlRecordStore.settle, lambda record, _: record.key)
publisher.Publisher._publish = _around(
    "publish", publisher.Publisher._publish, lambda _task, header, _delay: header.key
)
publisher.Publisher.reschedule = _around(
    "rescheduled", publisher.Publisher.reschedule, lambda _task, header, *_: header.key
)
for store in (RedisLeaseStore, DatabaseLeaseStore):
    store.cool = _around("cool", store.cool, _key)
for groups in (RedisGroups, SqlGroups):
    groups.close = _around("close", groups.close, lambda group, *_: group)
