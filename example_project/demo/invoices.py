"""``make demo``: invoices asked for twice while processes are killed, told as a timeline, then
judged.

Exits with 1 when a promise was broken. ``--without-leases`` plays the same story on plain Celery
with late acknowledgement, where promises do get broken.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from typing import Any

import click
import kombu

from example_project import jsonlines
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
    """A stage with an outbox."""

    def furnish(self) -> dict[str, str]:
        """Tell the workers where the outbox is, and how long to render."""
        self.outbox = self.home / "outbox.jsonl"
        return {"OUTBOX": str(self.outbox), "RENDER_SECONDS": str(RENDER)}

    def publish(self, customers: list[int], webs: Mapping[str, str]) -> dict[str, GuardedProcess]:
        """Let web processes ask for invoices at the same time; *webs*: how each of them publishes,
        by its name.
        """
        asked = [MONTH, *map(str, customers)]
        return {
            web: self.start(web, ["example_project.demo.web", web, how, *asked])
            for web, how in webs.items()
        }

    def mailed(self) -> list[str]:
        """The keys of the invoices in the outbox, as often as they were mailed."""
        return [
            f"invoice:{letter['customer']}:{letter['month']}"
            for letter in jsonlines.read(self.outbox)
        ]


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

    def verdict(self) -> Verdict:
        """Hand over what is to be judged."""
        stage = self.stage
        return Verdict(
            stage.requests, self.kills, stage.journal.events, stage.mailed(), stage.results()
        )

    def _two_webs_and_a_dead_child(self) -> None:
        customers = [1842, 1843, 1844, 1845, 1846]
        self.narrator.scene(
            "Two web processes ask for the same five invoices, and a pool child is killed"
        )
        webs = self.stage.publish(customers, {"web-1": "delay", "web-2": "send_task"})
        begun = self.wait(
            lambda: self._begun(f"invoice:{customers[0]}:{MONTH}"), 15, "the first invoice to begin"
        )
        self.wait(lambda: time.monotonic() > begun["t"] + RENDER / 2, 5, "the middle of it")
        self._kill(f"pool child {begun['pid']}", begun, begun["pid"], KEY_BOUND)
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

    def _begun(self, key: str) -> Mapping[str, Any] | None:
        events = self.stage.journal.events
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
