"""Many invoices at once, each with a process that is killed at one step, and their results.

The results are read from the provider's ledger and the tables.
"""

import os
import random
import signal
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from uuid import uuid4

from sqlalchemy import text

from celery_leases import LeaseStatus
from celery_leases.testing.waits import wait_until
from tests.apps.failpoints import armed
from tests.crash.crash_deployments import Scene
from tests.integration.payments import Provider

INVOICING = "tests.apps.invoicing"
INSIDE = "inside the call"
STEPS = (
    *("before intent", "after intent", INSIDE, "after reply", "after noting"),
    *("before complete", "after complete", "after commit", "before release"),
)
IN_DOUBT = ("after intent", INSIDE, "after reply")
"""The steps after which it cannot be known whether the customer was charged."""
WAYS = ("dedupe", "verify", "stop")
"""A provider that dedupes with ``uncertain="rerun"``, one that does not with ``verify=``, or
neither.
"""
PATIENCE = 60.0


@dataclass
class Case:
    """One invoice, and when its process is killed: at a named step, or *after* some seconds."""

    way: str
    step: str | None = None
    after: float | None = None
    pause: float = 0.0
    name: str = field(default_factory=lambda: uuid4().hex[:8])
    call_id: str = ""

    def __str__(self) -> str:
        when = self.step or (
            "with its worker" if self.after is None else f"{self.after:.3f} s after it began"
        )
        return f"{self.way}, killed {when} ({self.name})"


@dataclass(frozen=True)
class Verdict:
    state: str
    charges: int
    invoices: int
    reference: str | None


class Wave:
    """Cases that run at the same time in the worker of *scene*."""

    def __init__(self, scene: Scene, provider: Provider) -> None:
        self.scene = scene
        self.provider = provider
        self.cases: list[Case] = []
        self._killers: list[threading.Thread] = []
        scene.directory.joinpath("failpoints").mkdir(exist_ok=True)
        with scene._engine.connect() as connection:
            connection.execute(
                text(
                    "CREATE TABLE IF NOT EXISTS invoices (name text, reference text, fence bigint)"
                )
            )

    def launch(self, cases: Sequence[Case]) -> None:
        """Publish all cases, and kill their processes."""
        self.cases += cases
        for case in cases:
            steps = [{"kill": True}] if case.step == INSIDE else []
            self.provider.script(case.name, *steps, dedupe=case.way == "dedupe")
            if case.step not in (None, INSIDE):
                armed(self.scene.directory / "failpoints", case.step, case.name).touch()
            self._publish(case)
        timed = [case for case in cases if case.after is not None]
        if timed:
            killer = threading.Thread(target=self._kill, args=(timed,), daemon=True)
            killer.start()
            self._killers.append(killer)

    def publish_again(self, cases: Sequence[Case]) -> None:
        """Publish again the calls that have not begun.

        A worker on Redis removes a message from the queue before it records it as unacknowledged.
        If it is killed in between, the message is lost.
        """
        begun = {event["name"] for event in self.scene.events("begin")}
        for case in cases:
            if case.name not in begun:
                self._publish(case)

    def _publish(self, case: Case) -> None:
        again = {"task_id": case.call_id} if case.call_id else {}
        sent = self.scene.tasks.invoice.apply_async(
            (case.name, case.way), {"pause": case.pause}, **again
        )
        case.call_id = sent.id

    def _kill(self, cases: Iterable[Case]) -> None:
        waiting = list(cases)
        until = time.monotonic() + PATIENCE
        while waiting and time.monotonic() < until:
            begun = {event["name"]: event for event in reversed(self.scene.events("begin"))}
            for case in list(waiting):
                event = begun.get(case.name)
                if event is not None and time.monotonic() >= event["t"] + (case.after or 0.0):
                    waiting.remove(case)
                    # Do not kill a process that has begun another invoice, which has its own step.
                    if self.scene.events("begin", pid=event["pid"])[-1]["name"] == case.name:
                        with suppress(ProcessLookupError):
                            os.kill(event["pid"], signal.SIGKILL)
            time.sleep(0.01)

    # -- results -----------------------------------------------------------------------------------

    @cached_property
    def task(self) -> str:
        return f"{INVOICING}.invoice"

    def status(self, case: Case) -> LeaseStatus:
        return self.scene.client.status(f"invoice:{case.name}", task=self.task)

    def settled(self, case: Case, *states: str) -> LeaseStatus:
        """Wait until its status is one of *states*, by default done or uncertain."""
        wanted = states or ("done", "uncertain")
        wait_until(
            lambda: self.status(case).state in wanted,
            PATIENCE,
            f"{case} to be {' or '.join(wanted)}",
        )
        return self.status(case)

    def invoices(self, case: Case) -> list[dict[str, Any]]:
        query = text("SELECT name, reference, fence FROM invoices WHERE name = :name")
        with self.scene._engine.connect() as connection:
            return [dict(row) for row in connection.execute(query, {"name": case.name}).mappings()]

    def verdict(self, case: Case) -> Verdict:
        found = self.settled(case)
        charges, rows = self.provider.charges(case.name), self.invoices(case)
        return Verdict(found.state, len(charges), len(rows), found.reference)

    def assert_sound(self, case: Case) -> Verdict:
        """Everything has happened once, or the key is uncertain and nothing more will happen."""
        found = self.settled(case)
        charges, rows = self.provider.charges(case.name), self.invoices(case)
        verdict = Verdict(found.state, len(charges), len(rows), found.reference)
        assert len(set(self.provider.keys(case.name))) <= 1, case
        fences = [event["fence"] for event in self.scene.events("begin", name=case.name)]
        assert len(set(fences)) == len(fences), (case, "one attempt has begun twice")
        if found.state == "done":
            assert len(charges) == 1, (case, verdict)
            assert [row["reference"] for row in rows] == charges, (case, verdict)
            assert found.reference == charges[0], (case, verdict)
            assert found.result == {"charge": charges[0]}, (case, verdict)
            # The invoice and the done record belong to one attempt and one commit.
            assert rows[0]["fence"] == found.fence, (case, verdict)
            assert [effect.state for effect in found.effects] == ["done"], (case, verdict)
        else:
            assert case.way == "stop", (case, verdict)
            assert len(charges) <= 1, (case, verdict)
            assert rows == [], (case, verdict)
            assert [effect.state for effect in found.effects] == ["sent"], (case, verdict)
        return verdict

    def killed(self, case: Case) -> bool:
        """Whether its process was killed at its step."""
        if case.step == INSIDE:
            return bool(self.provider.lines("charged", case.name))
        return bool(self.scene.events("failpoint", name=case.name, step=case.step))

    def wait_until_killed(self, case: Case) -> None:
        """Wait until its process was killed, which may be after the commit of its record."""
        wait_until(lambda: self.killed(case), PATIENCE, f"{case} to be killed")

    def close(self) -> None:
        for killer in self._killers:
            killer.join(PATIENCE)
        self.scene.close()


def at_each_step() -> list[Case]:
    return [Case(way, step) for way in WAYS for step in STEPS]


def at_random(seed: int, pause: float = 0.06) -> list[Case]:
    """One case for each way, killed at a random time."""
    rand = random.Random(seed)
    return [Case(way, after=rand.uniform(0.0, 9 * pause), pause=pause) for way in WAYS]
