"""Checks the promises of the demo: reads the outbox, the callers' results and the journal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from example_project.demo.narrator import short, table
from example_project.demo.stage import Request


@dataclass(frozen=True)
class Kill:
    """A process was killed while it ran *key*; the work must begin again within *bound* seconds."""

    what: str
    key: str
    at: float
    bound: float


@dataclass(frozen=True)
class Takeover:
    """The process that took over, and how many seconds after the kill."""

    kill: Kill
    by: str
    after: float


@dataclass(frozen=True)
class Verdict:
    """The results, once every caller has an answer or the time is over."""

    requests: Sequence[Request]
    kills: Sequence[Kill]
    events: Sequence[Mapping[str, Any]]
    mailed: Sequence[str]
    results: Mapping[str, Any]
    plainly_mailed: Sequence[str] | None = None
    """The mails of plain Celery, for comparison; nothing is promised about them."""

    def of(self, what: str, key: str) -> list[Mapping[str, Any]]:
        """The events of one kind about one key."""
        return [event for event in self.events if (event["what"], event["key"]) == (what, key)]

    def takeover(self, kill: Kill) -> Takeover | None:
        """The takeover after *kill*."""
        for event in self.of("LeaseAcquired", kill.key):
            if event["t"] > kill.at:
                return Takeover(kill, f"{event['worker']} {event['pid']}", event["t"] - kill.at)
        return None

    @property
    def keys(self) -> list[str]:
        """All requested invoices."""
        return sorted({request.key for request in self.requests})

    def broken(self) -> list[str]:
        """One line for each promise that was not kept."""
        return [*self._broken_mails(), *self._broken_answers(), *self._broken_takeovers()]

    def kept(self) -> str:
        """The summary, if all promises were kept."""
        mails = f"{len(self.mailed)} mails"
        if self.plainly_mailed is not None:
            mails += f" (plain Celery: {len(self.plainly_mailed)})"
        return f"{len(self.keys)} invoices, {len(self.requests)} calls, {mails}, all answered"

    def _broken_mails(self) -> list[str]:
        mails = Counter(self.mailed)
        return [
            f"{key} was mailed {mails[key]} times, not once" for key in self.keys if mails[key] != 1
        ]

    def _broken_answers(self) -> list[str]:
        lines = []
        for key in self.keys:
            calls = [request for request in self.requests if request.key == key]
            unanswered = [request.web for request in calls if request.call_id not in self.results]
            answers = [
                self.results[request.call_id]
                for request in calls
                if request.call_id in self.results
            ]
            if unanswered:
                lines.append(f"{key}: {' and '.join(unanswered)} got no answer")
            lines += [
                f"{key}: a caller got {answer!r}"
                for answer in answers
                if not isinstance(answer, dict)
            ]
            if any(answer != answers[0] for answer in answers):
                lines.append(f"{key}: its callers got different answers")
        return lines

    def crashes(self, key: str) -> int:
        """How many attempts on *key* have crashed: their process died, or nothing was heard of
        them.
        """
        return len(self.of("CrashSeen", key)) + len(self.of("AttemptAbandoned", key))

    def _broken_takeovers(self) -> list[str]:
        lines = []
        for kill in self.kills:
            takeover = self.takeover(kill)
            if takeover is None:
                lines.append(f"{kill.key}: no process took over from {kill.what}")
            elif takeover.after > kill.bound:
                late = f"after {takeover.after:.1f} s, promised were {kill.bound:g} s"
                lines.append(f"{kill.key}: taken over from {kill.what} {late}")
        crashes = {key: self.crashes(key) for key in self.keys}
        killed = Counter(kill.key for kill in self.kills)
        lines += [
            f"{key}: {count} crashes were recorded, {killed[key]} happened"
            for key, count in crashes.items()
            if count != killed[key]
        ]
        return lines

    def show(self) -> None:
        """Print the two tables."""
        webs = sorted({request.web for request in self.requests})
        beside = ["plain Celery"] if self.plainly_mailed is not None else []
        head = ["invoice", "mailed", *beside, "attempts", "crashes"]
        rows = [[*head, *(f"{web} got" for web in webs)]]
        mails, plain = Counter(self.mailed), Counter(self.plainly_mailed or ())
        for key in self.keys:
            counts = (
                mails[key],
                *([plain[key]] if beside else []),
                len(self.of("LeaseAcquired", key)),
                self.crashes(key),
            )
            rows.append([short(key), *map(str, counts), *(self._got(key, web) for web in webs)])
        table(rows)
        if self.kills:
            print()
            table(
                [
                    ["killed", "during", "taken over by", "after", "promised"],
                    *map(self._row, self.kills),
                ]
            )

    def _row(self, kill: Kill) -> list[str]:
        takeover = self.takeover(kill)
        by, after = (takeover.by, f"{takeover.after:.1f} s") if takeover else ("nobody", "-")
        return [kill.what, short(kill.key), by, after, f"within {kill.bound:g} s"]

    def _got(self, key: str, web: str) -> str:
        calls = [
            request.call_id for request in self.requests if (request.key, request.web) == (key, web)
        ]
        if not calls:
            return "-"
        if calls[0] not in self.results:
            return "no answer"
        replayed = any(event["call_id"] == calls[0] for event in self.of("ResultReplayed", key))
        return "the saved result" if replayed else "its own run's result"
