"""``make demo``: invoices asked for twice while processes are killed, told as a timeline, then
judged. The same invoices are asked for on plain Celery, whose processes are killed at the same
places.

Exits with 1 when a promise was broken. ``--without-leases`` plays the same story on plain Celery
with late acknowledgement, where promises do get broken.
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

from example_project import jsonlines
from example_project.demo import journal
from example_project.demo.journal import Journal
from example_project.demo.narrator import Narrator, short
from example_project.demo.stage import (
    KEY_BOUND,
    LONGEST_PUT_BACK,
    SWEEP,
    TTL,
    VISIBILITY_TIMEOUT,
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
  Promised where another call or copy waits for the key: ttl + one reschedule delay
  = {TTL:g} + {LONGEST_PUT_BACK:g} s; where only the broker can bring the work back:
  max(ttl, visibility timeout + sweep) + one reschedule delay
  = max({TTL:g}, {VISIBILITY_TIMEOUT:g} + {SWEEP:g}) + {LONGEST_PUT_BACK:g} s. The demo keeps all of them short.
  Not promised: killed between the mail and the record, an invoice would be mailed twice.
  docs/guarantees.md says more.
"""


class InvoiceStage(Stage):
    """A stage with an outbox, and beside it another one with workers of plain Celery, for processes
    whose names begin with ``plain-``. *leases*: whether the first one has leases; if not, there is
    no second one.
    """

    def __init__(self, *, leases: bool = True) -> None:
        super().__init__(leases=leases)
        self.beside = leases
        if leases:
            self.worker_names = (*Stage.worker_names, *map(plain, "ab"))

    def furnish(self) -> dict[str, str]:
        """Tell the workers where the outbox is, and how long to render."""
        self.outbox = self.home / "outbox.jsonl"
        self.plain_outbox = self.home / "plain-outbox.jsonl"
        self.plain_journal = Journal(self.home / "plain-journal.jsonl")
        return {"OUTBOX": str(self.outbox), "RENDER_SECONDS": str(RENDER)}

    def environment_of(self, name: str) -> Mapping[str, str]:
        """Plain Celery has a broker, an outbox and a journal of its own."""
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
        """Let web processes ask for invoices at the same time; *webs*: how each of them publishes,
        by its name.
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
        """Those in the outbox of plain Celery; ``None`` where it was not there."""
        return _keys(self.plain_outbox) if self.beside else None

    def plainly_answered(self) -> bool:
        """Whether every call on plain Celery has come to its end."""
        self.plain_journal.news()
        events = self.plain_journal.events
        calls = {call for event in events if event["what"] == "Asked" for _, call in event["calls"]}
        return calls <= {event["call_id"] for event in events if event["what"] == "AttemptSettled"}


def plain(name: str) -> str:
    """What a process is called on plain Celery."""
    return f"plain-{name}"


def _keys(outbox: Path) -> list[str]:
    return [f"invoice:{letter['customer']}:{letter['month']}" for letter in jsonlines.read(outbox)]


class Demo(Story[InvoiceStage]):
    """The story: two scenes on one stage."""

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
        """Hand over what is to be judged."""
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
            "Two web processes ask for the same five invoices, and a pool child is killed"
        )
        if self.stage.beside:
            self.narrator.say("demo", "the same happens on plain Celery, untold until the end")
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
        self.narrator.scene("One more invoice, and the whole worker that is at it is killed")
        webs = self.stage.publish([customer], {"web-1": "delay"})
        begun = self.wait(lambda: self._begun(key), 15, "the invoice to begin")
        self.wait(lambda: time.monotonic() > begun["t"] + RENDER / 2, 5, "the middle of it")
        worker = self.stage.workers[begun["worker"]]
        self._kill(f"{begun['worker']} with its pool", begun, worker.pid, WORK_BOUND)
        self._kill_plainly(key, whole_worker=True)
        self._hear(webs, 25, "the answer")
        self.narrator.scene("Asked again, long after it was done")
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
        """Kill what is at *key* on plain Celery, if anything is."""
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
        self.narrator.say("demo", f"SIGKILLs {what} too, which is at {short(key)}", colour="red")

    def _begun(self, key: str) -> Mapping[str, Any] | None:
        return _first(self.stage.journal.events, key)


def _first(events: Sequence[Mapping[str, Any]], key: str) -> Mapping[str, Any] | None:
    """Who began *key* first."""
    return next(
        (event for event in events if (event["what"], event["key"]) == ("LeaseAcquired", key)),
        None,
    )


@click.command()
@click.option("--without-leases", is_flag=True, help="The same story on plain Celery.")
def main(*, without_leases: bool) -> None:
    """Play the demo and judge it."""
    if tuple(kombu.VERSION[:2]) < NEEDED_KOMBU:
        click.secho(
            f"BROKEN: the demo needs kombu 5.7, this is {kombu.__version__}: it sweeps every 100 s",
            fg="red",
        )
        sys.exit(1)
    perform(Demo(InvoiceStage(leases=not without_leases), Narrator(done="mailed")))
