"""The tasks of :mod:`tests.apps.leased` in a worker that has no file descriptors left.

While the file STARVED exists, a process cannot connect to PostgreSQL and cannot create the
stores of an app. The errors are those that Python raises without a free descriptor.
"""

import errno
import os
from pathlib import Path
from typing import Any

import psycopg

from celery_leases.worker import processes
from tests.apps.leased import *  # noqa: F403
from tests.apps.leased import app  # noqa: F401

_connect: Any = vars(psycopg.Connection)["connect"].__func__
_apps: Any = vars(processes)
_build: Any = _apps["open_for"]


def _starve():
    if Path(os.environ["STARVED"]).exists():
        raise OSError(errno.EMFILE, "Too many open files")


def _starved_connect(cls, *args, **given):
    _starve()
    return _connect(cls, *args, **given)


def _starved_build(*args, **given):
    _starve()
    return _build(*args, **given)


psycopg.Connection.connect = classmethod(_starved_connect)  # type: ignore[method-assign,assignment]
_apps["open_for"] = _starved_build
_apps["prepare_forks"] = lambda _: None  # or the pool processes would have their stores already
