"""A story on a stage, told while it happens, and judged when all is over."""

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
"""Seconds; three times what a story takes on an idle machine."""

StageT = TypeVar("StageT", bound=Stage)


class Verdict(Protocol):
    """Whether promises were kept."""

    def broken(self) -> list[str]:
        """One line for each promise that was not kept."""

    def kept(self) -> str:
        """What there is to say when all were kept."""

    def show(self) -> None:
        """Print what became of it."""


class Story(ABC, Generic[StageT]):
    """A story of some scenes on one stage."""

    explanation: str
    """What is promised and what is not, for the end."""

    def __init__(self, stage: StageT, narrator: Narrator) -> None:
        self.stage = stage
        self.narrator = narrator
        self.cut_short: list[str] = []

    @abstractmethod
    def scenes(self) -> None:
        """Play; a TimeoutError or a CommandFailed cuts the story short."""

    @abstractmethod
    def verdict(self) -> Verdict:
        """What is to be judged, as far as the story came."""

    def play(self) -> Verdict:
        """Play all scenes, and judge."""
        try:
            self._set_up()
            self.scenes()
        except TimeoutError as error:
            self.narrator.say("demo", f"gives up waiting: {error}", colour="red")
            self.cut_short.append(str(error))
        except CommandFailed as error:
            self.cut_short.append(str(error))
        self._listen()
        return self.verdict()

    def wait(self, seen: Callable[[], Any], timeout: float, what: str) -> Any:
        """Tell the news until *seen* gives something; raises TimeoutError."""
        deadline = min(time.monotonic() + timeout, self.narrator.began + TIME_LIMIT)
        while True:
            self._listen()
            if found := seen():
                self._listen()  # what led to it may have been written since
                return found
            if time.monotonic() > deadline:
                raise TimeoutError(f"no sign of {what} after {timeout:g} s")
            time.sleep(0.05)

    def all_answered(self) -> bool:
        """Whether every call that was asked for has its answer."""
        requests = self.stage.requests
        return bool(requests) and len(self.stage.results()) == len(requests)

    def _set_up(self) -> None:
        redis = self.stage.redis
        program = redis.process.argv[0].rpartition("/")[2]
        self.narrator.say(
            "demo", f"has started {program} on port {redis.port}; records are kept in SQLite"
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
    """Play and judge; exits with 1 when a promise was broken or the story broke off, 130 after
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
    """Leave the stage when this process is told to end."""
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, _end)


def _end(signum: int, _: Any) -> NoReturn:
    raise SystemExit(128 + signum)


def _judge(story: Story[Any], verdict: Verdict) -> int:
    left_behind = [f"{left} was left behind" for left in story.stage.left_behind()]
    broken = [*verdict.broken(), *story.cut_short, *left_behind]
    story.narrator.scene("What became of it")
    verdict.show()
    click.echo(story.explanation)
    for line in broken:
        click.secho(f"BROKEN: {line}", fg="red", bold=True)
    if not broken:
        click.secho(f"KEPT: {verdict.kept()}, nothing left behind", fg="green", bold=True)
    click.echo(f"({time.monotonic() - story.narrator.began:.0f} s)")
    return 1 if broken else 0
