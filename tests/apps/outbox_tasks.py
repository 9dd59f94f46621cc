"""Tasks that are enqueued in a transaction or whose message is stored, and the built-in tasks."""

import os
from ast import literal_eval

from kombu.serialization import register

from celery_leases import Cooldown, Failures, LeasedTask, PermanentFailure, Uncertain, builtin_tasks
from celery_leases.rules import CooldownPolicy
from tests.apps.leased import app, note, plain, wait_for

__all__ = ["app", "builtin_tasks", "plain"]

if "CHORES_EVERY" in os.environ:
    every = float(os.environ["CHORES_EVERY"])
    app.conf.beat_schedule = {"relay": {"task": "celery_leases.relay", "schedule": every}}


def _typed(value):
    literal_eval(written := repr(value))
    return written


def _read(written):
    return literal_eval(written if isinstance(written, str) else bytes(written).decode())


# Gives back tuples and keys that are no text, as pickle does, and refuses what is no literal.
register("typed", _typed, _read, "application/x-typed", "utf-8")
app.conf.accept_content = ["json", "typed"]

_ONCE = CooldownPolicy(1, jitter=0)


def _ordered(task, name, gate, how):
    asked = (task.request.headers or {}).get("asked_by")
    note("begin", name=name, id=task.request.id, attempt=task.lease.attempt, asked_by=asked)
    if gate:
        wait_for(gate)
    if how == "fail":
        raise PermanentFailure(f"nobody sells {name}")
    if how == "doubt" and task.lease.attempt == 1:
        raise Uncertain(f"whether {name} was sent is not known")
    if how == "cool" and task.lease.attempt == 1:
        raise Cooldown(1, "sold out")
    note("end", name=name, id=task.request.id)
    return f"{name} by {task.request.id}"


@app.task(
    base=LeasedTask,
    bind=True,
    lease_key="order:{name}",
    lease_failures=Failures(cooldown=_ONCE, resume="never"),
)
def order(self, name, gate=None, how=None):
    """Its message is stored only if it is enqueued in a transaction."""
    return _ordered(self, name, gate, how)


@app.task(base=LeasedTask, bind=True)
def single(self, name, gate=None, how=None):
    """Its key is the call id."""
    return _ordered(self, name, gate, how)


@app.task(base=LeasedTask, bind=True, lease_key="again:{name}", lease_runs="each")
def again(self, name):
    """All its calls share one record."""


@app.task(
    base=LeasedTask,
    bind=True,
    lease_key="kept:{name}",
    lease_outbox="store",
    lease_failures=Failures(cooldown=_ONCE),
)
def kept(self, name, gate=None, how=None):
    """Its message is stored in the record."""
    return _ordered(self, name, gate, how)


@app.task(
    base=LeasedTask, bind=True, lease_key="unkept:{name}", lease_failures=Failures(cooldown=_ONCE)
)
def unkept(self, name, gate=None, how=None):
    """Its message is not stored."""
    return _ordered(self, name, gate, how)


@app.task(
    base=LeasedTask,
    bind=True,
    serializer="typed",
    lease_key="typed:{name}",
    lease_outbox="store",
)
def typed(self, name, content=None):
    """Gets arguments of types that JSON does not have."""
    return repr(content)
