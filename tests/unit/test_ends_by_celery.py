"""Whatever a body does with Celery's own ways to end, its work is run as often as in plain Celery,
and its record is done only if nothing is left to run.

Each program of steps runs in a plain task and in a leased one, with the message of the call in
memory, until the queue is empty. The first run executes the steps; the next one returns.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path
from queue import Empty
from typing import Any

import fakeredis
import pytest
from billiard.einfo import ExceptionInfo, ExceptionWithTraceback
from celery import Celery, Task, states
from celery.exceptions import Ignore, Reject, Retry
from celery.worker.request import Request
from kombu.exceptions import OperationalError
from kombu.messaging import Producer

from celery_leases import LeaseClient, LeasedMixin, LeasedTask
from celery_leases.errors import LeaseConfigurationError
from celery_leases.stores.redis.leases import RedisLeaseStore
from celery_leases.worker import processes, rescheduling
from celery_leases.worker.headers import HEADER, Header
from celery_leases.worker.publisher import Publisher
from celery_leases.worker.request import request_class
from tests.unit.celery_apps import apps

QUEUE = "ends"
Program = tuple[str, ...]


def raises(error: BaseException) -> Callable[[Any], None]:
    def step(task: Any) -> None:
        raise error

    return step


STEPS: dict[str, Callable[[Any], Any]] = {
    "retry": lambda task: task.retry(countdown=0),
    "retry without throw": lambda task: task.retry(countdown=0, throw=False),
    "retry of the base class": lambda task: Task.retry(task, countdown=0),
    "retry with too many arguments": lambda task: task.retry(args=(1, 2, 3), countdown=0),
    "Retry": raises(Retry("by hand")),
    "publish itself": lambda task: task.apply_async(
        task.request.args, task.request.kwargs, task_id=task.request.id
    ),
    "send itself": lambda task: task.app.send_task(
        task.name, task.request.args, task_id=task.request.id
    ),
    "replace by itself": lambda task: task.replace(task.s(*task.request.args)),
    "replace": lambda task: task.replace(task.app.tasks["other"].si()),
    "reject": raises(Reject("no", requeue=False)),
    "requeue": raises(Reject("again", requeue=True)),
    "ignore": raises(Ignore()),
    "report a failure": lambda task: task.update_state(state=states.FAILURE),
    "fail": raises(ValueError("no")),
}
"""What a body may do. All but the last two are Celery's own ways to end."""
LAST = ("return", "ignore", "reject", "requeue", "fail")
PROGRAMS: list[Program] = [
    *product(STEPS, ["raised", "repeated"], ["return"]),
    *product(STEPS, ["swallowed"], LAST),
]
plain_runs: dict[Program, int] = {}
"""How often plain Celery runs each program."""
KINDS: dict[str, dict[str, Any]] = {
    "keyed": {"lease_key": "k:{name}"},
    "call": {},
    "mutex": {"lease_key": "m:{name}", "lease_runs": "each"},
    "queued once": {"lease_key": "q:{name}", "lease_outbox": "once"},
}


def perform(task: Any, step: str, fate: str, last: str) -> str:
    """The first run of a program."""
    if fate == "raised":
        STEPS[step](task)
    for _ in range({"raised": 0, "swallowed": 1, "repeated": 2}[fate]):
        with suppress(Exception):  # the broad except of a user
            STEPS[step](task)
    return last if last == "return" else STEPS[last](task)


def finishes(step: str, fate: str, last: str) -> bool:
    """Whether the work of a call is done that has run once."""
    end = step if fate == "raised" and step in LAST else last
    if fate == "raised" and step in ("Retry", "retry with too many arguments"):
        return False
    return step == "replace" or end == "return" or (end == "ignore" and step != "report a failure")


class Bench:
    """An app whose messages stay in this process."""

    def __init__(self, directory: Path, leases_url: str) -> None:
        self.runs: Counter[tuple[str, Program]] = Counter()
        self.app = Celery("ends", broker="memory://ends", backend="cache+memory://")
        self.app.conf.update(
            task_default_queue=QUEUE,
            task_default_retry_delay=0,
            leases_url=leases_url,
            leases_database_url=f"sqlite:///{directory / 'records.db'}",
        )

        def body(task: Any, name: str) -> str:
            program = tuple(name.split("/"))
            self.runs[task.name, program] += 1
            if self.runs[task.name, program] > 1:
                return "finished"
            return perform(task, *program)

        named: dict[str, Any] = {"bind": True, "shared": False}
        self.app.task(body, name="plain", acks_late=True, **named)

        def other() -> None:
            """Replaces a task."""

        self.app.task(other, name="other", shared=False)
        for kind, options in KINDS.items():
            self.app.task(body, name=kind, base=LeasedTask, **options, **named)
        self.app.finalize()
        self.client = LeaseClient.from_app(self.app)

    def call(self, task: str, program: Program) -> str:
        """Call *task*, and deliver all messages of the call; returns its id."""
        handle = self.app.tasks[task].delay("/".join(program))
        self.deliver_all()
        return str(handle.id)

    def deliver_all(self) -> None:
        """Deliver messages until none is left, as a worker's main process that runs them itself."""
        with self.app.connection_for_read() as connection, connection.SimpleQueue(QUEUE) as queue:
            while True:
                try:
                    message = queue.get(block=False)
                except Empty:
                    return
                task = self.app.tasks[message.headers["task"]]
                kind = request_class(task) if isinstance(task, LeasedTask) else Request
                request = kind(
                    message,
                    app=self.app,
                    task=task,
                    hostname="worker",
                    on_ack=lambda *_: None,
                    on_reject=lambda *_: None,
                    connection_errors=(),
                )
                ended = request.execute()
                error = ended.exception if isinstance(ended, ExceptionInfo) else None
                error = error.exc if isinstance(error, ExceptionWithTraceback) else error
                if isinstance(error, Reject) and error.requeue:
                    message.reject(requeue=True)
                else:
                    message.ack()

    def state(self, kind: str, program: Program, call_id: str) -> str:
        template = KINDS[kind].get("lease_key")
        key = template.format(name="/".join(program)) if template else call_id
        return self.client.status(key, task=kind).state


@pytest.fixture(params=["database", "redis"])
def bench(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    apps: None,
) -> Iterator[Bench]:
    """One with database leases, one with those of Redis."""
    server = fakeredis.FakeServer()

    def opened(url: str, *, prefix: str, **_: Any) -> RedisLeaseStore:
        return RedisLeaseStore(fakeredis.FakeRedis(server=server), prefix, "fakeredis")

    monkeypatch.setattr(RedisLeaseStore, "from_url", opened)
    url = "database" if request.param == "database" else "redis://localhost/2"
    bench = Bench(tmp_path, url)
    yield bench
    processes.close_all()
    bench.app.close()


__all__ = ["apps"]


@pytest.mark.parametrize(
    ("bench", "kind"),
    [*product(["database"], KINDS), ("redis", "keyed"), ("redis", "call")],
    indirect=["bench"],
)
@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.nightly), 3])
def test_the_work_is_run_as_often_as_in_plain_celery(bench, kind, every, caplog) -> None:
    """In ``make test`` each kind of task runs a third of the programs, and each program runs in
    two of the six.
    """
    caplog.set_level(logging.CRITICAL)
    first = (list(KINDS).index(kind) + bench.app.conf.leases_url.startswith("redis")) % every
    wrong = []
    for program in PROGRAMS[first::every]:
        if program not in plain_runs:
            bench.call("plain", program)
            plain_runs[program] = bench.runs["plain", program]
        call_id = bench.call(kind, program)
        plain, leased = plain_runs[program], bench.runs[kind, program]
        state = bench.state(kind, program, call_id)
        finished = plain > 1 or finishes(*program)
        if not min(plain, 2) <= leased <= plain or (state == "done") != finished:
            wrong.append((program, plain, leased, state))
    assert not wrong, "\n".join(map(str, wrong))


RETRIES: Program = ("retry", "raised", "return")
REJECTS: Program = ("reject", "raised", "return")


@pytest.mark.parametrize("times", [1, 10**6], ids=["once", "always"])
def test_a_retry_is_published_although_the_broker_is_away(bench, monkeypatch, times) -> None:
    publish, failures = Producer._publish, [OperationalError("away")] * times

    def publish_unless_away(producer: Any, *args: Any, **given: Any) -> Any:
        if args[0] and bench.runs["keyed", RETRIES] and failures:
            raise failures.pop()
        return publish(producer, *args, **given)

    monkeypatch.setattr(Producer, "_publish", publish_unless_away)
    # A connection in memory empties all queues when it is closed.
    monkeypatch.setattr(Publisher, "close", lambda _: None)
    monkeypatch.setattr(rescheduling, "publish_retry_pause", lambda _: 0.001)
    monkeypatch.setattr(rescheduling, "publish_retry_time", lambda *_: 0.01)
    bench.call("keyed", RETRIES)
    assert bench.runs["keyed", RETRIES] == 2
    status = bench.client.status("k:retry/raised/return", task="keyed")
    assert (status.state, status.attempt, status.crashes) == ("done", 2, 0)
    assert [attempt.ended for attempt in status.attempts] == [
        "retried" if times == 1 else "rejected",
        "returned",
    ]


@pytest.mark.parametrize("kind", ["keyed", "mutex", "queued once"])
@pytest.mark.parametrize("end", ["reject", "report a failure", "Retry"])
def test_after_a_call_that_has_ended_without_its_work_the_next_one_runs(bench, kind, end) -> None:
    program = (end, "swallowed", "ignore") if end == "report a failure" else (end, "raised", "x")
    bench.call(kind, program)
    status = bench.client.status(f"{kind[0]}:{'/'.join(program)}", task=kind)
    assert (status.state, status.resumes, status.error is not None) == ("pending", False, True)
    bench.call(kind, program)
    assert bench.runs[kind, program] == 2


@pytest.mark.parametrize("waited", [False, True], ids=["its message", "a copy that had waited"])
def test_a_dead_letter_that_is_moved_back_runs(bench: Bench, waited: bool) -> None:
    call_id = bench.call("keyed", REJECTS)
    headers = {HEADER: Header("keyed", call_id, started=True).written()} if waited else {}
    bench.app.send_task("keyed", ["/".join(REJECTS)], task_id=call_id, headers=headers)
    bench.deliver_all()
    assert bench.runs["keyed", REJECTS] == 2


async def awaits(name: str) -> None:
    """A coroutine."""


def yields(name: str) -> Iterator[None]:
    yield


async def yields_later(name: str) -> AsyncIterator[None]:
    yield


LAZY = pytest.mark.parametrize("body", [awaits, yields, yields_later])


@LAZY
def test_a_body_that_celery_would_only_begin_is_refused(apps: None, body: Any) -> None:
    app = Celery("lazy", broker="memory://", set_as_current=False)
    with pytest.raises(LeaseConfigurationError, match=r"asyncio\.run"):
        app.task(body, base=LeasedTask, lease_key="x:{name}", shared=False, lazy=False)


@LAZY
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_a_returned_coroutine_or_generator_is_a_failure(bench: Bench, body: Any) -> None:
    """Nothing of it has run, and a caller that ignores the result would not see that."""

    def lazily(name: str) -> Any:
        return body(name)

    task = bench.app.task(
        lazily, name="lazily", base=LeasedTask, lease_key="l:{name}", shared=False
    )
    task.apply_async(("a",), ignore_result=True)
    bench.deliver_all()
    status = bench.client.status("l:a", task="lazily")
    assert (status.state, status.failures) == ("cooling", 1)
    assert status.error is not None
    assert "nothing of it has run" in status.error.message


def test_a_task_class_that_awaits_its_body_may_have_a_coroutine(bench: Bench) -> None:
    class Awaiting(Task):
        abstract = True

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return asyncio.run(super().__call__(*args, **kwargs))

    class LeasedAwaiting(LeasedMixin, Awaiting):
        abstract = True

    task = bench.app.task(
        awaits, name="awaits", base=LeasedAwaiting, lease_key="w:{name}", shared=False
    )
    task.delay("a")
    bench.deliver_all()
    assert bench.client.status("w:a", task="awaits").state == "done"
