"""``make demo``: duplicate requests for invoices while processes are killed, as a timeline.

The same requests go to plain Celery, whose processes are killed at the same points. Exits with 1 if
a promise was broken. ``--without-leases`` runs the demo on plain Celery alone, with late
acknowledgement; promises are then broken.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import kombu

from example_project.demo import journal, jsonlines
from example_project.demo.journal import Journal
from example_project.demo.narrator import Narrator, short
from example_project.demo.stage import (
    KEY_BOUND,
    LONGEST_DELAY,
    TTL,
    WORK_BOUND,
    Stage,
)
from example_project.demo.story import Story, perform
from example_project.demo.verdict import Kill, Verdict
from tests.support.process import GuardedProcess

MONTH = "2026-04"
RENDER = 2.0
NEEDED_KOMBU = (5, 7)
EXPLANATION = f"""
  Promised if another call or copy waits for the key: ttl + one reschedule delay
  = {TTL:g} + {LONGEST_DELAY:g} s. Promised if the whole worker died: ttl + ttl / 3 + one reschedule delay
  = {WORK_BOUND:g} s, with the default settings of the broker. The demo uses a short ttl.
  Not promised: a process that is killed between the mail and the record causes a second mail.
  docs/explanation/guarantees.md says more.
"""


class InvoiceStage(Stage):
    """A stage with an outbox, and workers of plain Celery beside the leased ones.

    The names of plain processes begin with ``plain-``. Without *leases* there is only plain Celery.
    """

    def __init__(self, *, leases: bool = True) -> None:
        super().__init__(leases=leases)
        self.beside = leases
        if leases:
            self.worker_names = (*Stage.worker_names, *map(plain, "ab"))

    def furnish(self) -> dict[str, str]:
        """Pass the path of the outbox and the rendering time to the workers."""
        self.outbox = self.home / "outbox.jsonl"
        self.plain_outbox = self.home / "plain-outbox.jsonl"
        self.plain_journal = Journal(self.home / "plain-journal.jsonl")
        return {"OUTBOX": str(self.outbox), "RENDER_SECONDS": str(RENDER)}

    def environment_of(self, name: str) -> Mapping[str, str]:
        """Plain Celery has its own broker, outbox and journal."""
        if not name.startswith(plain("")):
            return {}
        return {
            "CELERY_BROKER_URL": self.database(3),
            "CELERY_RESULT_BACKEND": self.database(4),
            "OUTBOX": str(self.plain_outbox),
            journal.FILE: str(self.home / "plain-journal.jsonl"),
            journal.WITHOUT_LEASES: "1",
        }

    def publish(self, customers: list[int], webs: Mapping[str, str]) -> dict[str, GuardedProcess]:
        """Let web processes request invoices at the same time; *webs* maps the name of each to how
        it publishes.
        """
        asked = [MONTH, *map(str, customers)]
        names = [*webs, *map(plain, webs)] if self.beside else [*webs]
        hows = {**webs, **{plain(web): how for web, how in webs.items()}}
        return {
            name: self.start(name, ["example_project.demo.web", name, hows[name], *asked])
            for name in names
        }

    def mailed(self) -> list[str]:
        """The keys of the invoices in the outbox, as often as they were mailed."""
        return _keys(self.outbox)

    def plainly_mailed(self) -> list[str] | None:
        """The same for the outbox of plain Celery; ``None`` if plain Celery does not run."""
        return _keys(self.plain_outbox) if self.beside else None

    def plainly_answered(self) -> bool:
        """Whether every call on plain Celery has ended."""
        self.plain_journal.news()
        events = self.plain_journal.events
        calls = {call for event in events if event["what"] == "Asked" for _, call in event["calls"]}
        return calls <= {event["call_id"] for event in events if event["what"] == "AttemptSettled"}


def plain(name: str) -> str:
    """The name of a process of plain Celery."""
    return f"plain-{name}"


def _keys(outbox: Path) -> list[str]:
    return [f"invoice:{letter['customer']}:{letter['month']}" for letter in jsonlines.read(outbox)]


class Demo(Story[InvoiceStage]):
    """The demo: two scenes on one stage."""

    explanation = EXPLANATION

    def __init__(self, stage: InvoiceStage, narrator: Narrator) -> None:
        super().__init__(stage, narrator)
        self.kills: list[Kill] = []

    def scenes(self) -> None:
        """Play both scenes."""
        self._two_webs_and_a_dead_child()
        self._a_dead_worker()
        if self.stage.beside:
            self.wait(self.stage.plainly_answered, 40, "answers of plain Celery")

    def verdict(self) -> Verdict:
        """The results so far."""
        stage = self.stage
        return Verdict(
            stage.requests,
            self.kills,
            stage.journal.events,
            stage.mailed(),
            stage.results(),
            stage.plainly_mailed(),
        )

    def _two_webs_and_a_dead_child(self) -> None:
        customers = [1842, 1843, 1844, 1845, 1846]
        self.narrator.scene(
            "Two web processes request the same five invoices, and a pool child is killed"
        )
        if self.stage.beside:
            self.narrator.say(
                "demo", "the same happens on plain Celery; its results are shown at the end"
            )
        webs = self.stage.publish(customers, {"web-1": "delay", "web-2": "send_task"})
        begun = self.wait(
            lambda: self._begun(f"invoice:{customers[0]}:{MONTH}"), 15, "the first invoice to begin"
        )
        self.wait(lambda: time.monotonic() > begun["t"] + RENDER / 2, 5, "the middle of it")
        self._kill(f"pool child {begun['pid']}", begun, begun["pid"], KEY_BOUND)
        self._kill_plainly(begun["key"], whole_worker=False)
        self._hear(webs, 25, "answers to all ten calls")

    def _a_dead_worker(self) -> None:
        customer = 1847
        key = f"invoice:{customer}:{MONTH}"
        self.narrator.scene("One more invoice, and the whole worker that runs it is killed")
        webs = self.stage.publish([customer], {"web-1": "delay"})
        begun = self.wait(lambda: self._begun(key), 15, "the invoice to begin")
        self.wait(lambda: time.monotonic() > begun["t"] + RENDER / 2, 5, "the middle of it")
        worker = self.stage.workers[begun["worker"]]
        self._kill(f"{begun['worker']} with its pool", begun, worker.pid, WORK_BOUND)
        self._kill_plainly(key, whole_worker=True)
        self._hear(webs, 25, "the answer")
        self.narrator.scene("The same invoice is requested again, long after it was done")
        self._hear(self.stage.publish([customer], {"web-2": "send_task"}), 15, "the answer")

    # -- small steps -------------------------------------------------------------------------------

    def _hear(self, webs: Mapping[str, GuardedProcess], timeout: float, what: str) -> None:
        for web, process in webs.items():
            self.stage.finish(web, process)
        self.wait(self.all_answered, timeout, what)

    def _kill(self, what: str, begun: Mapping[str, Any], pid: int, bound: float) -> None:
        at = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        self.kills.append(Kill(what, begun["key"], at, bound))
        who = what if what.startswith(begun["worker"]) else f"{what} of {begun['worker']}"
        self.narrator.say(
            "demo", f"SIGKILLs {who}, in the middle of {short(begun['key'])}", at=at, colour="red"
        )

    def _kill_plainly(self, key: str, *, whole_worker: bool) -> None:
        """Kill the process that runs *key* on plain Celery, if there is one."""
        if not self.stage.beside:
            return
        self.stage.plain_journal.news()
        begun = _first(self.stage.plain_journal.events, key)
        if begun is None:
            return
        worker = self.stage.workers[begun["worker"]]
        pid = worker.pid if whole_worker else begun["pid"]
        os.kill(pid, signal.SIGKILL)
        what = begun["worker"] if whole_worker else f"pool child {pid} of {begun['worker']}"
        self.narrator.say("demo", f"SIGKILLs {what} too, in its run of {short(key)}", colour="red")

    def _begun(self, key: str) -> Mapping[str, Any] | None:
        return _first(self.stage.journal.events, key)


def _first(events: Sequence[Mapping[str, Any]], key: str) -> Mapping[str, Any] | None:
    """The first start of *key*."""
    return next(
        (event for event in events if (event["what"], event["key"]) == ("LeaseAcquired", key)),
        None,
    )


@click.command()
@click.option("--without-leases", is_flag=True, help="Run on plain Celery alone.")
def main(*, without_leases: bool) -> None:
    """Run the demo and check its promises."""
    if tuple(kombu.VERSION[:2]) < NEEDED_KOMBU:
        click.secho(
            f"BROKEN: the demo needs kombu 5.7, this is {kombu.__version__}: it sweeps every 100 s",
            fg="red",
        )
        sys.exit(1)
    perform(Demo(InvoiceStage(leases=not without_leases), Narrator(done="mailed")))
