"""Tells what happens on the demo's stage, line by line: seconds, who, and what."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Mapping, Sequence
from typing import Any

import click

WIDTH = 100
_COLOURS = {"worker-a": "cyan", "worker-b": "magenta", "web-1": "blue", "web-2": "blue", "demo": "red"}


class Narrator:
    """Prints lines, each with the seconds since it was made."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self._webs: dict[str, str] = {}
        self._put_back: set[str] = set()

    def scene(self, text: str) -> None:
        """Print a headline."""
        click.secho(f"\n{text}", bold=True)

    def say(self, who: str, text: str, *, at: float | None = None, colour: str | None = None) -> None:
        """Print one line of the timeline; *at*: when it happened, by default now."""
        seconds = (time.monotonic() if at is None else at) - self.began
        first, *more = textwrap.wrap(text, WIDTH - 27)
        shown = click.style(f"{who:<16}", fg=_COLOURS.get(who.split(maxsplit=1)[0]))
        click.echo(f"{seconds:6.2f} s  {shown} {click.style(first, fg=colour)}")
        for line in more:
            click.echo(f"{'':26}{click.style(line, fg=colour)}")

    def tell(self, event: Mapping[str, Any]) -> None:
        """Print one event of the journal, unless it is the second time that a call is put back."""
        if event["what"] == "Asked":
            self._webs |= dict.fromkeys(event["calls"].values(), event["worker"])
            asked = " ".join(map(short, event["calls"]))
            self.say(event["worker"], f"asks for {asked} with {event['how']}()", at=event["t"])
            return
        text, colour = self._worded(event)
        if text:
            self.say(f"{event['worker']} {event['pid']}", text, at=event["t"], colour=colour)

    def _worded(self, event: Mapping[str, Any]) -> tuple[str, str | None]:
        invoice = short(event["key"])
        call = f"{self._webs.get(event['call_id'], 'somebody')}'s call for {invoice}"
        match event["what"]:
            case "LeaseAcquired":
                again = f", attempt {event['attempt']}" if (event["attempt"] or 1) > 1 else ""
                return f"begins {invoice}{again}", "yellow" if again else None
            case "AttemptSettled" if event["state"] == "done":
                return f"has mailed {invoice} after {event['runtime']:.1f} s", "green"
            case "AttemptSettled":
                return f"closes its attempt at {invoice}: {event['ended']}", "yellow"
            case "ResultReplayed":
                return f"answers {call} with the saved result", "green"
            case "CallPutBack" if event["call_id"] not in self._put_back:
                self._put_back.add(event["call_id"])
                return f"puts {call} back ({event['delay']:.1f} s): {event['reason']}", None
            case "CrashSeen":
                return f"finds that whoever had {invoice} ({event['host']}) died without a word", "yellow"
            case "CallDropped":
                return f"drops {call}: {event['reason']}", None
            case "CallRefused":
                return f"refuses {call}: {event['error']}", "red"
            case "LeaseGone":
                return f"has lost its lease on {invoice}: {event['reason']}", "red"
            case "OutcomeRefused":
                return f"came too late with {invoice}: its outcome is refused", "red"
        return "", None


def short(key: str) -> str:
    """The customer of an invoice's key."""
    return key.split(":")[1]


def table(rows: Sequence[Sequence[str]]) -> None:
    """Print rows in columns, the first as a head."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for number, row in enumerate(rows):
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        click.secho(f"  {line}", bold=number == 0)
