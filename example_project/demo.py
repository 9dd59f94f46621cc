"""``make demo``: invoices asked for twice while processes are killed, told as a timeline, then judged.

Exits with 1 when a promise was broken. ``--without-leases`` plays the same story on plain Celery with late
acknowledgement, where promises do get broken.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import click
import kombu

from celery_leases.testing.process import NotReady
from celery_leases.testing.servers import ServerMissing
from example_project.narrator import Narrator, short
from example_project.stage import (
    KEY_BOUND,
    LONGEST_PUT_BACK,
    RENDER,
    SWEEP,
    TTL,
    VISIBILITY_TIMEOUT,
    WORK_BOUND,
    Stage,
)
from example_project.verdict import Kill, Verdict

MONTH = "2026-04"
TIME_LIMIT = 50.0
NEEDED_KOMBU = (5, 7)
EXPLANATION = f"""
  Promised where another call or copy waits for the key: ttl + one put-back delay
  = {TTL:g} + {LONGEST_PUT_BACK:g} s; where only the broker can bring the work back:
  max(ttl, visibility timeout + sweep) + one put-back delay
  = max({TTL:g}, {VISIBILITY_TIMEOUT:g} + {SWEEP:g}) + {LONGEST_PUT_BACK:g} s. The demo keeps all of them short.
  Not promised: killed between the mail and the record, an invoice would be mailed twice.
  docs/guarantees.md says more.
"""


class Demo:
    """The story: two scenes on one stage."""

    def __init__(self, stage: Stage, narrator: Narrator) -> None:
        self.stage = stage
        self.narrator = narrator
        self.kills: list[Kill] = []

    def play(self) -> Verdict:
        """Play both scenes and hand over what is to be judged."""
        try:
            self._set_up()
            self._two_webs_and_a_dead_child()
            self._a_dead_worker()
        except TimeoutError as error:
            self.narrator.say("demo", f"gives up waiting: {error}", colour="red")
        self._listen()
        stage = self.stage
        return Verdict(stage.requests, self.kills, stage.journal.events, stage.mailed(), stage.results())

    def _set_up(self) -> None:
        redis = Path(self.stage.redis.process.argv[0]).name
        self.narrator.say("demo", f"has started {redis} on port {self.stage.redis.port}; records are kept in SQLite")
        self.stage.start_workers("worker-a", "worker-b")
        for name, worker in self.stage.workers.items():
            self.narrator.say(name, f"is ready: pid {worker.pid}, pool children {_listed(worker.children())}")

    def _two_webs_and_a_dead_child(self) -> None:
        customers = [1842, 1843, 1844, 1845, 1846]
        self.narrator.scene("Two web processes ask for the same five invoices, and a pool child is killed")
        self.stage.publish(MONTH, customers, {"web-1": "delay", "web-2": "send_task"})
        begun = self._wait(lambda: self._begun(f"invoice:{customers[0]}:{MONTH}"), 15, "the first invoice to begin")
        self._wait(lambda: time.monotonic() > begun["t"] + RENDER / 2, 5, "the middle of it")
        self._kill(f"pool child {begun['pid']}", begun, begun["pid"], KEY_BOUND)
        self._wait(self._all_answered, 25, "answers to all ten calls")

    def _a_dead_worker(self) -> None:
        customer = 1847
        key = f"invoice:{customer}:{MONTH}"
        self.narrator.scene("One more invoice, and the whole worker that is at it is killed")
        self.stage.publish(MONTH, [customer], {"web-1": "delay"})
        begun = self._wait(lambda: self._begun(key), 15, "the invoice to begin")
        self._wait(lambda: time.monotonic() > begun["t"] + RENDER / 2, 5, "the middle of it")
        worker = self.stage.workers[begun["worker"]]
        self._kill(f"{begun['worker']} with its pool", begun, worker.pid, WORK_BOUND)
        self._wait(self._all_answered, 25, "the answer")
        self.narrator.scene("Asked again, long after it was done")
        self.stage.publish(MONTH, [customer], {"web-2": "send_task"})
        self._wait(self._all_answered, 15, "the answer")

    # -- small steps ---------------------------------------------------------------------------------------

    def _kill(self, what: str, begun: Mapping[str, Any], pid: int, bound: float) -> None:
        at = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        self.kills.append(Kill(what, begun["key"], at, bound))
        who = what if what.startswith(begun["worker"]) else f"{what} of {begun['worker']}"
        self.narrator.say("demo", f"SIGKILLs {who}, in the middle of {short(begun['key'])}", at=at, colour="red")

    def _begun(self, key: str) -> Mapping[str, Any] | None:
        begun = [
            event for event in self.stage.journal.events if (event["what"], event["key"]) == ("LeaseAcquired", key)
        ]
        return begun[0] if begun else None

    def _all_answered(self) -> bool:
        requests = self.stage.requests
        return bool(requests) and len(self.stage.results()) == len(requests)

    def _wait(self, seen: Callable[[], Any], timeout: float, what: str) -> Any:
        """Tell the news until *seen* gives something; raises TimeoutError."""
        deadline = min(time.monotonic() + timeout, self.narrator.began + TIME_LIMIT)
        while True:
            self._listen()
            if found := seen():
                return found
            if time.monotonic() > deadline:
                raise TimeoutError(f"no sign of {what} after {timeout:g} s")
            time.sleep(0.05)

    def _listen(self) -> None:
        for event in self.stage.journal.news():
            self.narrator.tell(event)


def _listed(numbers: list[int]) -> str:
    return " ".join(map(str, numbers))


def _end(signum: int, _: Any) -> NoReturn:
    raise SystemExit(128 + signum)


def _judge(verdict: Verdict, stage: Stage, narrator: Narrator) -> int:
    broken = [*verdict.broken(), *(f"{left} was left behind" for left in stage.left_behind())]
    narrator.scene("What became of it")
    verdict.show()
    click.echo(EXPLANATION)
    for line in broken:
        click.secho(f"BROKEN: {line}", fg="red", bold=True)
    if not broken:
        answers = len(verdict.requests)
        click.secho(
            f"KEPT: {len(verdict.keys)} invoices, {answers} calls, each invoice mailed once, each call answered, "
            "nothing left behind",
            fg="green",
            bold=True,
        )
    click.echo(f"({time.monotonic() - narrator.began:.0f} s)")
    return 1 if broken else 0


@click.command()
@click.option("--without-leases", is_flag=True, help="The same story on plain Celery.")
def main(*, without_leases: bool) -> None:
    """Play the demo and judge it."""
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, _end)
    if tuple(kombu.VERSION[:2]) < NEEDED_KOMBU:
        click.secho(f"BROKEN: the demo needs kombu 5.7, this is {kombu.__version__}: it sweeps every 100 s", fg="red")
        sys.exit(1)
    narrator = Narrator()
    try:
        with Stage(leases=not without_leases) as stage:
            verdict = Demo(stage, narrator).play()
    except KeyboardInterrupt:
        click.echo("\nstopped; nothing is left behind", err=True)
        sys.exit(130)
    except (ServerMissing, NotReady, RuntimeError) as error:
        click.secho(f"BROKEN: the demo could not run: {error}", fg="red", err=True)
        sys.exit(1)
    sys.exit(_judge(verdict, stage, narrator))


if __name__ == "__main__":
    main(standalone_mode=False)
