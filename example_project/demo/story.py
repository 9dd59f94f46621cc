"""Runs the scenes of a demo, prints the timeline, and checks the promises at the end."""

from __future__ import annotations

import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, NoReturn, Protocol, TypeVar

import click

from example_project.demo.narrator import HOLD, Narrator
from example_project.demo.stage import CommandFailed, Stage
from tests.support.process import NotReady
from tests.support.servers import ServerMissing

TIME_LIMIT = 80.0
"""Seconds; three times the duration on an idle machine."""

StageT = TypeVar("StageT", bound=Stage)


class Verdict(Protocol):
    """The check of the promises."""

    def broken(self) -> list[str]:
        """One line for each promise that was not kept."""

    def kept(self) -> str:
        """The summary, if all promises were kept."""

    def show(self) -> None:
        """Print the results."""


class Story(ABC, Generic[StageT]):
    """Some scenes on one stage."""

    explanation: str
    """What is promised and what is not; printed at the end."""

    def __init__(self, stage: StageT, narrator: Narrator) -> None:
        self.stage = stage
        self.narrator = narrator
        self.cut_short: list[str] = []

    @abstractmethod
    def scenes(self) -> None:
        """Run the scenes; a TimeoutError or a CommandFailed ends the demo early."""

    @abstractmethod
    def verdict(self) -> Verdict:
        """The results so far."""

    def play(self) -> Verdict:
        """Run all scenes, and return the results."""
        try:
            self._set_up()
            self.scenes()
        except TimeoutError as error:
            self.narrator.say("demo", f"stops waiting: {error}", colour="red")
            self.cut_short.append(str(error))
        except CommandFailed as error:
            self.cut_short.append(str(error))
        self._listen()
        return self.verdict()

    def wait(self, seen: Callable[[], Any], timeout: float, what: str) -> Any:
        """Print new events until *seen* returns something; raises TimeoutError."""
        deadline = min(time.monotonic() + timeout, self.narrator.began + TIME_LIMIT)
        while True:
            self._listen()
            if found := seen():
                self._listen()  # earlier events may have been written since
                return found
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}: not seen within {timeout:g} s")
            time.sleep(0.05)

    def all_answered(self) -> bool:
        """Whether every published call has an answer."""
        requests = self.stage.requests
        return bool(requests) and len(self.stage.results()) == len(requests)

    def _set_up(self) -> None:
        redis = self.stage.redis
        program = redis.process.argv[0].rpartition("/")[2]
        self.narrator.say(
            "demo", f"has started {program} on port {redis.port}; records are in SQLite"
        )
        self.stage.start_workers()
        for name, worker in self.stage.workers.items():
            children = " ".join(map(str, worker.children()))
            self.narrator.say(name, f"is ready: pid {worker.pid}, pool children {children}")

    def _listen(self) -> None:
        for event in self.stage.journal.news():
            self.narrator.tell(event)
        self.narrator.print_held(time.monotonic() - HOLD)


def perform(story: Story[Any]) -> NoReturn:
    """Run the demo; exits with 1 if a promise was broken or the demo ended early, with 130 after
    Ctrl-C.
    """
    end_in_order()
    try:
        with story.stage:
            verdict = story.play()
    except KeyboardInterrupt:
        story.narrator.print_held()
        click.echo("\nstopped; nothing is left behind", err=True)
        sys.exit(130)
    except (ServerMissing, NotReady, RuntimeError) as error:
        click.secho(f"BROKEN: the demo could not run: {error}", fg="red", err=True)
        sys.exit(1)
    sys.exit(_judge(story, verdict))


def end_in_order() -> None:
    """Leave the stage on SIGTERM and SIGHUP."""
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, _end)


def _end(signum: int, _: Any) -> NoReturn:
    raise SystemExit(128 + signum)


def _judge(story: Story[Any], verdict: Verdict) -> int:
    left_behind = [f"{left} was left behind" for left in story.stage.left_behind()]
    broken = [*verdict.broken(), *story.cut_short, *left_behind]
    story.narrator.scene("Results")
    verdict.show()
    click.echo(story.explanation)
    for line in broken:
        click.secho(f"BROKEN: {line}", fg="red", bold=True)
    if not broken:
        click.secho(f"KEPT: {verdict.kept()}, nothing left behind", fg="green", bold=True)
    click.echo(f"({time.monotonic() - story.narrator.began:.0f} s)")
    return 1 if broken else 0
