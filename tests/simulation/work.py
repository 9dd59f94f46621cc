"""The tasks of a simulated cluster, and the outside world that they change."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import celery
from celery import Celery
from celery.backends.base import KeyValueStoreBackend
from celery.exceptions import Ignore, Reject
from celery.states import READY_STATES
from celery.utils.collections import ConfigurationView

from celery_leases import LeasedTask
from celery_leases.errors import Cooldown, LeaseLost, RetryLater, Snooze
from celery_leases.lease import Lease
from celery_leases.options import Failures, Group
from celery_leases.rules import Rules, cooldown

if TYPE_CHECKING:
    from tests.simulation.world import World

TTL = 3.0
DEBOUNCE, DEBOUNCE_MAX = 2.0, 6.0
"""Seconds without a newer call after which the tasks named ``debounced`` run, and at the latest."""
CLOCK_ERROR = 0.004
"""The share by which the monotonic clock of a host is too fast or too slow, at most."""
RETENTION = 2.0
"""The retention of the tasks in :data:`BRIEF`, in seconds."""
BRIEF = ("brief", "brief-charged", "each-brief-charged")
"""Tasks whose records expire within a run."""
COMPARED = "compared"
"""The task that refuses calls of a key with other arguments."""
REPEATED = "repeated-charged"
"""The task that makes a call again whose outcome is unknown (``uncertain="rerun"``)."""
SELDOM = ("unrenewed", "saving")
"""Tasks that some runs have: ``lease_renew=False``, and bodies that save their progress."""
STEPS = 4
"""Steps of a body that saves its progress after each."""
LONG_TTL = 9.0
"""The ttl of the tasks named ``steady``, which share their keys with those named ``swift``."""
SHARED = {"swift": "both", "steady": "both"}
"""Tasks whose keys are the same, and how these are named."""


TOGETHER = {"both": tuple(SHARED), "pooled": ("tight", "roomy")}
"""Tasks that run together: they share their keys, or a group that they limit differently."""


def expanded(names: Sequence[str]) -> tuple[str, ...]:
    """Tasks with these names, and those for which a name stands."""
    return tuple(task for name in names for task in TOGETHER.get(name, (name,)))


NEWEST_RUNS = ("latest", "latest-charged", "debounced")
"""Tasks of which only the newest call runs."""
OUTBOX_TASKS = ("queued", "enqueued", "stored")
"""Tasks whose records have the messages, which the broker may lose."""
COOLDOWN = 8.0
"""Seconds of a cooldown that a body asks for, and of the first one of an unknown failure."""
CLOSED_FOR = 2.0
LONGEST_CLOSED = 64.0
"""Seconds for which a rejection closes a group, or a key cools down: the first time, then twice as
long each time in a row, and at most.
"""
GROUPS = {
    "limited": Group("api", limit=2),
    "rated": Group("mail", limit=3, rate="20/m"),
    "booked": Group("shop", limit=2),
    "fused": Group("fuse"),
    "tight": Group("pool", limit=2),
    "roomy": Group("pool", limit=4),
}
"""The groups of tasks, by task."""
LIMITS = {
    name: max(group.limit or math.inf for group in GROUPS.values() if group.name == name)
    for name in {str(group.name): None for group in GROUPS.values()}
}
"""Bodies of each group at a time, at most."""
PAUSE = GROUPS["rated"].pause
"""Seconds between two begins of the tasks named ``rated``."""
TIME_LIMIT = 5.0
"""Seconds that bodies of the tasks named ``timed`` may take."""
FAILURES = 4
"""Failures of a key after which it has failed for good."""
RETRIES = 2
"""Quick retries of a key after which it cools down."""
ITEMS = 6
"""Items of a body that is a loop."""


class Rejected(Exception):
    """The other system rejects all requests for a while, and does not say for how long."""


ERRORS: dict[str, Callable[[], BaseException]] = {
    "retry": lambda: ConnectionRefusedError("simulated"),
    "cooldown": lambda: Cooldown(COOLDOWN, "simulated"),
    "closes": lambda: Cooldown(COOLDOWN, "simulated", scope="group"),
    "rejects": lambda: Rejected("simulated"),
    "later": lambda: RetryLater(2.0, "simulated"),
    "snooze": lambda: Snooze(2.0),
    "error": lambda: ZeroDivisionError("simulated"),
    "timeout": lambda: TimeoutError("simulated"),
    "permanent": lambda: TypeError("simulated"),
    "ignore": lambda: Ignore("simulated"),
    "reject": lambda: Reject("simulated"),
    "requeue": lambda: Reject("simulated", requeue=True),
}
"""What bodies raise at their end."""
current: World | None = None
"""The running simulation."""


def named(task: str, key: str) -> str:
    """The name of a key in a history."""
    return f"{SHARED.get(task, task)} {key.removeprefix('/both/')}"


def ttl_of(name: str) -> float:
    """The longest ttl that a lease of the key with this name may have."""
    return LONG_TTL if name.partition(" ")[0] in SHARED.values() else TTL


def world() -> World:
    """The running simulation."""
    assert current is not None
    return current


class SimulatedCelery(Celery):
    """An app on the clock of the simulation."""

    def now(self) -> datetime:
        """The time of wall clocks."""
        return datetime.fromtimestamp(world().wall_time(), UTC)


class Results(KeyValueStoreBackend):
    """The result backend, in memory."""

    def get(self, key: Any) -> Any:
        return world().results.get(bytes(key, "utf-8") if isinstance(key, str) else key)

    def set(self, key: Any, value: Any) -> None:
        name = bytes(key, "utf-8") if isinstance(key, str) else key
        world().results[name] = value
        if json.loads(value)["status"] in READY_STATES:
            world().answered.setdefault(name, world().scheduler.now)

    def delete(self, key: Any) -> None:
        world().results.pop(key, None)

    def expire(self, key: Any, value: Any) -> None:
        pass


class Outside:
    """Another system, which nothing disturbs and which deduplicates by idempotency key."""

    def __init__(self) -> None:
        self.charges: set[str] = set()

    def charge(self, idempotency_key: str) -> None:
        """Charge once for each idempotency key."""
        self.charges.add(idempotency_key)

    def reply(self, idempotency_key: str) -> str:
        """The reply to a request."""
        return f"charge {idempotency_key}"

    def find(self, idempotency_key: str) -> str | None:
        """The reply to an earlier request."""
        return self.reply(idempotency_key) if idempotency_key in self.charges else None


@cache
def app() -> SimulatedCelery:
    """The app with its tasks, made once in a Python process."""
    made = SimulatedCelery("simulated", broker="simulated://", backend=None, set_as_current=True)
    made.conf.update(
        leases_database_url="sqlite:///simulated",  # not the memory of one process
        leases_url="database",
        broker_pool_limit=None,
        task_publish_retry=False,
        task_default_queue="work",
        task_track_started=False,
        worker_hijack_root_logger=False,
        enable_utc=True,
    )
    made.backend_cls = Results
    rules = Rules.default().on(
        exc=Rejected, to=cooldown(CLOSED_FOR, scope="group", cap=LONGEST_CLOSED)
    )
    failures = Failures(rules, cooldown=COOLDOWN, retries=RETRIES, failures=FAILURES)
    common: dict[str, Any] = {
        "base": LeasedTask,
        "bind": True,
        "shared": False,
        "lease_key": "{key}",
        "lease_ttl": TTL,
        "lease_failures": failures,
    }
    once = {**common, "lease_fingerprint": False}
    made.task(name="once", **once)(body)
    made.task(name="each", lease_runs="each", **common)(body)
    made.task(name=COMPARED, **common)(body)
    both = {**common, "lease_key": "/both/{key}", "lease_runs": "each"}
    made.task(name="swift", **both)(body)
    made.task(name="steady", **{**both, "lease_ttl": LONG_TTL})(body)
    made.task(name="strict", lease_runs="each", lease_on_busy="raise", **common)(body)
    made.task(name="lazy", lease_runs="each", lease_on_busy="ignore", **common)(body)
    made.task(name="latest", lease_runs="latest", **common)(body)
    waits = {"lease_debounce": DEBOUNCE, "lease_debounce_max": DEBOUNCE_MAX}
    made.task(name="debounced", lease_runs="latest", **waits, **common)(body)
    for name in ("limited", "rated", "tight", "roomy"):
        made.task(name=name, lease_group=GROUPS[name], lease_runs="each", **common)(body)
    made.task(name="fused", lease_group=GROUPS["fused"], lease_runs="each", **common)(body)
    made.task(name="booked", lease_group=GROUPS["booked"], **once)(completing_body)
    made.task(name="killed", lease_on_lost="kill", **once)(body)
    made.task(name="charged", **once)(charging_body)
    made.task(name="each-charged", lease_runs="each", **common)(charging_body)
    made.task(name="latest-charged", lease_runs="latest", **common)(charging_body)
    made.task(name="brief", lease_retention=RETENTION, **once)(body)
    made.task(name="brief-charged", lease_retention=RETENTION, **once)(charging_body)
    each_brief = {**common, "lease_runs": "each", "lease_retention": RETENTION}
    made.task(name="each-brief-charged", **each_brief)(charging_body)
    made.task(name="stored", lease_outbox="store", **once)(body)
    made.task(name="queued", lease_outbox="once", **once)(body)
    made.task(name="enqueued", **once)(body)
    made.task(name="unrenewed", lease_renew=False, **once)(body)
    made.task(name=REPEATED, **once)(charging_body)
    made.task(name="saving", **once)(saving_body)
    made.task(name="completed", **once)(completing_body)
    made.task(name="timed", time_limit=TIME_LIMIT, soft_time_limit=4.0, **once)(body)
    made.task(name="picky", before_start=before_start, **once)(body)
    others, celery._state._on_app_finalizers = celery._state._on_app_finalizers, set()
    made.finalize()  # without the shared tasks of other tests in this process
    celery._state._on_app_finalizers = others
    made.set_default()
    # One dictionary, because Celery looks up each setting in three, by three names.
    made.conf.swap_with(ConfigurationView({name: made.conf[name] for name in made.conf}))
    return made


def before_start(task: Any, call: str, args: Any, kwargs: Any) -> None:
    """Refuse some calls before their body."""
    if world().random.random() < 0.3:
        world().note("refused before the start", call=call, key=named(task.name, args[0]))
        raise TypeError("simulated")


def body(self: Any, key: str, number: int) -> Any:
    """Work in steps, then end as the simulation wants it."""
    with _noted(self, key) as end:
        return end(number)


def charging_body(self: Any, key: str, number: int) -> Any:
    """The same, and charge once for the key, or for each of its parts; or for the call, if each
    runs.
    """
    with _noted(self, key) as end:
        here, lease, who = world(), self.lease, end.who
        here.scheduler.sleep(here.random.choice((0.0, 0.5, 2.0, 4.0)))
        for part in range(here.random.choice((1, 5))):
            charge = partial(here.charge, {**who, "part": part}, lease._call.key.stored)
            asks = {"verify": here.find_charge, "verify_after": 1.0} if here.shape.asks else {}
            how: dict[str, Any] = {"uncertain": "rerun"} if self.name == REPEATED else asks
            made = lease.effect(f"part {part}", charge, **how)
            here.has_charged(made.idempotency_key, **who)
        return end(number)


def saving_body(self: Any, key: str, number: int) -> Any:
    """The same, after steps that no later attempt repeats: it saves each of them."""
    with _noted(self, key) as end:
        here, lease, who = world(), self.lease, end.who
        here.note("goes on", value=lease.progress, **who)
        done = lease.progress[1] if lease.progress else 0
        for step in range(done + 1, STEPS + 1):
            here.scheduler.sleep(here.random.choice((0.01, 0.5, 2.0)))
            here.note("saves", value=[lease.fence, step], **who)
            lease.save_progress([lease.fence, step])
            here.note("saved", value=[lease.fence, step], **who)
        return end(number)


def completing_body(self: Any, key: str, number: int) -> Any:
    """The same, and complete the call in a transaction of its own."""
    with _noted(self, key) as end:
        result = end(number)
        if not world().complete(self.lease, result, **end.who):
            end.ending = "rolled back"
        world().lingers()
        return result


class _Body:
    """One run of a body."""

    def __init__(self, task: Any, lease: Lease, who: dict[str, Any]) -> None:
        self.task = task
        self.lease = lease
        self.who = who
        self.ending = "interrupted"

    def __call__(self, number: int) -> Any:
        """Do its steps, and end it."""
        here = world()
        plan = here.plan()
        if plan.habit == "extends":
            here.note("extends", seconds=5 * TTL, **self.who)
            self.lease.extend(5 * TTL)
        for seconds in plan.steps:
            if not plan.checks:
                here.scheduler.sleep(seconds)
                continue
            with suppress(LeaseLost):  # a body that goes on all the same is told when it asks
                here.scheduler.sleep(seconds)
            self.lease.check()
            here.note("checked", **self.who)
        for item in self.lease.each(range(ITEMS)) if plan.habit == "loops" else ():
            here.note("item", item=item, **self.who)
            here.scheduler.sleep(plan.steps[0])
        self.ending = plan.ending
        self._end()
        return json.dumps([number, self.lease.fence])

    def _end(self) -> None:
        """End as planned, unless it returns."""
        match self.ending:
            case "dies":
                world().dies()
            case "stalls":
                world().stalls()
            case "self.retry":
                countdown = world().random.choice((1.0, COOLDOWN))
                raise self.task.retry(countdown=countdown, max_retries=None)
        if self.ending in ERRORS:
            error = ERRORS[self.ending]()
            raise error


@contextmanager
def _noted(task: Any, key: str) -> Iterator[_Body]:
    here, lease = world(), task.lease
    assert isinstance(lease, Lease)
    who = {
        "key": named(task.name, key),
        "call": task.request.id,
        "fence": lease.fence,
        "token": lease._call.token,
    }
    here.body_began(lease._call.key.stored, retries=task.request.retries, **who)
    made = _Body(task, lease, who)
    try:
        yield made
    except BaseException:
        if made.ending == "return":
            made.ending = "interrupted"
        raise
    finally:
        here.body_ended(ending=made.ending, **who)
