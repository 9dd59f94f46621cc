"""Leased tasks for runs with faults: each body writes when it begins and when it is over.

The settings are those of :mod:`tests.apps.leased`.
"""

import os
import time

from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool

from celery_leases import Cooldown, Failures, LeasedTask
from celery_leases.rules import CooldownPolicy
from tests.apps.leased import app, note, wait_for

__all__ = ["app"]

_engine = create_engine(os.environ.get("LEASES_DATABASE_URL", "sqlite://"), poolclass=NullPool)
_INVOICE = text("INSERT INTO proofs (name) VALUES (:name)")
_FAILURES = Failures(cooldown=CooldownPolicy(1, jitter=0), resume="always", crashes=1000)


def _charged(name):
    def charge(key):
        note("charge", name=name, idempotency_key=key)
        return {"id": key}

    return charge


def _body(self, name, way, gate, seconds):
    note("begin", name=name, attempt=self.lease.attempt, id=self.request.id)
    try:
        if gate:
            wait_for(gate)
        time.sleep(seconds)
        if way == "cooldown" and self.lease.attempt == 1:
            raise Cooldown(1, "too many")
        if way == "retry" and not self.request.retries:
            raise self.retry(countdown=0.2)
        result = {"name": name, "attempt": self.lease.attempt}
        if way == "effect":
            self.lease.effect("charge", _charged(name), uncertain="rerun")
        if way == "complete":
            with _engine.begin() as connection:
                connection.execute(_INVOICE, {"name": name})
                result = self.lease.complete(result, connection)
        note("end", name=name, attempt=self.lease.attempt, id=self.request.id)
        return result
    finally:
        note("over", name=name, attempt=self.lease.attempt, id=self.request.id)


_OPTIONS = {"base": LeasedTask, "bind": True, "lease_failures": _FAILURES, "max_retries": 5}


@app.task(**_OPTIONS, lease_key="play:{name}", lease_fingerprint=False)
def play(self, name, way="ok", gate=None, seconds=0.0):
    """Do what *way* says, once."""
    return _body(self, name, way, gate, seconds)


@app.task(**_OPTIONS, lease_key="refuses:{name}", lease_fingerprint=False, lease_on_busy="raise")
def refuses(self, name, way="ok", gate=None, seconds=0.0):
    """The same; another call gets an error while it runs."""
    return _body(self, name, way, gate, seconds)


@app.task(**_OPTIONS, lease_key="once:{name}", lease_fingerprint=False, lease_outbox="once")
def once(self, name, way="ok", gate=None, seconds=0.0):
    """The same; published once for its key."""
    return _body(self, name, way, gate, seconds)


@app.task(**_OPTIONS, lease_key="kept:{name}", lease_fingerprint=False, lease_outbox="store")
def kept(self, name, way="ok", gate=None, seconds=0.0):
    """The same; its message is in the record."""
    return _body(self, name, way, gate, seconds)
