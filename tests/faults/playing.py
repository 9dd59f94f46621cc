"""Plays scenarios on real servers, with a cut at each request in turn, and judges the outcome."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

from celery.exceptions import TimeoutError as CeleryTimeout
from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool

from celery_leases.testing.waits import wait_until
from tests.faults.proxy import NumberingProxy, Point, Wire
from tests.faults.scenarios import PATIENCE, Scenario
from tests.integration.deployments import Stage
from tests.support.servers import PostgresServer, RabbitServer, RedisServer, find_running_rabbit

HOME = "tests.apps.proofs"
TTL = 10.0
COMBINATIONS = {
    "redis": ("redis", "redis", "postgres"),
    "rabbit": ("rabbit", "database", "postgres"),
}


@dataclass
class Trial:
    """One scenario with one cut. *wrong* says which promise was broken; *lost*: the broker's client
    lost the message before the worker had it.
    """

    scenario: str
    point: Point
    was_cut: bool
    seconds: float
    overlap: float
    wrong: list[str] = field(default_factory=list)
    lost: bool = False


class Bench:
    """A worker whose connections go through proxies, and its caller."""

    def __init__(self, stage: Stage, wire: Wire, broker: NumberingProxy) -> None:
        self.stage, self.wire, self._broker = stage, wire, broker
        self.names: list[tuple[str, str]] = []

    def points(self, scenario: Scenario) -> list[Point]:
        """The requests of a scenario, in their order; it is played twice, as connections of the
        first time are new.
        """
        for _ in range(2):
            found = self.play(scenario)
            assert not found.wrong, found.wrong
            seen = self.wire.seen
        return [
            each for each in dict.fromkeys(seen) if each.server != "caller" or scenario.publishes
        ]

    def play(self, scenario: Scenario, point: Point | None = None) -> Trial:
        """Play it once, for a new key."""
        stage, name = self.stage, uuid4().hex[:8]
        self.names.append((scenario.task, name))
        began, lost = time.monotonic(), False
        wrong: list[str] = []
        prepared: Any = None
        try:
            prepared = scenario.prepare(stage, name)
            self.wire.begin(point)
            scenario.play(stage, name, prepared)
            self.wire.wait_until_quiet()
        except Exception as error:  # noqa: BLE001 - whatever it is, a call did not end as it must
            lost = isinstance(error, TimeoutError | CeleryTimeout)
            wrong.append(f"{type(error).__name__}: {error}")
        finally:
            if isinstance(prepared, tuple):
                prepared[0].touch()  # no body may hold a process of the pool
            if self.wire.has_met:  # a request without a reply is cut a moment after it
                self.wire.was_cut.wait(PATIENCE)
            self.wire.end()
        lost = lost and point is not None and self._is_loss_of_kombu(point)
        wrong = [*([] if lost else wrong), *self._wrong(scenario, name, lost=lost)]
        seconds = time.monotonic() - began
        trial = Trial(
            scenario.name,
            point or Point("", "", 0),
            self.wire.was_cut.is_set(),
            seconds,
            self._overlap(name),
            wrong,
            lost,
        )
        if trial.wrong:
            self._tell(trial, name)
        if trial.point.server == "broker":
            self._wait_until_it_consumes()
        return trial

    def _wait_until_it_consumes(self) -> None:
        """On Redis, kombu loses a later message to a connection that it has given up, so all of
        them are cut.
        """
        self._broker.cut_all()

        def consumes() -> bool:
            result = self.stage.tasks.play.delay(uuid4().hex[:8])
            with suppress(TimeoutError, CeleryTimeout):
                result.get(timeout=4.0, interval=0.05)
            return bool(result.successful())

        wait_until(consumes, 3 * PATIENCE, "the worker to consume again")

    def _is_loss_of_kombu(self, point: Point) -> bool:
        """On Redis, kombu takes a message from its list before it notes that it has it."""
        return point.server == "broker" and self.stage.broker == "redis"

    def _wrong(self, scenario: Scenario, name: str, *, lost: bool) -> list[str]:
        """What is wrong at the end. Of a message that was *lost*, too little is right.

        A body that has committed its completion, but lost the reply, does not come to its end.
        """
        stage = self.stage
        begins = [event["attempt"] for event in stage.events("begin", name=name)]
        with stage._engine.connect() as connection:
            counted = text("SELECT count(*) FROM proofs WHERE name = :name")
            invoices = connection.execute(counted, {"name": name}).scalar() or 0
        found = {
            "runs": (len(begins), scenario.begins),
            "ends": (
                len(stage.events("end", name=name)),
                (0, 1, 2) if scenario.invoices else (1,),
            ),
            "charges": (len(stage.events("charge", name=name)), (scenario.charges,)),
            "invoices": (invoices, (scenario.invoices,)),
        }
        wrong = [
            f"{number} {what} instead of {wanted}"
            for what, (number, wanted) in found.items()
            if (number > max(wanted) if lost else number not in wanted)
        ]
        if len(set(begins)) != len(begins):
            wrong.append(f"an attempt ran twice: {begins}")
        state = (stage.find_row(scenario.task, f"{scenario.task}:{name}") or {}).get("state")
        if state != "done" and not lost:
            wrong.append(f"the record is {state}")
        return wrong

    def _overlap(self, name: str) -> float:
        """For how many seconds two bodies of a key ran at once, by the clock that all share."""
        over = {event["attempt"]: event["t"] for event in self.stage.events("over", name=name)}
        spans = sorted(
            (event["t"], over[event["attempt"]])
            for event in self.stage.events("begin", name=name)
            if event["attempt"] in over
        )
        return max((one[1] - other[0] for one, other in pairwise(spans)), default=0.0)

    def left_over(self) -> list[str]:
        """What is left of all trials: messages, leases, and rows that run."""
        wrong = []
        try:
            self.stage.wait_until_drained(PATIENCE)
        except TimeoutError as error:
            wrong.append(str(error))
        for task, name in self.names:
            key = f"{task}:{name}"
            try:
                wait_until(
                    lambda task=task, key=key: not self.stage.is_held(task, key),  # type: ignore[misc]
                    2 * TTL,
                    f"the lease of {key} to end",
                )
            except TimeoutError as error:
                wrong.append(str(error))
        return wrong

    def _tell(self, trial: Trial, name: str) -> None:
        print(f"== {trial.scenario}, {trial.point}: {'; '.join(trial.wrong)}", file=sys.stderr)
        for event in self.stage.events(name=name):
            print("  ", event, file=sys.stderr)
        for line in self.stage.log(name)[-20:]:
            print("  ", line[:300], file=sys.stderr)
        sys.stderr.flush()


@contextmanager
def bench(combination: str) -> Iterator[Bench]:
    """Private servers, proxies in front of them, and a worker of two processes."""
    with ExitStack() as stack:
        redis = stack.enter_context(RedisServer())
        postgres = stack.enter_context(PostgresServer())
        directory = Path(stack.enter_context(TemporaryDirectory()))
        urls = {"redis": redis.url, "postgres": postgres.new_database()}
        wire = Wire()
        broker_port = redis.port
        if combination == "rabbit":
            urls["rabbit"], broker_port = _rabbit(stack)
        kind = "rabbit" if combination == "rabbit" else "redis"
        proxies = {
            "leases": NumberingProxy(wire, "leases", "redis", redis.port),
            "broker": NumberingProxy(wire, "broker", kind, broker_port),
            "caller": NumberingProxy(wire, "caller", kind, broker_port),
            "records": NumberingProxy(wire, "records", "postgres", postgres.port),
        }
        through = {name: stack.enter_context(proxy).port for name, proxy in proxies.items()}
        with create_engine(urls["postgres"], poolclass=NullPool).begin() as connection:
            connection.execute(text("CREATE TABLE proofs (name text)"))
        broker_url = urls.get("rabbit", f"{redis.url.rpartition('/')[0]}/14")
        leases_url = f"{redis.url.rpartition('/')[0]}/15"
        brokers, leases, databases = COMBINATIONS[combination]
        stage = Stage(
            (brokers, leases, databases),
            urls,
            directory,
            home=HOME,
            worker={"concurrency": 2},
            env={
                "TTL": f"{TTL:g}",
                "VISIBILITY": "8",
                "CELERY_BROKER_URL": _moved(broker_url, broker_port, through["broker"]),
                "LEASES_URL": _moved(leases_url, redis.port, through["leases"])
                if leases == "redis"
                else leases,
                "LEASES_DATABASE_URL": _moved(urls["postgres"], postgres.port, through["records"]),
            },
        )
        stage.broker_url = broker_url
        stage.app.conf.broker_url = _moved(broker_url, broker_port, through["caller"])
        stack.callback(stage.close)
        stage.worker.start()
        yield Bench(stage, wire, proxies["broker"])


def _rabbit(stack: ExitStack) -> tuple[str, int]:
    running = find_running_rabbit()
    if running is None:
        server = stack.enter_context(RabbitServer())
        return server.url, server.port
    ours = running.isolate()
    stack.callback(ours.remove)
    port = int(ours.url.partition("@")[2].partition("/")[0].partition(":")[2] or 5672)
    return ours.url, port


def _moved(url: str, port: int, to: int) -> str:
    assert f":{port}" in url, url
    return url.replace(f":{port}", f":{to}", 1)
