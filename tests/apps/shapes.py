"""Leased tasks of every kind: bound, class-based, shared, pydantic, and of a second app in the same
process.
"""

import os

from celery import Celery, Task, shared_task
from pydantic import BaseModel

from celery_leases import LeasedMixin, LeasedTask, current_lease
from tests.apps.leased import app, note, square

__all__ = ["app"]


class Billing(LeasedTask):
    """A base class whose options subclasses inherit."""

    lease_key = "billing:{name}"
    lease_on_done = "raise"


@app.task(base=Billing)
def inherits(name):
    """Takes its options from its base."""
    note("begin", name=name, held=current_lease.held, key=current_lease.key)
    return name


class ClassBased(LeasedTask):
    """A task written as a class."""

    name = "tests.apps.shapes.ClassBased"
    lease_key = "class:{name}"

    def run(self, name, extra=None):
        note("begin", name=name, held=self.lease.held, key=self.lease.key)
        return {"name": name, "extra": extra}


app.register_task(ClassBased())


class Tracing(Task):
    """A third-party base class with its own hooks."""

    abstract = True

    def __call__(self, *args, **kwargs):
        """Write that the body was called through this method."""
        note("traced", name=args[0])
        return super().__call__(*args, **kwargs)

    def on_success(self, retval, task_id, args, kwargs):
        """Write that the task succeeded."""
        note("on_success", name=args[0], retval=retval)


class LeasedTracing(LeasedMixin, Tracing):
    """The mixin before that base."""


@app.task(base=LeasedTracing, bind=True, lease_key="mixed:{name}")
def mixed(self, name):
    """Has both base classes."""
    note("begin", name=name, held=self.lease.held)
    return name


@shared_task(base=LeasedTask, lease_key="shared:{name}")
def shared(name):
    """Belongs to the current app."""
    note("begin", name=name, held=current_lease.held)
    return name


class Invoice(BaseModel):
    """The argument and the result of a pydantic task."""

    name: str
    month: int


@app.task(base=LeasedTask, pydantic=True, lease_key="model:{invoice[name]}:{invoice[month]}")
def model(invoice: Invoice) -> Invoice:
    """Takes a model and returns one."""
    note("begin", name=invoice.name, held=current_lease.held, kind=type(invoice).__name__)
    return Invoice(name=invoice.name, month=invoice.month + 1)


@app.task(base=LeasedTask, lease_key=lambda name, *, month=1: f"made:{name}:{month}")
def made(name, *, month=1):
    """Its key comes from a callable; keyword-only arguments."""
    note("begin", name=name, key=current_lease.key)
    return month


@app.task(base=LeasedTask)
def twice(numbers):
    """Calls ``map`` and ``chunks`` of a leased task, which use Celery's built-in tasks."""
    return list(square.map(numbers)())


other = Celery("other", set_as_current=False)
other.conf.update(
    broker_url="memory://",
    leases_url="database",
    leases_database_url=os.environ.get("LEASES_DATABASE_URL"),
    leases_prefix="other",
)


@other.task(base=LeasedTask, bind=True, lease_key="other:{name}")
def foreign(self, name):
    """A task of another app, which has its own stores."""
    note("foreign", name=name, held=self.lease.held, key=self.lease.key)
    return {"name": name, "fence": self.lease.fence}


@app.task(base=LeasedTask, bind=True, lease_key="hosts:{name}")
def hosts(self, name):
    """Runs a task of the other app eagerly in its body."""
    note("begin", name=name, held=self.lease.held, key=self.lease.key)
    inner = foreign.apply(args=(name,)).get(disable_sync_subtasks=False)
    again = foreign.apply(args=(name,)).get(disable_sync_subtasks=False)
    note("end", name=name, held=self.lease.held, key=self.lease.key)
    return [inner == again, self.lease.key]
