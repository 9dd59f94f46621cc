"""Prints the timeline of a demo, sorted by time: seconds, process, and event."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import click

WIDTH = 100
HOLD = 1.0
"""Seconds for which a line waits, because another process may still write an earlier one."""
_COLOURS = {
    "worker-a": "cyan",
    "worker-b": "magenta",
    "web-1": "blue",
    "web-2": "blue",
    "operator": "green",
    "model": "yellow",
    "demo": "red",
}


class Narrator:
    """Prints lines, the earliest first, each with the seconds since the demo began. *done* is the
    verb for a finished key.
    """

    def __init__(self, done: str) -> None:
        self.began = time.monotonic()
        self._done = done
        self._webs: dict[str, str] = {}
        self._reschedule: set[str] = set()
        self._refused: set[str] = set()
        self._held: list[tuple[float, int, list[str]]] = []
        self._said = 0

    def scene(self, text: str) -> None:
        """Print a headline, after all lines before it."""
        self.print_held()
        click.secho(f"\n{text}", bold=True)

    def say(
        self, who: str, text: str, *, at: float | None = None, colour: str | None = None
    ) -> None:
        """Add one line to the timeline; *at*: when it happened, by default now."""
        at = time.monotonic() if at is None else at
        seconds = at - self.began
        first, *more = textwrap.wrap(text, WIDTH - 27)
        shown = click.style(f"{who:<16}", fg=_COLOURS.get(who.split(maxsplit=1)[0]))
        lines = [f"{seconds:6.2f} s  {shown} {click.style(first, fg=colour)}"]
        lines += [f"{'':26}{click.style(line, fg=colour)}" for line in more]
        self._hold(at, lines)

    def quote(self, lines: Iterable[str]) -> None:
        """Add the output of a program."""
        quoted = [click.style(f"{'':10}| {line[: WIDTH - 12]}", dim=True) for line in lines]
        self._hold(time.monotonic(), quoted)

    def print_held(self, before: float | None = None) -> None:
        """Print the lines of events *before* a time, the earliest first; by default all lines."""
        self._held.sort()
        while self._held and (before is None or self._held[0][0] < before):
            for line in self._held.pop(0)[2]:
                click.echo(line)

    def _hold(self, at: float, lines: list[str]) -> None:
        self._said += 1
        self._held.append((at, self._said, lines))

    def tell(self, event: Mapping[str, Any]) -> None:
        """Add one event of the journal; only the first reschedule of a call, and the first refusal
        of a key, are added.
        """
        if event["what"] == "Asked":
            self._webs |= {call: event["worker"] for _, call in event["calls"]}
            self.say(event["worker"], _asked(event), at=event["t"])
            return
        text, colour = self._worded(event)
        if text:
            self.say(f"{event['worker']} {event['pid']}", text, at=event["t"], colour=colour)

    def _worded(self, event: Mapping[str, Any]) -> tuple[str, str | None]:
        key = short(event["key"])
        match event["what"]:
            case "LeaseAcquired":
                again = f", attempt {event['attempt']}" if (event["attempt"] or 1) > 1 else ""
                return f"begins {key}{again}", "yellow" if again else None
            case "AttemptSettled" if event["state"] == "done":
                return f"has {self._done} {key} after {event['runtime']:.1f} s", "green"
            case "AttemptSettled" if event["state"] == "cooling":
                return (
                    f"has failed with {key}, which cools down for {event['retry_after']:.1f} s",
                    "yellow",
                )
            case "AttemptSettled":
                return f"closes its attempt on {key}: {event['ended']}", "yellow"
            case "CrashSeen":
                return (
                    f"sees that the process of the attempt on {key} ({event['host']}) died",
                    "yellow",
                )
            case "AttemptAbandoned":
                return f"takes {key} over: nothing was heard of {event['host']}", "yellow"
            case "LeaseLost":
                return f"has lost its lease on {key}: {event['reason']}", "red"
            case "OutcomeRefused":
                return f"was too late with {key}: its outcome is refused", "red"
            case "GroupClosed":
                return (
                    f"closes the group of {event['group']} for {event['closed_for']:.1f} s: {event['reason']}",
                    "yellow",
                )
            case "GroupOpened":
                return f"opens the group of {event['group']}", "green"
        return self._answered(
            event, f"{self._webs.get(event['call_id'], 'somebody')}'s call for {key}"
        )

    def _answered(self, event: Mapping[str, Any], call: str) -> tuple[str, str | None]:
        match event["what"]:
            case "ResultReplayed":
                return f"answers {call} with the saved result", "green"
            case "CallRescheduled" if event["call_id"] not in self._reschedule:
                self._reschedule.add(event["call_id"])
                return f"reschedules {call} in {event['delay']:.1f} s: {event['reason']}", None
            case "CallDropped":
                return f"drops {call}: {event['why']}", None
            case "CallRefused" if event["key"] not in self._refused:
                self._refused.add(event["key"])
                return f"refuses {call}: {event['error']}", "red"
        return "", None


def short(key: str) -> str:
    """The customer of an invoice's key, or the number of a document."""
    return key.split(":")[1]


def _asked(event: Mapping[str, Any]) -> str:
    keys = [short(key) for key, _ in event["calls"]]
    times = f" {len(keys)} times" if len(keys) > len(set(keys)) else ""
    return f"requests {' '.join(dict.fromkeys(keys))}{times} with {event['how']}"


def table(rows: Sequence[Sequence[str]]) -> None:
    """Print rows in columns, the first as a head."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for number, row in enumerate(rows):
        line = "  ".join(
            cell.ljust(width) for cell, width in zip(row, widths, strict=True)
        ).rstrip()
        click.secho(f"  {line}", bold=number == 0)
