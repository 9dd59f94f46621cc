"""Compares the history of a run with what docs/explanation/guarantees.md promises.

A history is a list of notes. Those that count:

* ``published``: a caller's message was confirmed (task, key, call, number).
* ``row``: the row of a key has changed (key, old and new state, fence, owner and call; result).
* ``body`` and ``body ended``: a body runs (key, call, fence, token, process).
* ``delivers``, ``tries``: a worker gets the message of a call, and begins with it in its pool.
* ``killed``, ``paused``: a process (process, span); ``emptied``, ``clock``: the lease store.
* ``charges``, ``charged``, ``has charged``: a body calls the outside world for an effect, which has
  executed it, and whose reply the body gets.
* ``goes on``, ``saves``, ``saved``: a body gets the progress of its key, and saves its own.
* ``extends``, ``item``: a body makes its lease longer, or does an item of its loop.
* ``group``: the slots of a group have changed (who holds them; until when it is closed; when a body
  may begin that began last by its rate; since when the oldest call of each worker waits).
* ``returned``: a message has come back to its queue, which would discard it the next time, as it
  has done with what is ``discarded``; both say why.
* ``down`` and ``up``, ``frozen``, ``cut`` and ``mended``, ``healed``: a server executes nothing, or
  nothing for a host.
* ``purged``: an operator has purged; all that had expired before (since) is gone.
* ``final``: what is left at the end (rows, leases, results, messages, effects without a record).

A key whose record has expired is new: what is promised of a key holds for each of its generations.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from typing import Any, NamedTuple

from celery_leases.decide.after_run import CALL_ENDING_CAUSES, FINISHED_CALLS_MAX
from celery_leases.decide.attempt_history import HISTORY_MAX
from celery_leases.decide.latest import PATIENCE, QUIET
from celery_leases.events import Dropped
from celery_leases.failures.actions import Reason
from celery_leases.groups.slots import OVERTAKING
from celery_leases.options import DEBOUNCE_MAX as DEBOUNCES
from celery_leases.options import Failures, LeaseOptions
from celery_leases.record import CALLER_HAS_FAILURE, Ended, State
from celery_leases.worker.arrivals import COMPARE_EVERY
from tests.simulation.history import Note, Row
from tests.simulation.work import (
    BRIEF,
    CLOCK_ERROR,
    CLOSED_FOR,
    COMPARED,
    COOLDOWN,
    DEBOUNCE,
    DEBOUNCE_MAX,
    FAILURES,
    GROUPS,
    LIMITS,
    LONGEST_CLOSED,
    NEWEST_RUNS,
    OUTBOX_TASKS,
    PAUSE,
    REPEATED,
    RETENTION,
    RETRIES,
    SHARED,
    TIME_LIMIT,
    TTL,
    named,
    ttl_of,
)

CRASHES = Failures().crashes
QUIET_FOR = Failures(cooldown=COOLDOWN).cooldown.quiet
"""Seconds after which the counts of a key's failures begin anew."""
COOLDOWNS = {
    "rejects": (CLOSED_FOR, LONGEST_CLOSED),
    "error": (COOLDOWN, 6 * 3600.0),
    "retry": (30.0, 3600.0),
}
"""Seconds of the first cooldown of a key, and of the longest one, by how its body ends."""
RETRY = (1.0, 300.0)
"""Seconds of the first quick retry, and of the longest one."""
CLOSE_GROUPS = ("rejects", "retry", "closes")
"""Bodies that end so close their group, if they have one."""
RESTS = (State.DONE, State.FAILED, State.COOLING, State.UNCERTAIN)
EACH_RUNS = (
    *("each", "limited", "rated", "fused", "tight", "roomy", "strict", "lazy", "each-charged"),
    *("each-brief-charged", *SHARED, *SHARED.values()),
)
"""Tasks whose calls all run."""
SEVERAL_RUNS = (*EACH_RUNS, *NEWEST_RUNS)
"""Tasks of which a key is done more than once."""
FAULTS = (
    *("refused", "lost request", "lost reply", "late request", "slow request"),
    *("killed", "paused", "host paused", "emptied", "evicted", "clock", "released"),
)
"""The notes of what has gone wrong for a process, its host, or all leases. An operator who takes a
key from its holder is one.
"""
BUSY = (Dropped.HELD_BY_OTHER, Dropped.COOLING)
RESCHEDULED = ("event CallRescheduled",)
NEWER_RUNS = "a newer call of the key runs instead"
"""The reason of a call that waits for a newer one."""
SLOW = ("lost request", "lost reply", "late request", "slow request")
STOOD = ("paused", "host paused", "frozen")
ENDED_BY_CELERY = ("revoked", "refused before the start", "time limit")
ANSWERED_FOR, LONGEST_GAP = 3.0, 1.0
"""Seconds for which the database has answered before a row is taken over, and between two answers
at most.
"""
SLACK = 0.3
"""Seconds in which an interrupted body ends: one step of the protocol may have to end before."""


@dataclass(frozen=True)
class Violation:
    """A promise that a history breaks, and the first note that shows it."""

    promise: str
    note: Note | None
    why: str

    def __str__(self) -> str:
        return f"{self.promise}: {self.why}\n  {self.note}"


@dataclass
class Body:
    """The run of one body; ``ended`` is infinite if it never ended."""

    key: str
    token: str
    process: str
    began: Note
    ended: float = math.inf
    #: When it lost its lease.
    lost: float = math.inf
    #: A lost lease interrupts it.
    interrupted: bool = True

    @property
    def task(self) -> str:
        """Its task, or the name of the tasks that share its key."""
        return self.key.partition(" ")[0]


@dataclass
class History:
    """Notes, with what several promises need of them."""

    notes: Sequence[Note]
    bodies: list[Body] = field(default_factory=list)
    final: dict[str, Any] = field(default_factory=dict)
    #: What these notes were in another history of the same run.
    originals: Sequence[Note] = ()
    _faults: defaultdict[str, list[Note]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        for note in self.of(*FAULTS):
            given = note.details
            self._faults[given.get("process") or given.get("host") or ""].append(note)
        running: dict[str, Body] = {}
        for note in self.notes:
            given = note.details
            if note.what == "body":
                body = Body(given["key"], given["token"], given["process"], note)
                body.interrupted = given.get("interrupted", True)
                running[body.token] = body
                self.bodies.append(body)
            elif note.what == "body ended" and given["token"] in running:
                running.pop(given["token"]).ended = note.at
            elif note.what == "lost" and given["token"] in running:
                lost = running[given["token"]]
                lost.lost = min(lost.lost, note.at)
            elif note.what == "killed":
                for token in [t for t, body in running.items() if body.process == given["process"]]:
                    running.pop(token).ended = note.at
            elif note.what == "final":
                self.final = given

    @cached_property
    def generations(self) -> dict[str, list[int]]:
        """The fence with which each generation of a key begins, of the keys whose records expire:
        that of the first claim, and of each claim of a record that is deleted, or has expired.
        """
        found: defaultdict[str, list[int]] = defaultdict(list)
        for note in self.of("row"):
            key, new, old = note.details["key"], note.details["new"], note.details["old"]
            if _is_brief(key) and new is not None and (old is None or _is_over(old, note.at)):
                found[key].append(new.fence)
        return found

    def generation(self, key: str, fence: int) -> int:
        """The number of the generation of an attempt."""
        return bisect_right(self.generations.get(key, ()), fence)

    @cached_property
    def of_generations(self) -> History:
        """The same history, in which each generation of a key is a key of its own."""
        if not self.generations:
            return self
        fences: dict[str, int] = {}
        latest: dict[str, int] = {}

        def renamed(row: Row | None) -> Row | None:
            number = row and self.generation(row.key, row.fence)
            return replace(row, key=f"{row.key} #{number}") if row and number else row

        notes: list[Note] = []
        originals: list[Note] = []
        for note in self.notes:
            given = note.details
            if (key := given.get("key")) not in self.generations:
                notes.append(note)
                originals.append(note)
                continue
            if note.what == "row":
                old, new = renamed(given["old"]), renamed(given["new"])
                if new is None:
                    continue
                fences[new.owner] = latest[key] = new.fence
                old = old if old is not None and old.key == new.key else None
                given = {**given, "key": new.key, "old": old, "new": new}
            else:
                fence = given.get("fence") or fences.get(given.get("token", ""), latest.get(key, 0))
                given = {**given, "key": f"{key} #{self.generation(key, fence)}"}
            notes.append(Note(note.at, note.what, given))
            originals.append(note)
        final = {**self.final, "rows": [renamed(row) for row in self.final["rows"]]}
        notes[-1] = replace(notes[-1], details=final)
        return History(notes, originals=originals)

    def of(self, *kinds: str) -> Iterator[Note]:
        """The notes of these kinds."""
        return (note for note in self.notes if note.what in kinds)

    def faults(self, process: str, after: float, before: float) -> list[Note]:
        """What has gone wrong between two times for *process*, its host, or all leases."""
        return [
            note
            for of in (process, process.partition("/")[0], "")
            for note in self._faults[of]
            if note.at <= before and note.at + _lasts(note) >= after
        ]

    def faults_of_host(self, host: str, after: float, before: float) -> list[Note]:
        """The same for all processes of a host: a call that has begun waits for one of them."""
        processes = [name for name in self._faults if name.partition("/")[0] == host]
        return [each for name in processes for each in self.faults(name, after, before)]


def _lasts(fault: Note) -> float:
    """For how many seconds a fault disturbs a process: a late request may be executed long after
    its caller has given it up.
    """
    span, late = (float(fault.details.get(name, 0.0)) for name in ("span", "late"))
    return max(span, late)


def _is_brief(key: str) -> bool:
    return key.partition(" ")[0] in BRIEF


def _is_over(row: Row, at: float) -> bool:
    """Whether a row does not run, and its retention is over."""
    return row.state != State.RUNNING and row.expires_at <= at


Check = Callable[[History], Iterator[Violation]]


def of_each_generation(check: Check) -> Check:
    """The same check of the generations of all keys."""

    @wraps(check)
    def checked(history: History) -> Iterator[Violation]:
        told = history.of_generations
        for found in check(told):
            places = (place for place, note in enumerate(told.notes) if note is found.note)
            place = next(places, None) if told.originals else None
            yield found if place is None else replace(found, note=told.originals[place])

    return checked


def violations(notes: Sequence[Note]) -> list[Violation]:
    """All promises that a history breaks, the first one first."""
    history = History(notes)
    steps = any(history.of("database clock"))
    checks = [each for each in CHECKS if not (steps and each in BY_THE_DATABASE_CLOCK)]
    found = [each for check in checks for each in check(history)]
    return sorted(found, key=lambda each: each.note.at if each.note is not None else math.inf)


def fences_grow(history: History) -> Iterator[Violation]:
    """Each claim of a key has a larger fence than the claims before."""
    highest: dict[str, int] = {}
    for note in history.of("row"):
        key, new, old = note.details["key"], note.details["new"], note.details["old"]
        if new is None or new.state != State.RUNNING:
            continue
        if old is not None and (old.state, old.owner) == (State.RUNNING, new.owner):
            if old.fence != new.fence:
                yield Violation("fences grow", note, "a holder's own write has changed the fence")
            continue
        if new.fence <= highest.get(key, 0):
            yield Violation("fences grow", note, f"not above {highest[key]}")
        highest[key] = new.fence


def one_outcome(history: History) -> Iterator[Violation]:
    """A running row gets its outcome once, from the attempt that claimed it last: its process, or
    the main process after that has died; of a call that Celery has ended, any main process.
    """
    killed: set[str] = set()
    ended: dict[str, float] = {}
    for note in history.of(*ENDED_BY_CELERY):
        ended.setdefault(note.details["call"], note.at)
    for note in history.of("row", "killed"):
        if note.what == "killed":
            killed.add(f"{note.details['pid']:x}")
            continue
        old, new, pid = note.details["old"], note.details["new"], note.details["pid"]
        if old is None or new is None or not _ran(old) or _ran(new):
            continue
        owner = old.owner.rpartition("-")[2]
        if new.ended == Ended.RELEASED and not new.owner and new.fence > old.fence:
            continue  # by an operator
        if (old.owner, old.fence) != (new.owner, new.fence):
            yield Violation("one outcome", note, "not written by the attempt that claimed the row")
        elif new.ended == Ended.TERMINATED and ended.get(old.call, math.inf) <= note.at:
            continue
        elif owner != f"{pid:x}" and owner not in killed:
            yield Violation("one outcome", note, "not written by the process of the attempt")


def _ran(row: Row | None) -> bool:
    return row is not None and row.state == State.RUNNING


def records_last(history: History) -> Iterator[Violation]:
    """A record lasts until its retention is over, which counts from its outcome, or from the end of
    its wait; an operator counts from what was read. No running one is deleted.
    """
    for note in history.of("row"):
        old, new = note.details["old"], note.details["new"]
        if new is None:
            if not _is_over(old, note.at):
                yield Violation("a record lasts", note, f"it was deleted: {old}")
        elif _ran(old) and not _ran(new) and new.ended != Ended.RELEASED:
            least = RETENTION if _is_brief(new.key) else LeaseOptions.retention
            if new.state in (State.PENDING, State.COOLING):
                least = max(least, QUIET_FOR)
            if new.expires_at < max(note.at, new.retry_at) + least * 0.99 - 0.01:
                yield Violation("a record lasts", note, f"until {new.expires_at:.3f}")


def what_has_expired_is_purged(history: History) -> Iterator[Violation]:
    """Nothing is left of what had expired when the last purge began."""
    since = max((note.details["since"] for note in history.of("purged")), default=-math.inf)
    for row in history.final["rows"]:
        if _is_over(row, since):
            yield Violation("what has expired is purged", None, f"the record is left: {row}")
    for effect in history.final.get("effects", ()):
        yield Violation("what has expired is purged", None, f"{effect} is left without its record")


def closed_after_its_lease(history: History) -> Iterator[Violation]:
    """What another process writes into the row of a call that Celery has ended comes after the end
    of its lease, unless the lease store has lost that.
    """
    until: dict[str, float] = {}
    for note in history.of("row", "holds", "killed", "emptied", "evicted", "clock"):
        given = note.details
        if note.what == "holds":
            until[given["token"]] = given["store_until"]
        elif note.what == "killed":
            until = {its: at for its, at in until.items() if not its.endswith(f"-{given['pid']:x}")}
        elif note.what != "row":
            until.clear()
        elif _ran(given["old"]) and given["new"] is not None and not _ran(given["new"]):
            if given["new"].ended != Ended.TERMINATED:
                continue
            owner, pid = given["new"].owner, f"-{given['pid']:x}"
            if until.get(owner, 0.0) > note.at and not owner.endswith(pid):
                yield Violation("closed after its lease", note, "its lease has not ended")


@of_each_generation
def done_stays_done(history: History) -> Iterator[Violation]:
    """Finished work is not run again: a done row does not change, unless each call runs."""
    for note in history.of("row"):
        old, new = note.details["old"], note.details["new"]
        if old is None or new is None or old.state != State.DONE or old.task in SEVERAL_RUNS:
            continue
        if (new.state, new.result) != (old.state, old.result):
            yield Violation("done stays done", note, f"it became {new.state}, {new.result}")


@of_each_generation
def each_call_once(history: History) -> Iterator[Violation]:
    """A call is done once, and does not run afterwards, while its record lists it."""
    done: dict[tuple[str, str], None] = {}

    def is_known(work: tuple[str, str]) -> bool:
        latest = [each for each in done if each[0] == work[0]][-FINISHED_CALLS_MAX:]
        return work in latest

    for note in history.of("row", "body"):
        if note.what == "body":
            if is_known((note.details["key"], note.details["call"])):
                yield Violation("each call once", note, "it was done before")
            continue
        old, new = note.details["old"], note.details["new"]
        if new is None or new.state != State.DONE or (old is not None and old.state == State.DONE):
            continue
        work = new.key, new.call
        if is_known(work):
            yield Violation("each call once", note, f"{new.call} was done before")
        done.pop(work, None)
        done[work] = None


def body_owns_row(history: History) -> Iterator[Violation]:
    """A body begins under a row that its attempt has claimed."""
    rows: dict[str, Any] = {}
    for note in history.of("row", "body"):
        if note.what == "row":
            rows[note.details["key"]] = note.details["new"] or note.details["old"]
            continue
        row, given = rows.get(note.details["key"]), note.details
        if (
            row is None
            or row.fence < given["fence"]
            or (
                (row.state, row.owner) != (State.RUNNING, given["token"])
                and not disturbed(history, given["process"], note.at)
                and row.ended != Ended.RELEASED
            )
        ):
            yield Violation("a record before the run", note, f"the row is {row}")


def no_overlap(history: History) -> Iterator[Violation]:
    """Bodies of one key do not run at the same time, but for the documented windows."""
    by_key: defaultdict[str, list[Body]] = defaultdict(list)
    for body in history.bodies:
        for other in by_key[body.key]:
            if (
                other.ended > body.began.at + SLACK
                and not may_overlap(history, other, body.began.at)
                and not _lease_lost_before_claim(history, other)
            ):
                why = f"beside {other.token} of {other.process}, begun at {other.began.at:.4f}"
                yield Violation("no overlap", body.began, why)
        by_key[body.key].append(body)


def may_overlap(history: History, body: Body, at: float) -> bool:
    """Whether a documented window excuses that *body* still runs while another one begins."""
    evicted = (note for note in history.of("evicted") if note.details["key"] == body.key)
    return (
        disturbed(history, body.process, at)
        or (not body.interrupted and body.lost <= at)
        or _waits_for_the_database(history, body, at)
        or any(body.began.at - 2.0 <= note.at <= at for note in evicted)
        or _was_released(history, body, at)
    )


def _was_released(history: History, body: Body, at: float) -> bool:
    """Whether an operator has taken the key from *body*, which does not know it yet."""
    known = body.lost + SLACK if body.interrupted else math.inf
    released = [note.at for note in history.of("released") if note.details["key"] == body.key]
    return at <= known and any(body.began.at - 2.0 <= each <= at for each in released)


def _waits_for_the_database(history: History, body: Body, at: float) -> bool:
    """Whether a body is in a step of an effect, for whose end an interrupt waits."""
    return "charged " in body.key and any(
        fault.what in SLOW for fault in history.faults(body.process, at - SLACK, at)
    )


def _lease_lost_before_claim(history: History, body: Body) -> bool:
    """Whether the lease store was emptied between the acquire and the claim of an attempt."""
    began = body.began.at
    return any(began - 2.0 <= note.at <= began for note in history.of("emptied"))


def lease_is_believed_too_long(history: History) -> Iterator[Violation]:
    """No process counts on a lease for longer than the store does, unless that has lost a renewal
    before its reply came; while a transaction of the body locks the row, the lock is the lease.
    """
    locks: set[str] = set()
    emptied = -math.inf
    for note in history.of("holds", "locks", "clock", "emptied"):
        if note.what == "clock":
            return
        if note.what == "emptied":
            emptied = note.at
        elif note.what == "locks":
            locks.add(note.details["token"])
        elif note.details["token"] in locks or note.at < emptied + SLACK:
            continue
        elif note.details["until"] <= note.at or (
            emptied > note.details["until"] - ttl_of(note.details["key"])
        ):
            continue  # the reply came too late to be believed, or after what it says was lost
        elif note.details["until"] > note.details["store_until"] + 1e-6:
            yield Violation(
                "a lease ends first for its holder", note, "it is believed for too long"
            )


def lost_stays_lost(history: History) -> Iterator[Violation]:
    """A lease that is lost stays lost: a body that asks after that is told, and no late reply
    prolongs the lease.
    """
    lost: set[str] = set()
    until: dict[str, float] = {}
    for note in history.of("lost", "checked", "holds"):
        token = note.details["token"]
        if note.what == "lost":
            lost.add(token)
        elif token in lost and note.details.get("until", math.inf) > until.get(token, 0.0):
            yield Violation("lost stays lost", note, "its lease was lost before")
        elif note.what == "holds":
            until[token] = note.details["until"]


def disturbed(history: History, process: str, at: float) -> bool:
    """Whether a documented window excuses the process at that time: it stood still, or the clock of
    the lease store has stepped.
    """
    host = process.partition("/")[0]
    for note in history.of("paused", "host paused", "clock"):
        given = note.details
        if note.at > at:
            return False
        if note.what == "clock":
            return True
        stood = given.get("process") == process or given.get("host") == host
        if stood and note.at + given["span"] + SLACK >= at:
            return True
    return False


def calls_are_repeated(history: History) -> Iterator[Violation]:
    """With ``uncertain="rerun"`` a call whose outcome is unknown is made again, with the same
    idempotency key, and no operator has to decide.
    """
    keys: dict[tuple[str, int], str] = {}
    for note in history.of("charged", "row"):
        given = note.details
        if not given["key"].startswith(f"{REPEATED} "):
            continue
        if note.what == "charged":
            known = keys.setdefault((given["key"], given["part"]), given["effect"])
            if given["effect"] != known:
                yield Violation("a call is repeated", note, f"its idempotency key was {known}")
        elif given["new"] is not None and given["new"].state == State.UNCERTAIN:
            yield Violation("a call is repeated", note, "an operator has to decide")


@of_each_generation
def effects_once(history: History) -> Iterator[Violation]:
    """An effect with ``verify`` is executed once for its key, or for its call if there are several
    runs, unless a process stood still between intent and call.
    """
    seen: dict[tuple[str, str, int], bool] = {}
    latest: dict[tuple[str, str, int], float] = {}
    stood: set[tuple[str, int]] = set()
    for note in history.of("charges", "charged"):
        given = note.details
        intent = given["token"], given.get("part", 0)
        if disturbed(history, given["process"], note.at):
            stood.add(intent)
        if note.what == "charges":
            continue
        if given["key"].startswith(f"{REPEATED} "):
            continue  # the other system knows a repeated call by its idempotency key
        several = given["key"].partition(" ")[0] in SEVERAL_RUNS
        effect = given["key"], given["call"] if several else "", intent[1]
        if (
            effect in seen
            and not (seen[effect] or intent in stood)
            and not (several and _may_be_purged(history, given, latest[effect], note.at))
        ):
            yield Violation("one effect", note, "it was executed before")
        latest[effect] = note.at
        seen[effect] = intent in stood or seen.get(effect, False)


def _may_be_purged(history: History, given: dict[str, Any], latest: float, at: float) -> bool:
    """Whether the effect of a call, executed at *latest*, may be purged before *at*: its retention
    is over, and another call has the row then.
    """
    if not _is_brief(key := given["key"]):
        return False
    intent = max(
        note.at
        for note in history.of("body")
        if note.at <= latest
        and note.details["key"] == key
        and note.details["call"] == given["call"]
    )
    rows = [note for note in history.of("row") if note.details["key"] == key and note.at <= at]
    ends = [note.at for note in rows[1:]] + [at]
    return any(
        note.details["new"].call != given["call"] and end >= intent + RETENTION
        for note, end in zip(rows, ends, strict=True)
        if note.at >= latest
    )


def cooldown_holds(history: History) -> Iterator[Violation]:
    """No body begins while its key waits, whichever call the row is given to; the call that runs
    again may be a second early.
    """
    until: dict[str, float] = {}
    early: dict[str, str] = {}
    for note in history.of("row", "body"):
        key = note.details["key"]
        if note.what == "row":
            new, old = note.details["new"], note.details["old"]
            if new is None or new.state == State.RUNNING:
                continue
            if new.retry_at or old is None or new.call in ("", old.call):
                until[key] = new.retry_at
                early[key] = new.call
            continue
        grace = 1.05 if note.details["call"] == early.get(key) else 0.05
        if note.at < until.pop(key, 0.0) - grace:
            yield Violation("a cooldown holds", note, "the key waits")


def _tokens(history: History, *endings: str) -> set[str]:
    """The tokens of the attempts whose bodies have ended so."""
    ended = (note.details for note in history.of("body ended"))
    return {given["token"] for given in ended if given.get("ending") in endings}


def cooldown_lasts(history: History) -> Iterator[Violation]:
    """A cooldown that a body asks for has the length that it asks for."""
    asked = _tokens(history, "cooldown")
    for note in history.of("row"):
        given = note.details
        new = given["new"]
        if new is not None and new.state == State.COOLING and new.owner in asked:
            asked.discard(new.owner)
            if new.retry_at < note.at + COOLDOWN - 0.01:
                yield Violation("a cooldown lasts", note, "it was asked for longer")


@of_each_generation
def waits_grow(history: History) -> Iterator[Violation]:
    """If nobody names a time, each quick retry of a key waits twice as long as the one before, and
    each cooldown too, until a call ends; at most half of it is taken off.
    """
    endings = {note.details["token"]: note.details["ending"] for note in history.of("body ended")}
    retries: Counter[str] = Counter()
    cooldowns: Counter[str] = Counter()
    unknown: set[str] = set()
    for note in history.of("row"):
        key, old, new = note.details["key"], note.details["old"], note.details["new"]
        if new is None or new.state in (State.DONE, State.FAILED, State.UNCERTAIN):
            retries.pop(key, None)
            cooldowns.pop(key, None)
            unknown.discard(key)
            if new is not None and new.reason == "crash_loop":
                unknown.add(key)  # its counts come back if a crash was none
            continue
        if not new.owner:
            unknown.add(key)  # an operator may have reset the counts
        if key in unknown or not _ran(old) or new.ended != Ended.FAILED or new.owner not in endings:
            continue
        ending = endings[new.owner]
        if new.state == State.PENDING:
            retries[key] += 1
            number, bounds = retries[key], RETRY if ending == "retry" else None
        elif new.state == State.COOLING:
            retries.pop(key, None)
            if ending in CLOSE_GROUPS and new.task in GROUPS:
                continue  # the group cools down
            cooldowns[key] += 1
            number, bounds = cooldowns[key], COOLDOWNS.get(ending)
        else:
            continue
        if bounds is None:
            continue
        longest, lasts = min(bounds[0] * 2 ** (number - 1), bounds[1]), new.retry_at - note.at
        if not longest / 2 - 0.01 <= lasts <= longest + 0.01:
            yield Violation("waits grow", note, f"wait {number} lasts {lasts:.2f} s")


def waits_are_not_shortened(history: History) -> Iterator[Violation]:
    """Once a key waits, only an operator, who raises the fence, makes the wait shorter: not the end
    of the call that waits.
    """
    waiting = (State.PENDING, State.COOLING)
    for note in history.of("row"):
        old, new = note.details["old"], note.details["new"]
        if old is None or new is None or not (old.state in waiting and new.state in waiting):
            continue
        if old.fence == new.fence and new.retry_at < old.retry_at - 0.01 > note.at:
            yield Violation("a wait is not shortened", note, f"the key waited: {old}")


def outcomes_are_repeated(history: History) -> Iterator[Violation]:
    """If the process of a body that has ended lives and has not lost its lease, no other attempt
    has to take its row over: for a minute the outcome is written again after each failed request,
    unless Celery ends the call meanwhile.
    """
    ended = {
        note.details["token"]
        for note in history.of("body ended")
        if note.details.get("ending") not in (None, "", "interrupted")
    }
    bodies = {body.token: body for body in history.bodies if body.token in ended}
    excused = {note.details["token"] for note in history.of("lost")}
    calls = {note.details["call"] for note in history.of(*ENDED_BY_CELERY)}
    for note in history.of("row"):
        old, new = note.details["old"], note.details["new"]
        if old is None or new is None or not old.state == State.RUNNING == new.state:
            continue
        body = bodies.get(old.owner)
        if body is None or new.owner == old.owner or not body.ended <= note.at < body.ended + 50.0:
            continue
        faults = history.faults(body.process, body.began.at - ttl_of(body.key), note.at)
        if any(fault.what not in ("refused", *SLOW) for fault in faults) or old.call in calls:
            continue
        if old.owner not in excused and old.task != "timed":
            yield Violation("an outcome is repeated", note, f"{old.owner} has ended after {faults}")


def retries_are_not_repeated(history: History) -> Iterator[Violation]:
    """Once a body has retried its call, no copy of the message before runs, while the row is that
    of the call, which goes on by itself.
    """
    retries: dict[str, float] = {}
    least: dict[str, tuple[str, float]] = {}
    for note in history.of("body", "row", "released"):
        given = note.details
        if note.what == "body":
            number = retries[given["token"]] = given.get("retries", math.inf)
            call, retried = least.get(given["key"], ("", 0))
            if given["call"] == call and number < retried:
                why = f"with {number} retries, after {retried}"
                yield Violation("a retry is not repeated", note, why)
            continue
        key, old, new = given["key"], given.get("old"), given.get("new")
        if new is None or new.call != least.get(key, (new.call,))[0]:
            least.pop(key, None)
        elif new.owner in retries and _ran(old) and new.ended == Ended.RETRIED:
            least[key] = new.call, retries[new.owner] + 1
        elif not (_ran(new) or new.resumes):
            least.pop(key, None)


@of_each_generation
def what_has_failed_does_not_run(history: History) -> Iterator[Violation]:
    """A call that has failed for good does not run again, also after another call of its key. The
    failure of a call that crashed is taken back if its process has lived.
    """
    failed: set[tuple[str, str]] = set()
    for note in history.of("row", "body"):
        given, row = note.details, note.details.get("new")
        if note.what == "body" and (given["key"], given["call"]) in failed:
            yield Violation("what has failed does not run", note, "its call has failed")
        if row is None or row.state != State.FAILED or row.task in NEWEST_RUNS:
            continue
        if row.reason != "crash_loop":
            failed.add((row.key, row.call))


@of_each_generation
def what_is_reported_does_not_run(history: History) -> Iterator[Violation]:
    """A call whose caller has its failure does not run again because its message is delivered a
    second time, and says so. Nobody knows that of two messages that look like the first one, or
    like its first copy, or of a message that is published after the failure.
    """
    reported: dict[str, str] = {}
    again: set[str] = set()
    firsts: Counter[str] = Counter()
    copies: Counter[str] = Counter()
    for note in history.of("row", "body", "delivers"):
        given = note.details
        call = given.get("call", "")
        if note.what == "delivers":
            late = call in reported.values()
            if not (given.get("again") or given["begun"] or given["copy"]):
                firsts[call] += 1 + late
            elif not given.get("again") and given.get("met") is not None:
                copies[call] += 1 + late
            again.add(call)
        elif note.what == "body":
            known = max(firsts[call], copies[call]) < 2
            if reported.get(given["key"]) == call and call in again and known:
                yield Violation("what is reported does not run", note, "its caller has its failure")
        elif (row := given["new"]) is None or not _ran(given["old"]):
            if row is None or not _ran(row) or reported.get(row.key) != row.call:
                reported.pop(given["key"], None)
        elif not _ran(row):
            reported.pop(row.key, None)
            waits = row.state in (State.COOLING, State.PENDING) and not row.resumes
            if waits and row.ended == Ended.FAILED:
                reported[row.key] = row.call
                again.discard(row.call)


def what_may_have_been_done_is_not_repeated(history: History) -> Iterator[Violation]:
    """After a failure that does not show what its body has done, the call does not run again by
    itself.
    """
    ambiguous = _tokens(history, "timeout")
    for note in history.of("row"):
        old, new = note.details["old"], note.details["new"]
        if not _ran(old) or new is None or new.owner not in ambiguous:
            continue
        if new.ended == Ended.FAILED and new.resumes:
            yield Violation("what may have been done is not repeated", note, "the call resumes")


@of_each_generation
def what_keeps_failing_ends(history: History) -> Iterator[Violation]:
    """A key does not cool down after the last failure that it may have."""
    asked = _tokens(history, "cooldown", "error")
    failures: defaultdict[str, int] = defaultdict(int)
    for note in history.of("row"):
        given = note.details
        old, new = given["old"], given["new"]
        if new is None or new.state == State.RUNNING or new.task in (*SEVERAL_RUNS, "queued"):
            continue
        if new.state == State.DONE:
            failures.pop(new.key, None)
        elif old is not None and old.state == State.RUNNING and new.owner in asked:
            failures[new.key] += new.state == State.COOLING
            if failures[new.key] >= FAILURES:
                yield Violation("what keeps failing ends", note, f"failure {failures[new.key]}")


@of_each_generation
def only_own_failures_count(history: History) -> Iterator[Violation]:
    """A key fails for good only after so many failures of its own; those of its group, or of what
    it depends on, are none.
    """
    others = _tokens(history, "rejects", "closes")
    failures: Counter[str] = Counter()
    for note in history.of("row"):
        old, new = note.details["old"], note.details["new"]
        if not _ran(old) or new is None or new.ended != Ended.FAILED:
            continue
        failures[new.key] += new.owner not in others
        too_many = (new.state, new.reason) == (State.FAILED, Reason.TOO_MANY_FAILURES)
        if too_many and failures[new.key] < FAILURES:
            yield Violation("only own failures count", note, f"{failures[new.key]} failures")


@of_each_generation
def retries_are_limited(history: History) -> Iterator[Violation]:
    """After so many quick retries in a row a call cools down."""
    asked = _tokens(history, "retry")
    retried: Counter[tuple[str, str]] = Counter()
    for note in history.of("row"):
        given = note.details
        old, new = given["old"], given["new"]
        if new is None or new.state in RESTS:
            retried = Counter({work: n for work, n in retried.items() if work[0] != given["key"]})
        elif _ran(old) and new.owner in asked and new.ended == Ended.FAILED:
            asked.discard(new.owner)
            retried[new.key, new.call] += 1
            if retried[new.key, new.call] > RETRIES:
                yield Violation("retries are limited", note, "its call does not cool down")


@of_each_generation
def what_keeps_crashing_ends(history: History) -> Iterator[Violation]:
    """No body begins after so many others in a row whose processes died, or after three times as
    many once the lease store has lost leases: then their processes may have lived. If each call
    runs, those of its call count. An attempt from which an operator has taken the key does not
    count, nor does one that has snoozed, and saved progress begins the count again.
    """
    running: dict[str, tuple[tuple[str, str], str]] = {}
    dead: set[str] = set()
    crashes: Counter[tuple[str, str]] = Counter()
    works: set[str] = set()
    lost = min((note.at for note in history.of("emptied", "evicted")), default=math.inf)
    for note in history.of("row", "body", "body ended", "killed", "released", "saves", "item"):
        given = note.details
        if (anew := _counted_anew(note, works)) is not None:
            crashes.pop(anew, None)
        if note.what == "item":
            works.add(given["token"])
        elif note.what == "released":
            running = {token: its for token, its in running.items() if its[0][0] != given["key"]}
        elif note.what == "row":
            old, new = given["old"], given["new"]
            if _ran(old) and new and new.ended == Ended.RELEASED and old.owner in dead:
                crashes[_counted_together(old.key, old.call)] -= 1
            elif _ran(old) and new and new.owner != old.owner:
                running.pop(old.owner, None)  # it lives, and was counted: perhaps before others
        elif note.what == "killed":
            gone = {token for token, (_, its) in running.items() if its == given["process"]}
            crashes.update(running.pop(token)[0] for token in gone)
            dead |= gone
        elif note.what == "body ended":
            running.pop(given["token"], None)
        elif note.what == "body" and not _counts_otherwise(given["key"]):
            work = _counted_together(given["key"], given["call"])
            # Or it did not say that it has lost nothing.
            sure = note.at < lost and not history.faults(given["process"], note.at - TTL, note.at)
            most = CRASHES if sure else 3 * CRASHES
            if crashes[work] >= most:
                yield Violation("what keeps crashing ends", note, f"{crashes[work]} crashes")
            running[given["token"]] = work, given["process"]


def _counts_otherwise(key: str) -> bool:
    """Whether effects, or another call of the queue, end the count of a key."""
    return "charged" in key or key.startswith("queued ")


def _counted_anew(note: Note, works: Container[str]) -> tuple[str, str] | None:
    """The calls whose crashes are no longer in a row: a body has ended otherwise, or saved its
    progress or which items it has done; or Celery has ended another delivery of the call, so the
    next one may run.
    """
    given = note.details
    if note.what == "saves" or (note.what == "body ended" and given["ending"] != "snooze"):
        return _counted_together(given["key"], given["call"])
    old, new = given.get("old"), given.get("new")
    if old is None or new is None or not _ran(old):
        return None
    saved = _ran(new) and old.owner == new.owner and old.owner in works
    ends = saved or new.ended == Ended.TERMINATED
    return _counted_together(old.key, old.call) if ends else None


def _counted_together(key: str, call: str) -> tuple[str, str]:
    """Names the calls whose crashes are counted together."""
    return key, call if key.partition(" ")[0] in SEVERAL_RUNS else ""


@of_each_generation
def only_crashes_count(history: History) -> Iterator[Violation]:
    """A key fails because of crashes only after so many attempts that have died, or of which
    nothing was heard since another one has taken the row over; what is heard later counts too.
    """
    if any(note.details.get("server") == "database" for note in history.of("refused", *SLOW)):
        return
    silent: dict[tuple[str, int], str] = {}
    died: Counter[str] = Counter()

    def too_early(row: Row, note: Note | None) -> Iterator[Violation]:
        crashes = died[row.key] + sum(key == row.key for key, _ in silent)
        if (row.state, row.reason) == (State.FAILED, "crash_loop") and crashes < CRASHES:
            yield Violation("only crashes count", note, f"{crashes} crashes: {row}")

    for note in history.of("row", "killed", "event OutcomeRefused"):
        given = note.details
        if note.what == "event OutcomeRefused":
            silent.pop((named(given["task"], given["key"]), given["fence"]), None)
        elif note.what == "killed":
            dead = [each for each, pid in silent.items() if pid == f"{given['pid']:x}"]
            died.update(key for key, _ in dead)
            silent = {each: pid for each, pid in silent.items() if each not in dead}
        elif (row := given["new"]) is not None:
            process = row.owner.rpartition("-")[2]
            if row.state == State.RUNNING:
                silent[row.key, row.fence] = process
            elif process == f"{given['pid']:x}":
                silent.pop((row.key, row.fence), None)
                died[row.key] += row.ended == Ended.TERMINATED  # by a time limit
                more = row.crashes - given["old"].crashes if given["old"] is not None else 0
                if more > 0 and disturbed(history, given["by"], note.at):
                    died[row.key] += more  # it has read the row before it stood still
            yield from too_early(row, note)
    for row in history.final["rows"]:
        yield from too_early(row, None)


@dataclass
class Left:
    """An attempt, and what became of its call since."""

    owner: str
    process: str
    #: No other message of the call was in a worker, or on its way.
    alone: bool
    rescheduled: int = 0
    delivered: int = 0
    sure: bool = True

    def reschedules(self, given: Mapping[str, Any], *, has_begun: bool) -> None:
        """Its call is rescheduled: by itself, if it has not begun, or says why afterwards."""
        own = not has_begun or "could not be written" in given["reason"]
        self.rescheduled += 1
        self.sure &= own and given["confirmed"] and given["by"] == self.process

    def is_left_to_its_copy(self) -> bool:
        """Whether the message that comes now is the only one."""
        return self.alone and self.sure and (self.rescheduled, self.delivered) == (1, 1)


def what_a_copy_names_is_no_crash(history: History) -> Iterator[Violation]:
    """An attempt that could not begin its body or not write its outcome, whose process lives, and
    that has published its message again, does not count as a crash once that copy runs.
    """
    left: dict[str, Left] = {}
    waiting: Counter[str] = Counter()
    on_its_way: Counter[str] = Counter()
    begun: set[str] = set()
    seen: set[tuple[str, str]] = set()
    for note in history.of("row", "body", "delivers", "tries", "killed", *RESCHEDULED):
        given, call = note.details, note.details.get("call") or note.details.get("call_id", "")
        its = left.get(call)
        if note.what == "body":
            begun.add(given["token"])
        elif note.what == "killed":
            gone = f"-{given['pid']:x}"
            left = {call: each for call, each in left.items() if not each.owner.endswith(gone)}
        elif note.what == "delivers":
            waiting[call] += 1
            on_its_way[call] -= bool(given["copy"]) and (call, given["copy"]) not in seen
            if its is not None:
                its.delivered += 1
                its.sure &= not given.get("again") and (call, given["copy"]) not in seen
            seen.add((call, given["copy"]))
        elif note.what == "tries":
            waiting[call] -= 1
        elif note.what in RESCHEDULED:
            on_its_way[call] += 1
            if its is not None:
                its.reschedules(given, has_begun=its.owner in begun)
        elif _ran(new := given["new"]):
            old = given["old"]
            if old is not None and old.owner == new.owner:
                continue
            its, counts = left.get(new.call), _ran(old) and new.crashes > old.crashes
            if counts and its and its.owner == old.owner and its.is_left_to_its_copy():
                yield Violation("what a copy names is no crash", note, f"{old.owner} lives")
            alone = waiting[new.call] <= 0 and on_its_way[new.call] <= 0
            left[new.call] = Left(new.owner, given["by"], alone)


@of_each_generation
def crashes_are_not_forgotten(history: History) -> Iterator[Violation]:
    """If several calls of a key run, another call's claim or outcome does not change for how many
    crashes in a row a call counts, until it has ended because of them.
    """
    over: set[tuple[str, str]] = set()
    for note in history.of("row"):
        old, new = note.details["old"], note.details["new"]
        if old is None or new is None or new.task not in SEVERAL_RUNS or not new.owner:
            continue
        over |= {(new.key, call) for call, each in old.crashes_of.items() if each >= CRASHES}
        if (old.state, old.owner) == (new.state, new.owner):
            continue  # a suspicion that was taken back
        for call, crashes in old.crashes_of.items():
            if call in (old.call, new.call) or (new.key, call) in over:
                continue  # a call that has ended is forgotten in time
            if new.crashes_of.get(call, 0) < crashes:
                yield Violation("crashes are not forgotten", note, f"those of {call} are")


def ends_are_kept(history: History) -> Iterator[Violation]:
    """A record says how its last attempts ended, whatever becomes of their calls; what was only a
    suspicion is corrected, and a hard limit may end an attempt that is being interrupted. A process
    that is disturbed between its read of a row and its write may not see such a correction.
    """
    corrected = (Ended.ABANDONED, Ended.INTERRUPTED)
    for note in history.of("row"):
        old, new = note.details["old"], note.details["new"]
        if old is None or new is None or _is_over(old, note.at) or len(old.ends) >= HISTORY_MAX:
            continue
        later = (*new.ends, *(None for _ in old.ends))
        for before, after in zip(old.ends, later, strict=False):
            if after == before or before in corrected:
                continue
            by = note.details["by"]
            if after != Ended.ABANDONED or not history.faults(by, note.at - TTL, note.at):
                yield Violation("how an attempt ended is kept", note, f"{before} is {after} now")


def suspicions_are_taken_back(history: History) -> Iterator[Violation]:
    """An attempt that is heard of after the next one has taken its row over counts as a crash no
    more, unless the crashes in a row have ended since.
    """
    least: dict[tuple[str, int], int] = {}
    written: dict[str, Note] = {}
    for note in history.of("row", "event OutcomeRefused"):
        given = note.details
        if note.what == "row":
            old, new = given["old"], given["new"]
            if old is None or new is None:
                continue
            for work, crashes in least.items():
                if work[0] == new.key:
                    least[work] = min(crashes, old.crashes)
            if old.state == State.RUNNING == new.state and old.owner != new.owner:
                least[new.key, old.fence] = new.crashes
            elif old.owner == new.owner and given["by"].partition("/")[2] not in ("", "main"):
                written[new.key] = note
            continue
        if not given.get("was_suspected") or given["task"] in SEVERAL_RUNS:
            continue
        key = f"{given['task']} {given['key']}"
        if least.get((key, given["fence"]), 0) < 1 or key not in written:
            continue
        last = written[key].details
        if 0 < (crashes := last["new"].crashes) == last["old"].crashes:
            yield Violation("only crashes count", note, f"{crashes} still count")


def deliveries_are_handled_once(history: History) -> Iterator[Violation]:
    """A worker begins a delivery once, and ends none that another worker has."""
    for note in history.of("begins twice"):
        yield Violation("a delivery is handled once", note, "the worker has begun it before")
    for note in history.of("acknowledges for another", "returns for another"):
        yield Violation("a delivery is handled once", note, "another worker has the message")


def what_has_begun_does_not_expire(history: History) -> Iterator[Violation]:
    """A call that has begun is not revoked because it expires. A message that is delivered a second
    time does not say that its call has begun.
    """
    ended = {note.details["call"] for note in history.of(*ENDED_BY_CELERY)}
    delivered: Counter[tuple[str, str]] = Counter()
    for note in history.of("delivers"):
        delivered[note.details["call"], note.details.get("copy", "")] += not note.details["begun"]
    ended |= {call for (call, _), times in delivered.items() if times > 1}
    for body in history.bodies:
        call = body.began.details["call"]
        if history.final["answers"].get(call) == "REVOKED" and call not in ended:
            yield Violation("what has begun does not expire", body.began, "it was revoked")


def what_is_done_does_not_expire(history: History) -> Iterator[Violation]:
    """A message that comes again after its call was done, and that has expired since, is not taken
    for one that came too late, as long as the record knows the call.
    """
    done: defaultdict[str, list[str]] = defaultdict(list)
    for note in history.of("row", "event CallDropped"):
        given = note.details
        if note.what == "row":
            row = given["new"]
            if row is None:
                done.pop(given["key"], None)
            elif row.state == State.DONE and row.call not in done[row.key]:
                done[row.key].append(row.call)
        elif given["reason"] == Dropped.EXPIRED:
            key = named(given["task"], given["key"])
            late = disturbed(history, given["by"], note.at)
            if given["call_id"] in done[key][-FINISHED_CALLS_MAX:] and not late:
                yield Violation("what is done does not expire", note, "it is done")


def progress_is_given(history: History) -> Iterator[Violation]:
    """A body gets the progress that was saved last, also if an attempt has died since. It may be a
    value whose save was not confirmed.
    """
    saved: dict[str, Any] = {}
    sent: defaultdict[str, list[Any]] = defaultdict(list)
    for note in history.of("goes on", "saves", "saved"):
        key, value = note.details["key"], note.details["value"]
        if note.what == "saves":
            sent[key].append(value)
            continue
        if note.what == "goes on" and value not in (saved.get(key), *sent[key]):
            yield Violation("progress is given", note, f"{saved.get(key)} was saved")
        saved[key] = value
        sent[key].clear()


def leases_end_that_are_not_renewed(history: History) -> Iterator[Violation]:
    """With ``lease_renew=False`` a body has lost its lease, or has ended, when the ttl is over,
    unless it has made the lease longer, or its process stands still.
    """
    longer = {note.details["token"] for note in history.of("extends", "item")}
    for body in history.bodies:
        over = body.began.at + TTL + SLACK
        if body.task != "unrenewed" or body.token in longer or min(body.ended, body.lost) <= over:
            continue
        if not disturbed(history, body.process, over):
            yield Violation("a lease ends that is not renewed", body.began, "it has it for longer")


@of_each_generation
def items_are_done_once(history: History) -> Iterator[Violation]:
    """A loop goes on where it was interrupted, if its process has lived: only the item in progress
    is repeated.
    """
    reached: dict[str, tuple[str, int]] = {}
    accepted: set[str] = set()
    for note in history.of("item", "row"):
        given = note.details
        if note.what == "row":
            old, new = given["old"], given["new"]
            ended = old and new and old.state == State.RUNNING != new.state
            if ended and new.ended not in ("crashed", "terminated", "released"):
                accepted.add(old.owner)
            continue
        key, token, item = given["key"], given["token"], given["item"]
        if key.partition(" ")[0] in SEVERAL_RUNS:
            continue  # each call begins its loops anew
        before, last = reached.get(key, ("", 0))
        if before in accepted and token != before and item < last:
            yield Violation("items are done once", note, f"item {last} was in progress")
        reached[key] = token, item


def celery_ends_one_call(history: History) -> Iterator[Violation]:
    """The row of a waiting call says that it was terminated only if Celery has ended that call."""
    ended = {note.details["call"] for note in history.of(*ENDED_BY_CELERY)}
    ended |= {note.details["call"] for note in history.of("calls") if "expires" in note.details}
    for note in history.of("row"):
        old, new = note.details["old"], note.details["new"]
        if old is None or new is None or old.state == State.RUNNING or old.ended == new.ended:
            continue
        if new.ended == "terminated" and new.call not in ended:
            yield Violation("Celery ends one call", note, f"{new.call} goes on")


def waits_for_the_lease(history: History) -> Iterator[Violation]:
    """A call that waits for a held key looks again when the lease ends, if it is not renewed, and
    if the clock of the lease store does not step.
    """
    extended = max((note.details["seconds"] for note in history.of("extends")), default=0.0)
    for note in history.of("event CallRescheduled", "clock"):
        given = note.details
        if note.what == "clock":
            return
        longest = max(extended, ttl_of(named(given["task"], given["key"]))) + 0.51
        if given["reason"] == Dropped.HELD_BY_OTHER.words and given["delay"] > longest:
            yield Violation("a call waits for the lease", note, f"for more than {longest} s")


def only_busy_keys_refuse(history: History) -> Iterator[Violation]:
    """A call is refused or dropped because another call holds its key only if its task says so, and
    if another call has run a moment before, or before a process stood still.
    """
    kinds = {"strict": "refused", "lazy": "dropped"}
    stood = [(its.at, its.at + its.details["span"]) for its in history.of("paused", "host paused")]
    running: dict[str, tuple[str, float]] = {}
    for note in history.of("row", "event CallDropped", "event CallRefused"):
        given = note.details
        if note.what == "row":
            row, old = given["new"], given["old"]
            if _ran(old) and not _ran(row):
                running[old.key] = old.call, note.at
            elif _ran(row):
                running[row.key] = row.call, math.inf
        elif (how := _refused_as_held(note)) is not None:
            promise, call = "only a busy key refuses", given["call_id"]
            other, until = running.get(f"{given['task']} {given['key']}", ("", -math.inf))
            if kinds.get(given["task"]) != how:
                yield Violation(promise, note, f"{given['task']} does not say that")
            elif (other == call or until < note.at - 10.0) and not any(
                at < until + 10.0 and note.at < end + SLACK for at, end in stood
            ):
                yield Violation(promise, note, "no other call runs")


def what_has_failed_keeps_no_key(history: History) -> Iterator[Violation]:
    """A call is not refused for its arguments once the caller of the call before has its failure.
    A process that is slow, or stood still, may have read the row before.
    """
    slow = [(its.at, its.at + its.details.get("span", 0.0)) for its in history.of(*STOOD, *SLOW)]
    failed: dict[str, float] = {}
    for note in history.of("row", "event CallRefused"):
        given = note.details
        if note.what == "row":
            row = given["new"]
            failed.pop(given["key"], None)
            if row is not None and _is_stopped(row) and row.ended in CALLER_HAS_FAILURE:
                failed[row.key] = note.at
        elif " with other arguments" in given["error"]:
            since = failed.get(f"{given['task']} {given['key']}", math.inf) + 2.0
            if since < note.at and not any(at < note.at and since < end + 4.0 for at, end in slow):
                why = f"the call before has failed at {since - 2.0:.3f}"
                yield Violation("what has failed keeps no key", note, why)


@of_each_generation
def other_arguments_wait_for_the_failure(history: History) -> Iterator[Violation]:
    """A call with other arguments gets a key only after the caller of the call before has its
    failure, and that does not run again by itself; or after an operator has taken the key.
    """
    for note in history.of("row"):
        old, new = note.details["old"], note.details["new"]
        if new is None or new.task != COMPARED or not _ran(new) or old is None:
            continue
        if old.call not in ("", new.call) and not (
            _is_stopped(old) and old.ended in (*CALLER_HAS_FAILURE, Ended.RELEASED)
        ):
            why = f"it was that of {old.call}: {old}"
            yield Violation("other arguments wait for the failure", note, why)


def _is_stopped(row: Row) -> bool:
    """Whether the call of a key that waits does not run again by itself."""
    return row.state in (State.PENDING, State.COOLING) and not row.resumes


def what_has_begun_is_not_refused(history: History) -> Iterator[Violation]:
    """A call that has begun is not refused or dropped because another call holds its key, or
    because that cools down. A message that is delivered a second time does not say that its call
    has begun.
    """
    begun: set[str] = set()
    unaware: Counter[tuple[str, str]] = Counter()
    for note in history.of("body", "delivers", "event CallDropped", "event CallRefused"):
        given = note.details
        if note.what == "body":
            begun.add(given["call"])
        elif note.what == "delivers":
            message = given["call"], given.get("copy", "")
            unaware[message] += not given["begun"]
            if unaware[message] > 1:
                unaware[given["call"], "twice"] = 1
        elif (
            given["call_id"] in begun
            and not unaware[given["call_id"], "twice"]
            and (_refused_as_held(note) or _refused_as_cooling(note))
        ):
            yield Violation("what has begun is not refused", note, "the call has begun")


def _refused_as_held(note: Note) -> str | None:
    if note.what == "event CallDropped":
        return "dropped" if note.details["reason"] == Dropped.HELD_BY_OTHER else None
    return "refused" if " is held by call " in note.details["error"] else None


def _refused_as_cooling(note: Note) -> bool:
    if note.what == "event CallDropped":
        return bool(note.details["reason"] == Dropped.COOLING)
    return str(note.details["error"]).startswith("Retry available in ")


def group_holds(history: History) -> Iterator[Violation]:
    """No attempt gets a slot while a failure has closed the group; then one gets the only slot."""
    for group, limit in LIMITS.items():
        yield from _group_holds(history, group, limit)


def _group_holds(history: History, group: str, limit: float) -> Iterator[Violation]:
    held: dict[str, float] = {}
    known: set[str] = set()
    until, probe = None, ""
    for note in history.of("group", "emptied", "clock"):
        given = note.details
        if note.what != "group":
            held, until, probe = {}, None, ""
            continue
        if given["group"] != group:
            continue
        new = {token: ends for token, ends in given["held"].items() if ends > note.at}
        held = {token: ends for token, ends in held.items() if ends > note.at}
        for token in new.keys() - known:
            if until is not None and note.at < until:
                yield Violation("a closed group holds", note, f"{token} begins")
            elif until is not None and probe in held:
                yield Violation("a closed group holds", note, f"{token} probes beside {probe}")
            elif len(held) >= limit:
                yield Violation("a limit holds", note, f"{len(held)} others have slots")
            probe = token
        known |= new.keys()
        held, until = new, given["closed_until"]
        if until is None:
            probe = ""


def holders_keep_their_rows(history: History) -> Iterator[Violation]:
    """No attempt takes over the row of a body that runs while its lease lasts, unless the lease
    store has lost that, or, while the claim was on its way, the lease of the attempt.
    """
    running: set[str] = set()
    lost: dict[str | None, float] = {}
    until: dict[str, float] = {}
    for note in history.of(
        *("row", "holds", "body", "body ended", "killed", "emptied", "evicted", "clock"),
    ):
        given = note.details
        if note.what == "holds":
            until[given["token"]] = given["store_until"]
        elif note.what == "body":
            running.add(given["token"])
        elif note.what == "body ended":
            running.discard(given["token"])
        elif note.what == "killed":
            running = {each for each in running if not each.endswith(f"-{given.get('pid', 0):x}")}
        elif note.what != "row":
            until.clear()
            lost[given.get("key")] = note.at
        elif _ran(given["old"]) and _ran(given["new"]):
            holder, lasts = given["old"].owner, until.get(given["old"].owner, 0.0) > note.at
            own = max(lost.get(given["key"], -math.inf), lost.get(None, -math.inf))
            on_its_way = note.at - own < ttl_of(given["key"])
            if given["new"].owner != holder in running and lasts and not on_its_way:
                yield Violation("a holder keeps its row", note, f"{holder} has its lease")


def takeovers_wait_for_the_database(history: History) -> Iterator[Violation]:
    """With database leases, a running row is taken over only once the database has answered for 3 s
    since it was silent, so that a live holder, whose renewals failed, writes first. Shorter gaps
    than a process must notice do not count, nor does the write of a claim that had found the row
    without a lease before. A call takes what it has left itself.
    """
    silences = _silences(history)
    prior: defaultdict[str, set[str]] = defaultdict(set)
    for note in history.of("row", "delivers"):
        given = note.details
        if note.what == "delivers":
            prior[given["call"]].update(given.get("prior", ()))
            continue
        old, new = given["old"], given["new"]
        if not (_ran(old) and _ran(new)) or old.lease_until is None or old.owner == new.owner:
            continue
        if old.owner in prior[new.call]:
            continue
        host, unnoticed = given["by"].partition("/")[0], LONGEST_GAP + ttl_of(old.key) / 3 + SLACK
        for silence in silences:
            answered = note.at - silence.ended
            if (
                silence.host in ("", host)
                and silence.began < note.at
                and (silence.began < old.lease_until or not _was_late(history, note))
                and silence.ended - silence.began > unnoticed
                and 0 <= answered < ANSWERED_FOR * (1 - CLOCK_ERROR)
            ):
                why = f"the database answers since {answered:.3f} s, at {silence.ended:.4f}"
                yield Violation("a takeover waits for the database", note, why)
                break


def _was_late(history: History, write: Note) -> bool:
    """Whether the database executed this write of a claim later than it got it."""
    late = (
        fault.at + fault.details.get("late", fault.details["span"])
        for fault in history.faults(write.details["by"], -math.inf, write.at)
        if fault.what in ("late request", "slow request") and fault.details["op"] == "claim"
    )
    return any(math.isclose(at, write.at, abs_tol=1e-6) for at in late)


class Silence(NamedTuple):
    """The database executed nothing, or only not for *host*."""

    began: float
    ended: float
    host: str


def _silences(history: History) -> list[Silence]:
    """When the database was down, frozen, or cut from a host."""
    found: list[Silence] = []
    began: dict[str, float] = {}
    healed = next((note.at for note in history.of("healed")), math.inf)
    for note in history.of("down", "up", "frozen", "cut", "mended", "healed"):
        host = note.details.get("host", "")
        if note.what == "healed":
            found += [Silence(since, note.at, of) for of, since in began.items()]
            began.clear()
        elif note.details["server"] != "database":
            continue
        elif note.what == "frozen":
            found.append(Silence(note.at, min(note.at + note.details["span"], healed), ""))
        elif note.what in ("down", "cut"):
            began.setdefault(host, note.at)
        elif host in began:
            found.append(Silence(began.pop(host), note.at, host))
    return found


def probes_are_alone(history: History) -> Iterator[Violation]:
    """After the time for which a failure has closed a group, no body begins beside another one that
    began after that time, until the group is open.
    """
    bodies = {body.token: body for body in history.bodies}
    names = {task: str(group.name) for task, group in GROUPS.items()}
    until: dict[str, float | None] = {}
    probes: defaultdict[str, list[Body]] = defaultdict(list)
    for note in history.of("group", "body", "emptied"):
        given = note.details
        if note.what == "emptied":
            until.clear()
            probes.clear()
        elif note.what == "group":
            if given["closed_until"] is None:
                probes.pop(given["group"], None)
            until[given["group"]] = given["closed_until"]
        elif (
            ends := until.get(group := names.get(given["key"].partition(" ")[0], ""))
        ) is not None:
            if note.at < ends + SLACK:
                continue  # it may have got its lease before the failure
            for other in probes[group]:
                if other.ended > note.at + SLACK and not may_overlap(history, other, note.at):
                    yield Violation("a probe is alone", note, f"beside {other.token}")
            probes[group].append(bodies[given["token"]])


def closings_are_not_shortened(history: History) -> Iterator[Violation]:
    """A failure that would close a closed group for a shorter time changes nothing."""
    until: dict[str, float] = {}
    for note in history.of("group", "emptied", "clock"):
        given = note.details
        if note.what != "group":
            until.clear()
            continue
        ends = given["closed_until"]
        if ends is not None and ends < until.get(given["group"], ends) - 0.01:
            yield Violation("a closing is not shortened", note, f"from {until[given['group']]:.3f}")
        until[given["group"]] = -math.inf if ends is None else ends


def what_proves_nothing_opens_no_group(history: History) -> Iterator[Violation]:
    """A probe whose call runs again within moments does not open its group: it was retried,
    snoozed or interrupted. The next call is the probe.
    """
    again: set[str] = set()
    before: dict[str, dict[str, Any]] = {}
    for note in history.of("group", "row", "emptied", "clock"):
        given = note.details
        if note.what == "row":
            new = given["new"]
            if _ran(given["old"]) and new is not None and new.state == State.PENDING:
                again.add(new.owner)
            continue
        if note.what != "group":
            before.clear()
            continue
        old, before[given["group"]] = before.get(given["group"], given), given
        opens = given["closed_until"] is None and old["closed_until"] is not None
        if opens and old["alone"] in again:
            why = f"{old['alone']} has proven nothing"
            yield Violation("what proves nothing opens no group", note, why)


def closings_grow(history: History) -> Iterator[Violation]:
    """A probe that is rejected closes its group for twice as long as the closing before it, up to a
    longest time; the failures of other bodies do not count. Until the group is open again, the
    number of closings in a row is unknown if its store has lost data, or if nobody knows whether
    the probe still had its slot.
    """
    rejected = _tokens(history, "rejects")
    ended = {body.token: body.ended for body in history.bodies}
    is_open = {"closed_until": None, "held": {}, "alone": ""}
    before: dict[str, dict[str, Any] | None] = dict.fromkeys(LIMITS, is_open)
    closings: dict[str, int | None] = {}
    for note in history.of("group", "emptied", "clock"):
        given = note.details
        if note.what == "clock":
            return
        if note.what == "emptied":
            before = dict.fromkeys(LIMITS)
            closings = {}
            continue
        group, until = given["group"], given["closed_until"]
        old, before[group] = before[group], given
        if old is None or until in (None, old["closed_until"]):
            continue
        if old["closed_until"] is None:
            closings[group] = 1
            continue
        probe = old["alone"]
        end, slot = ended.get(probe, note.at), old["held"].get(probe, 0.0)
        if old["closed_until"] > note.at or probe in given["held"] or slot <= end:
            continue  # another body has failed
        number = closings.get(group)
        if number is None or old["closed_until"] > end or note.at >= slot:
            closings[group] = None
            continue
        closings[group] = number = number + 1
        if probe not in rejected:
            continue
        lasts = min(CLOSED_FOR * 2.0 ** (number - 1), LONGEST_CLOSED)
        if not end + lasts - 0.01 <= until <= note.at + lasts + 0.01:
            why = f"closing {number} in a row ends at {until:.3f}, not {lasts:g} s later"
            yield Violation("a closing grows", note, why)


@of_each_generation
def without_faults_nothing_runs_twice(history: History) -> Iterator[Violation]:
    """If nothing goes wrong for an attempt, what its body has returned is the outcome, so no other
    body begins: for the key, or for the call if there are several runs, while the record lists it.
    """
    bodies = {body.token: body for body in history.bodies}
    closed: dict[str, float] = {}
    done: defaultdict[str, list[str]] = defaultdict(list)
    returned: dict[tuple[str, str], Body] = {}
    for note in history.of("row", "body", "body ended"):
        given = note.details
        if note.what == "row":
            old, new = given["old"], given["new"]
            if old and old.state == State.RUNNING and (not new or str(old) != str(new)):
                closed.setdefault(old.owner, note.at)
                if new is not None and new.state == State.DONE:
                    done[new.key].append(new.call)
            continue
        key = given["key"]
        work = (key, given.get("call", "") if key.partition(" ")[0] in SEVERAL_RUNS else "")
        if note.what == "body" and (first := returned.get(work)) is not None:
            until = closed.get(first.token, note.at)
            call, others = given.get("call"), done[key][-FINISHED_CALLS_MAX:]
            if call in done[key] and call not in others:
                continue
            if first.task == "unrenewed" and first.ended > first.began.at + TTL / 2:
                continue  # its lease ended, and it was not interrupted
            if not history.faults(first.process, first.began.at - ttl_of(key), until):
                why = f"{first.token} has returned before"
                yield Violation("without faults nothing runs twice", note, why)
        elif given.get("ending") == "return":
            returned[work] = bodies[given["token"]]


def without_faults_no_lease_is_lost(history: History) -> Iterator[Violation]:
    """A lease is lost only through a fault; one refused renewal is none, because it is repeated.

    A lease is given up too when it is not renewed, or its body has taken longer than its time limit
    allows, and seems to be lost when the outcome is written, and another call has the row before
    its reply comes.
    """
    written: set[str] = set()
    ended = {body.token: body.ended for body in history.bodies}
    lasts = {"timed": TIME_LIMIT, "unrenewed": TTL / 2}
    limits = {
        body.token: body.began.at + lasts[body.task]
        for body in history.bodies
        if body.task in lasts
    }
    for note in history.of("lost", "row"):
        if note.what == "row":
            old, new = note.details["old"], note.details["new"]
            if _ran(old) and new is not None and not _ran(new) and new.owner == old.owner:
                written.add(old.owner)
            continue
        if note.at >= limits.get(note.details["token"], math.inf):
            continue
        if note.details["token"] in written:
            continue
        # The outcome may be on its way for longer, and ends the lease before its reply comes.
        after = min(note.at, ended.get(note.details["token"], math.inf))
        after -= ttl_of(note.details["key"]) + 2.0  # a renewal may take as long
        faults = history.faults(note.details["process"], after, note.at)
        if not faults or [fault.what for fault in faults] == ["refused"]:
            yield Violation("without faults no lease is lost", note, f"after {faults}")


def effect_is_stored(history: History) -> Iterator[Violation]:
    """When a body gets the reply of an effect, the database has it, unless the row of its attempt
    was deleted meanwhile, or the effect was purged.
    """
    deleted: dict[str, int] = {}
    executed: dict[tuple[str, str, int], float] = {}
    for note in history.of("charged", "has charged", "row"):
        given = note.details
        effect = given["key"], given.get("call", ""), given.get("part", 0)
        if note.what == "row":
            if given["new"] is None:
                deleted[given["key"]] = given["old"].fence
        elif note.what == "charged":
            executed[effect] = note.at
        elif (
            given["state"] != "done"
            and given.get("fence", 1) > deleted.get(given["key"], 0)
            and not _may_be_purged(history, given, executed.get(effect, note.at), note.at)
        ):
            yield Violation("the reply of an effect is stored", note, "no later attempt knows it")


def body_begins_under_its_lease(history: History) -> Iterator[Violation]:
    """When a body begins, or makes the call of an effect, its process counts on its lease, and the
    store still knows it, also after a pause: the process has just looked at its clock.
    """
    counted: dict[str, float] = {}
    for note in history.of("holds", "body", "charges"):
        given = note.details
        if note.what == "holds":
            counted[given["token"]] = given["until"]
            continue
        until, own = given.get("store_until", math.inf), counted.get(given["token"], math.inf)
        faults = history.faults(given["process"], note.at - ttl_of(given["key"]), note.at)
        lost = ("emptied", "evicted", "clock", "released")
        excused = any(fault.what in lost for fault in faults)
        lapsed = until is None or until < note.at
        if (lapsed and not excused) or own < note.at:
            promise = "a body begins" if note.what == "body" else "an effect is called"
            why = f"the lease ended at {until}, for its holder at {own:.4f}"
            yield Violation(f"{promise} under its lease", note, why)


def nothing_lost(history: History) -> Iterator[Violation]:
    """In the end each confirmed call has an answer, and each key rests, unless Celery has ended the
    call. Celery writes that it retries a call after it has published it, perhaps after the end of
    what it has published, if its process was slow. So it may do after the end of another copy, and
    after another worker has revoked the call because a second copy of its message had expired. A
    key that failed because of crashes waits for its next call once one of them was none.
    """
    retried = {
        note.details["call"]
        for note in history.of("body ended")
        if note.details.get("ending") == "self.retry"
        and history.faults(note.details["process"], note.at - TTL, note.at + 60.0)
    }
    retried |= {
        note.details["call_id"]
        for note in history.of("event CallDropped")
        if note.details["reason"] == Dropped.NO_RESULT and any(history.of(*FAULTS))
    }
    rows = _last_rows(history)
    withdrawn = {note.details["call"] for note in history.of(*ENDED_BY_CELERY)}
    dropped = _dropped_as_busy(history)
    expires = {note.details["call"] for note in history.of("calls") if "expires" in note.details}
    retried |= expires & {
        note.details["call_id"]
        for note in history.of("event CallDropped")
        if note.details["reason"] == Dropped.REVOKED
    }
    answers = history.final["answers"]
    lost = {note.details["call"] for note in history.of("message lost", "discarded")}
    failed, discarded = _failed_for_its_queue(history), _discarded(history)
    unreachable = _not_closed(history)
    unanswered = _ended_without_answer(history)
    excused = {
        "RETRY": withdrawn | retried | discarded | unanswered,
        None: dropped | discarded | unanswered,
    }
    gone = withdrawn | discarded | _returned_in_vain(history)
    gone |= {call for call in expires if answers.get(call) == "REVOKED"}
    lived = _failures_taken_back(history)
    gone |= dropped
    for note in history.of("published"):
        row, call = rows.get(note.details["key"]), note.details["call"]
        answer = answers.get(call)
        expired = answer == "REVOKED" and call in expires
        excepted = row is not None and (row.call in gone or row.owner in lived)
        if call in excused.get(answer, ()):
            continue  # so its caller gets no result
        if call in lost and answer in (None, "RETRY"):
            if row is not None and (row.state == State.DONE or row.ended == "crashed"):
                continue  # the message that would tell its caller
            if row is None or row.call != call:
                continue  # its record does not have its message: it had not begun
        if answer not in ("SUCCESS", "FAILURE", "REVOKED"):
            yield Violation("nothing is lost", note, f"the caller has no answer, but {answer}")
        elif expired or call in withdrawn or excepted:
            continue
        elif not _rests(row, call, failed) and not {call, row and row.call} & unreachable:
            yield Violation("nothing is lost", note, f"the row is {row}")
        elif (
            row is not None
            and row.state == State.COOLING
            and row.resumes
            and row.call not in unreachable
        ):
            yield Violation("nothing is lost", note, "the key waits for a call that does not come")
        elif answer == "REVOKED":
            yield Violation("nothing is lost", note, "nobody has revoked it")


def _ended_without_answer(history: History) -> set[str]:
    """The calls whose last attempt has ended so that Celery tells their caller nothing."""
    last: dict[str, tuple[int, str]] = {}
    for note in history.of("body ended"):
        given = note.details
        if given["ending"] != "interrupted":
            ends = given.get("fence", 0), given["ending"]
            last[given["call"]] = max(ends, last.get(given["call"], ends), key=lambda its: its[0])
    ended = {call for call, (_, ending) in last.items() if ending in ("ignore", "reject")}
    return ended | _returned_in_vain(history)


def _returned_in_vain(history: History) -> set[str]:
    """The calls whose body has returned their message, which the queue has discarded, or which
    another body of the call has rejected for good.
    """
    endings: defaultdict[str, set[str]] = defaultdict(set)
    for note in history.of("body ended"):
        endings[note.details["call"]].add(note.details.get("ending", ""))
    discarded = {note.details["call"] for note in history.of("discarded")}
    return {
        call
        for call, ended in endings.items()
        if "requeue" in ended and (call in discarded or "reject" in ended)
    }


def _dropped_as_busy(history: History) -> set[str]:
    """The calls that were dropped because another one had the key. If the message had come twice,
    the other delivery may have run later, and have died.
    """
    return {
        note.details["call_id"]
        for note in history.of("event CallDropped")
        if note.details["task"] == "lazy" and note.details["reason"] in BUSY
    }


def _failures_taken_back(history: History) -> set[str]:
    """The owners of rows that had failed because of crashes, of which one was none."""
    found: set[str] = set()
    for note in history.of("row"):
        old, new = note.details["old"], note.details["new"]
        failed = old is not None and (old.state, old.reason) == (State.FAILED, "crash_loop")
        if failed and new is not None and new.ended == Ended.LOST:
            found.add(new.owner)
    return found


def _discarded(history: History) -> set[str]:
    """The calls of messages that a quorum queue has discarded because of workers that died, or lost
    their connection, with them, and that no record has.
    """
    tasks = {note.details["call"]: note.details["task"] for note in history.of("published")}
    discarded = (
        note.details["call"] for note in history.of("discarded") if note.details["why"] != "reject"
    )
    return {call for call in discarded if tasks.get(call) not in OUTBOX_TASKS}


def _rests(row: Any, call: str, failed: set[str]) -> bool:
    """Whether a key rests; *failed*: calls that could not be rescheduled."""
    if row is None:
        return call in failed
    ended = row.call in failed and (_ran(row) or not row.resumes)
    ended |= row.ended in (Ended.REJECTED, Ended.RELEASED) and not row.resumes
    return ended or row.state in RESTS or _belongs_to_no_call(row)


def _not_closed(history: History) -> set[str]:
    """The calls that could not be rescheduled while the database did not answer either."""
    away = [
        its.at for its in history.of("refused", *SLOW) if its.details.get("server") == "database"
    ]
    return {
        note.details["call_id"]
        for note in history.of("event CallRefused")
        if "cannot be rescheduled" in note.details["error"]
        and any(0 <= note.at - at <= 10.0 for at in away)
    }


def _failed_for_its_queue(history: History) -> set[str]:
    """The calls that have failed because the broker took no copy, and a quorum queue would have
    discarded their message.
    """
    answers = history.final["answers"]
    used = {note.details["call"] for note in history.of("returned")} | _of_several_messages(history)
    return {call for call in used if answers.get(call) == "FAILURE"}


def _of_several_messages(history: History) -> set[str]:
    """The calls of which several messages may have been returned: a process counts the returns of
    all messages of a call together.
    """
    copied = any(history.of("copied", "delivered late"))
    again: defaultdict[str, set[str]] = defaultdict(set)
    for note in history.of("delivers"):
        if note.details.get("again"):
            again[note.details["call"]].add(note.details["copy"])
    return {call for call, copies in again.items() if copied or len(copies) > 1}


def _last_rows(history: History) -> dict[str, Row]:
    """The last row of each key, also if it was purged; that of a call that was done before its
    record expired is done, if Celery has perhaps dropped its message.
    """
    deleted = (note for note in history.of("row") if note.details["new"] is None)
    rows: dict[str, Row] = {note.details["key"]: note.details["old"] for note in deleted}
    rows |= {row.key: row for row in history.final["rows"]}
    for key, call in _done_before(history):
        if rows[key].call == call:
            rows[key] = replace(rows[key], state=State.DONE)
    return rows


def _done_before(history: History) -> set[tuple[str, str]]:
    """The calls, with their keys, that have an answer and run again, and whose process has perhaps
    died: then Celery drops the message, because the call has a result. They were done or refused
    before their record expired, or answered by another one, which another copy takes for older: if
    one of two calls has no order, their arrivals are compared, and copies may remember different
    ones.
    """
    done: dict[tuple[str, str], int] = {}
    answered: set[str] = set()
    again: set[tuple[str, str]] = set()
    dropped: set[tuple[str, str]] = set()
    for note in history.of("row", "killed", "event ResultReplayed", "event CallRefused"):
        if note.what == "killed":
            dropped |= again
        elif note.what.startswith("event "):
            if note.details.get("replaced", True):
                answered.add(note.details["call_id"])
        elif (row := note.details["new"]) is not None:
            number = history.generation(row.key, row.fence)
            if row.state == State.DONE:
                done.setdefault((row.key, row.call), number)
            elif done.get((row.key, row.call), number) < number or row.call in answered:
                again.add((row.key, row.call))
    return dropped


def _belongs_to_no_call(row: Any) -> bool:
    """Whether the last caller was told that the broker has not taken the message."""
    return bool(row.state == State.PENDING and not row.call)


def queues_discard_nothing(history: History) -> Iterator[Violation]:
    """A call whose message its queue would discard fails before, and not earlier."""
    used = _of_several_messages(history)
    returned = _returned_in_vain(history)
    for note in history.of("returned", "discarded", "event CallRefused"):
        given = note.details
        if note.what == "returned":
            used.add(given["call"])
        elif note.what == "discarded":
            if given["why"] == "reject" and given["call"] not in returned:
                yield Violation("nothing is lost", note, "its worker returned it once too often")
        elif "cannot be rescheduled" in given["error"] and given["call_id"] not in used:
            why = "its queue takes its message back"
            yield Violation("a call fails only if it cannot be returned", note, why)


def nothing_left(history: History) -> Iterator[Violation]:
    """In the end nothing runs, nothing is held, and no message is left. A message whose call has
    ended may be left until the visibility timeout, if another worker may have it.

    The row of a dead attempt still says that it runs, or by a statement that was executed late that
    it waits, if Celery ends the call before it begins again. The next call of the key takes the row
    over. So it does with the row of a revoked call
    of which an older copy, whose body a pool of threads does not end, relies on the revoked one.
    """
    dropped = {
        note.details["call_id"]
        for note in history.of("event CallDropped")
        if note.details["reason"] == "copy_waits"
    }
    dropped &= {note.details["call"] for note in history.of("revoked")}
    dropped_by_celery = _done_before(history)
    killed = {note.details["pid"] for note in history.of("killed")}
    last = {note.details["key"]: note.details["pid"] for note in history.of("row")}
    limited = list(history.of("time limit"))
    ended = {note.details["call"] for note in history.of(*ENDED_BY_CELERY)}
    ended -= {note.details["call"] for note in limited if not _was_not_closed(history, note)}
    ended |= {note.details["call"] for note in history.of("calls") if "expires" in note.details}
    ended |= _failed_for_its_queue(history)
    dropped |= _discarded(history) | _not_closed(history) | _dropped_as_busy(history)
    dropped |= _returned_in_vain(history)
    # Nobody was told that it is queued, and its record does not have its message.
    dropped |= {note.details["call"] for note in history.of("message lost")} & {
        note.details["call"] for note in history.of("unconfirmed")
    }
    for row in history.final["rows"]:
        if (row.key, row.call) in dropped_by_celery:
            continue
        if row.state == State.RUNNING and row.call not in ended | dropped:
            yield Violation("nothing is left", None, f"the row still runs: {row}")
        elif (
            row.state in (State.PENDING, State.COOLING)
            and row.resumes
            and row.call not in dropped
            and not (row.call in ended and last.get(row.key) in killed)
        ):
            yield Violation("nothing is left", None, f"the row waits for ever: {row}")
    for key in history.final["held"]:
        yield Violation("nothing is left", None, f"the lease of {key} is still held")
    if history.final.get("late") and not _fetched_by_a_dead_worker(history):
        yield Violation("nothing is left", None, "a message waited for the visibility timeout")
    if not history.final["quiet"]:
        yield Violation("nothing is left", None, "messages circulate for ever")


def _fetched_by_a_dead_worker(history: History) -> bool:
    """Whether a server executed the request for a message when the worker was dead already, or had
    given up: perhaps for so long that nobody looks any more for what it has fetched.
    """
    died = {note.details["process"]: note.at for note in history.of("killed")}
    for note in history.of("late request", "slow request"):
        given = note.details
        if given["op"] in ("eval", "blmove", "brpop"):
            late = given.get("late", given["span"])
            given_up = note.what == "late request" and late > given["span"]
            if given_up or note.at + late > died.get(given["process"], math.inf):
                return True
    return False


def _was_not_closed(history: History, ended: Note) -> bool:
    """Whether a main process could not close the row of a call that had ended there: it died, or
    the database did not answer it.
    """
    main = ended.details["process"].partition("/")[0] + "/main"
    failed = (
        note
        for note in history.of("killed", "lost request", "refused")
        if note.details["process"] == main and note.details.get("server", "database") == "database"
    )
    return any(note.at >= ended.at for note in failed)


def completed_with_its_rows(history: History) -> Iterator[Violation]:
    """A call whose body completes it in a transaction is done if that transaction is committed."""
    tokens = {note.details["token"]: note for note in history.of("rolled back", "committed")}
    done = {
        note.details["new"].owner
        for note in history.of("row")
        if note.details["new"] is not None and note.details["new"].state == State.DONE
    }
    for token, note in tokens.items():
        if (note.what == "committed") != (token in done):
            yield Violation("completed with its rows", note, f"done: {token in done}")


def withdrawn_calls_do_not_run(history: History) -> Iterator[Violation]:
    """A call whose transaction was rolled back does not run, unless the caller has got a call that
    was queued before.
    """
    withdrawn = {note.details["call"] for note in history.of("withdrawn")}
    queued = {note.details["call"] for note in history.of("calls", "published")}
    for note in history.of("body"):
        if note.details["call"] in withdrawn - queued:
            yield Violation("a withdrawn call does not run", note, "it was rolled back")


def queued_once(history: History) -> Iterator[Violation]:
    """While a call of a key is queued or runs, no other call of it is published, unless something
    has gone wrong.
    """
    queued: dict[str, Note] = {}
    over: set[str] = set()
    called = {note.details["call"]: note.at for note in history.of("calls")}
    for note in history.of(
        "published", "row", *FAULTS, *ENDED_BY_CELERY, "down", "message lost", "discarded"
    ):
        if note.what == "published":
            if note.details["task"] != "queued" or not note.details["own"]:
                continue
            expires, call = note.details.get("expires", math.inf), note.details["call"]
            if note.at - called.get(call, note.at) > expires:
                continue  # its publish took longer
            if note.details["key"] in queued:
                why = f"after {queued[note.details['key']].details['call']}"
                yield Violation("queued once", note, why)
            if expires == math.inf and call not in over:
                queued[note.details["key"]] = note
        elif note.what == "row":
            new = note.details["new"]
            if new is None or new.state in RESTS or (new.ended and not new.resumes):
                queued.pop(note.details["key"], None)
                over.add("" if new is None else new.call)
        else:
            queued.clear()


def what_has_ended_is_not_queued(history: History) -> Iterator[Violation]:
    """A caller does not get the call of another one that Celery has ended before, unless its key
    waits.
    """
    called = {note.details.get("number"): note.at for note in history.of("calls")}
    ended: dict[str, tuple[str, float]] = {}
    for note in history.of("row", "published"):
        given = note.details
        if note.what == "row":
            row = given["new"]
            ended.pop(given["key"], None)
            by_celery = row is not None and row.ended == Ended.TERMINATED
            if by_celery and _is_stopped(row) and row.reason in CALL_ENDING_CAUSES:
                ended[row.key] = row.call, max(note.at, row.retry_at)
        elif given["task"] in OUTBOX_TASKS and not given["own"]:
            call, since = ended.get(given["key"], ("", math.inf))
            if call == given["call"] and since < called.get(given["number"], -math.inf):
                yield Violation("what has ended is not queued", note, f"it ended at {since:.3f}")


def one_result(history: History) -> Iterator[Violation]:
    """All callers of a key whose work is done once get the same result, and each caller who is told
    of a success gets one.
    """
    results: dict[str, Any] = {}
    values = history.final["values"]
    for note in history.of("published"):
        call = note.details["call"]
        if call not in values:
            continue
        if (answer := values[call]) is None:
            yield Violation("one result", note, "a success without a result")
        if answer is None or note.details["task"] in SEVERAL_RUNS:
            continue
        key = note.details["key"]
        if key in history.generations:
            key += f" #{history.generation(key, json.loads(answer)[1])}"
        if results.setdefault(key, answer) != answer:
            yield Violation("one result", note, f"{answer} is not {results[key]}")


def what_has_expired_answers_nobody(history: History) -> Iterator[Violation]:
    """No call gets the result of a run whose record had expired when it was made."""
    expires: dict[tuple[str, int], float] = {}
    for note in history.of("row") if history.generations else ():
        if (row := note.details["new"]) is not None:
            expires[row.key, row.fence] = row.expires_at
    for note in history.of("calls") if history.generations else ():
        key, answer = note.details["key"], history.final["values"].get(note.details["call"])
        if key not in history.generations or answer is None:
            continue
        if expires[key, json.loads(answer)[1]] < note.at:
            yield Violation("what has expired answers nobody", note, f"it got {answer}")


def own_results(history: History) -> Iterator[Violation]:
    """If each call runs, or has other arguments, no two calls of a key get the same result."""
    found: dict[tuple[str, Any], str] = {}
    for note in history.of("published"):
        given = note.details
        call, answer = given["call"], history.final["values"].get(given["call"])
        if given["task"] not in (*EACH_RUNS, COMPARED) or answer is None:
            continue
        if (other := found.setdefault((given["key"], answer), call)) != call:
            yield Violation("own results", note, f"{answer} is the result of {other}")


def _estimated(
    history: History, called: Mapping[str, float], ended: Mapping[str, float]
) -> set[str]:
    """The calls whose publisher may have counted on from an order before a step of the clock."""
    if not any(history.of("clock")):
        return set()
    return {
        call for call, at in called.items() if history.faults("client", at, ended.get(call, at))
    }


def last_change_seen(history: History) -> Iterator[Violation]:
    """With ``lease_runs="latest"`` each call is done by a run of itself or of a newer call, whose
    result its caller gets, unless that is an error. Calls that are published at the same time have
    any order. If one of two calls has no order, the one that arrived first at a worker is older,
    unless the clock of the lease store has stepped before.
    """
    orders = {note.details["call"]: note.details["order"] for note in history.of("ordered")}
    values = history.final["values"]
    called = {note.details["call"]: note.at for note in history.of("calls")}
    ended = {note.details["call"]: note.at for note in history.of("published", "unconfirmed")}
    # The first arrival of a message may be forgotten when its worker dies: an order is the time of
    # the publication, and without it the next arrival counts.
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    for note in history.of("delivers"):
        call, again = note.details["call"], not note.details["copy"]
        first.setdefault(call, note.at)
        if again and call in orders:
            first[call] = min(first[call], called[call] if note.details["again"] else note.at)
        if again and (call not in orders or call not in last):
            last[call] = note.at
    done: defaultdict[str, set[str]] = defaultdict(set)
    for note in history.of("row"):
        new = note.details["new"]
        if new is not None and new.task in NEWEST_RUNS and new.state == State.DONE:
            done[new.key].add(new.call)

    estimated = _estimated(history, called, ended)

    stepped = min((note.at for note in history.of("clock")), default=math.inf)

    def is_older(run: str, call: str) -> bool:
        if call in orders and run in orders:
            return ended[run] < called[call] and estimated.isdisjoint((run, call))
        drift = 2 * CLOCK_ERROR * min(COMPARE_EVERY, called[call])
        is_first = bool(first) and last[run] < first[call] - SLACK - drift
        return is_first and first[call] < stepped

    for note in history.of("published"):
        given = note.details
        call = given["call"]
        answer = history.final["answers"].get(call)
        if given["task"] not in NEWEST_RUNS or answer != "SUCCESS":
            continue
        if all(is_older(run, call) for run in done[given["key"]]):
            yield Violation("the last change is seen", note, "only older calls have run")
        value = values.get(call)
        run = f"call-{json.loads(value)[0]}" if orders and value else call
        both = run in orders and call in orders
        if orders[run] < orders[call] if both else run != call and is_older(run, call):
            yield Violation("the last change is seen", note, f"it got the result of {run}")


def bursts_are_over(history: History) -> Iterator[Violation]:
    """With ``lease_debounce`` no body begins before that time has passed without a newer call that
    has an order, unless the first call has waited for ``lease_debounce_max``, or the process was
    disturbed.
    """
    calls: dict[str, Note] = {}
    first: dict[str, float] = {}
    newest: dict[str, float] = {}
    for note in history.of("calls", "ordered", "body"):
        given = note.details
        if note.what == "calls":  # its order is noted now, and its message may come later
            calls[given["call"]] = note
            first.setdefault(given["key"], note.at)
            continue
        if note.what == "ordered":
            if (call := calls.pop(given["call"], None)) is not None:
                key = call.details["key"]
                newest[key] = max(call.at, newest.get(key, 0.0))
            continue
        if not given["key"].startswith("debounced "):
            continue
        last = newest.pop(given["key"], note.at)
        waited = note.at - first.get(given["key"], note.at)
        first[given["key"]] = note.at  # of a newer call, which waits from now on
        early = 2 * SLACK < note.at - last < DEBOUNCE - SLACK and waited < DEBOUNCE_MAX - SLACK
        if early and not history.faults(given["process"], note.at - DEBOUNCE, note.at):
            yield Violation("a burst is over", note, f"{note.at - last:.2f} s after a newer call")


@dataclass
class Ordered:
    """A call that has an order: when it was made, and when its message was published."""

    order: int
    called: float
    published: float
    #: Others wait for it: the lease store has noted it, and it does not end without a run.
    counts: bool


@dataclass
class Latest:
    """A key of ``lease_runs="latest"``, and its calls that have an order."""

    calls: dict[str, Ordered] = field(default_factory=dict)
    #: When others were made since its row was last claimed; the store may have noted them.
    others: dict[str, float] = field(default_factory=dict)
    #: The greatest order that has run, and the greatest of a call that others need not wait for.
    has_run: int = 0
    given_up: int = 0
    #: When its row was last claimed, and when attempts have ended.
    began: float = -math.inf
    ends: list[float] = field(default_factory=list)

    def changed(self, old: Row | None, new: Row | None, at: float) -> None:
        """Its row has changed."""
        if not _ran(old):
            return
        if not _ran(new) and (new is None or new.ended != Ended.RELEASED):
            self.ends.append(at)
        elif old and new and old.owner != new.owner:  # the note of the newest may be replaced
            self.given_up = self._newest

    @property
    def _newest(self) -> int:
        return max((each.order for each in self.calls.values()), default=0)

    def claimed(self, call: str, tries: Sequence[float], at: float, task: str) -> Ordered | None:
        """Its row is claimed for a call that workers have tried at these times; returns the newer
        call that must run instead.
        """
        if (own := self.calls.get(call)) is None:
            own = Ordered(self._newest, at, at, counts=False)
        waits = [each.called for each in self.calls.values() if each.order > self.has_run]
        first = max(self.began, min((*waits, *self.others.values()), default=at))
        self.others.clear()
        self.has_run, self.began = max(self.has_run, own.order), at
        newer = [
            each
            for each in self.calls.values()
            if each.order > max(own.order, self.given_up)
            and each.published < tries[-1]
            and each.counts
        ]
        if not newer:
            return None
        newest = max(newer, key=lambda each: each.order)
        ended = max((each for each in self.ends if each <= tries[-1]), default=-math.inf)
        if at - max(newest.called, ended, tries[0]) >= PATIENCE - SLACK:
            self.given_up = newest.order  # its note is replaced
            return None
        if any(tries[-1] < each <= at for each in self.ends):
            return None  # it could not know when the attempt would end that ran meanwhile
        # Also a call that expires or that Celery ends has come.
        came = max(each.published for each in self.calls.values() if each.published < tries[-1])
        debounced = task == "debounced"
        quiet, longest = (DEBOUNCE, DEBOUNCE_MAX) if debounced else (QUIET, DEBOUNCES * QUIET)
        come_fast = (
            at - first >= longest - SLACK
            and came >= tries[-1] - quiet - SLACK
            and (at - ended >= quiet - SLACK or len(tries) == 1)
        )
        return None if come_fast else newest


def _is_noted(history: History, made: Note, published: Note) -> bool:
    """Whether the lease store has given a call its order, and the call does not expire."""
    disturbed = history.faults("client", made.at, published.at)
    return "expires" not in made.details and not disturbed


def bursts_cost_few_runs(history: History) -> Iterator[Violation]:
    """With ``lease_runs="latest"`` no call runs while a newer one waits, with two exceptions: the
    newer one has not come for 10 s, in which no run has ended; or calls have come so fast for 10 s,
    or ``lease_debounce_max``, that each was replaced before it could begin.

    So the calls that wait cost one run, and one more in each of these times. A call counts as newer
    if the lease store has noted it, and Celery has not ended it. If an attempt dies, an operator
    takes its key, or the store loses its notes, more may run.
    """
    called: dict[str, Note] = {}
    keys: defaultdict[str, Latest] = defaultdict(Latest)
    tries: defaultdict[str, list[tuple[float, str]]] = defaultdict(list)
    claims: dict[str, Ordered | None] = {}
    ended = {note.details["call"] for note in history.of(*ENDED_BY_CELERY)}
    for note in history.of("calls", "ordered", "tries", "row", "body", "emptied", "clock"):
        given = note.details
        match note.what:
            case "clock":
                return
            case "emptied":
                for latest in keys.values():
                    latest.calls.clear()
            case "calls":
                called[given["call"]] = note
                keys[given["key"]].others[given["call"]] = note.at
            case "ordered":
                made = called[given["call"]]
                counts = given["call"] not in ended and _is_noted(history, made, note)
                found = Ordered(given["order"], made.at, note.at, counts)
                keys[made.details["key"]].others.pop(given["call"], None)
                keys[made.details["key"]].calls.setdefault(given["call"], found)
            case "tries":
                tries[given["call"]].append((note.at, given["process"]))
            case "row":
                old, new, latest = given["old"], given["new"], keys[given["key"]]
                latest.changed(old, new, note.at)
                if _ran(new) and (old is None or old.owner != new.owner):
                    own = (at for at, process in tries[new.call] if process == given["by"])
                    last = max(own, default=note.at)
                    tried = [at for at, _ in tries[new.call] if at <= last] or [note.at]
                    claims[new.owner] = latest.claimed(new.call, tried, note.at, new.task)
            case "body":
                if (newer := claims.get(given["token"])) is not None:
                    why = f"a newer call was published at {newer.published:.2f}"
                    yield Violation("a burst costs few runs", note, why)


def newer_calls_are_waited_for_briefly(history: History) -> Iterator[Violation]:
    """With ``lease_runs="latest"`` a call that has waited in workers for 10 s for a newer one, in
    which no run has begun or ended and no other call was made, is not rescheduled for it again.
    """
    keys: dict[str, str] = {}
    changed: defaultdict[str, float] = defaultdict(lambda: -math.inf)
    came: dict[str, float] = {}
    tried: dict[str, float] = {}
    stays: dict[str, float] = {}
    waited: dict[str, float] = {}
    trying: set[str] = set()
    several: set[str] = set()
    for note in history.of("calls", "ordered", "delivers", "tries", "row", "clock", *RESCHEDULED):
        given, call = note.details, note.details.get("call") or note.details.get("call_id", "")
        match note.what:
            case "clock":
                return
            case "calls" | "row" | "ordered":
                key = keys[call] = given.get("key") or keys.get(call, "")
                if note.what != "ordered" or call not in tried:  # it is no copy
                    changed[key] = note.at
            case "delivers":
                several |= {call} & came.keys()  # each message has waited for a time of its own
                if given.get("again"):
                    waited.pop(call, None)  # its header may be older
                came[call] = note.at
            case "tries":
                several |= {call} & trying
                trying.add(call)
                tried[call], stays[call] = note.at, note.at - came.pop(call, note.at)
            case _ if not given["reason"].startswith(NEWER_RUNS):
                trying.discard(call)
                waited.pop(call, None)
            case _:
                trying.discard(call)
                waited[call] = waited[call] + stays[call] if call in waited else 0.0
                lasted = min(waited[call], tried[call] - changed[keys[call]])
                if lasted > PATIENCE + SLACK and call not in several:
                    why = f"{call} has waited for {waited[call]:.2f} s"
                    yield Violation("a newer call is waited for briefly", note, why)


def limit_holds(history: History) -> Iterator[Violation]:
    """At most so many bodies of a group run at a time: the smallest limit of those that run. If its
    store loses its data, others may begin until those that run have renewed their slots.
    """
    for group in LIMITS:
        yield from _limit_holds(history, group)


def _limit_holds(history: History, group: str) -> Iterator[Violation]:
    limits = {task: each.limit for task, each in GROUPS.items() if each.name == group}
    bodies = [body for body in history.bodies if body.task in limits]
    emptied = [note.at for note in history.of("emptied")]
    for number, body in enumerate(bodies):
        if any(body.began.at - TTL <= at <= body.began.at for at in emptied):
            continue
        beside = [
            other
            for other in bodies[:number]
            if other.ended > body.began.at + SLACK
            and not may_overlap(history, other, body.began.at)
        ]
        if len(beside) >= min(limits[each.task] or math.inf for each in (body, *beside)):
            yield Violation("a limit holds", body.began, f"{len(beside)} others run")


def rate_holds(history: History) -> Iterator[Violation]:
    """The turns of a group with a rate come at its distance, unless its store loses its data, and
    no body begins before its turn.
    """
    turns: dict[str, float] = {}
    last = -math.inf
    for note in history.of("group", "body", "emptied", "clock"):
        given = note.details
        if note.what == "clock":
            return
        if note.what == "emptied":
            last = -math.inf
        elif note.what == "body":
            if note.at < turns.get(given["token"], 0.0) - 0.01:
                yield Violation("a rate holds", note, f"before its turn at {turns[given['token']]}")
        elif given["group"] == str(GROUPS["rated"].name) and given["began"] > last:
            if given["began"] < last + PAUSE - 0.01:
                yield Violation("a rate holds", note, f"the last turn was at {last:.3f}")
            last = given["began"]
            turns.update({each: last for each in given["held"] if each not in turns})


def slots_last(history: History) -> Iterator[Violation]:
    """A body has its slot until it ends, if nothing goes wrong for its process."""
    until: dict[str, float] = {}
    for note in history.of("group", "body ended", "lost"):
        given = note.details
        if note.what == "lost":
            until[given["token"]] = math.inf
        elif note.what == "group":
            until |= {each: max(at, until.get(each, 0.0)) for each, at in given["held"].items()}
        elif until.get(given["token"], note.at) < note.at - SLACK:
            lasted = until[given["token"]]
            if not history.faults(given.get("process", ""), lasted - TTL, note.at):
                yield Violation("a slot lasts", note, f"it ended at {lasted:.3f}")


GIVEN_BACK = 1.0
"""Seconds in which a slot is given back, after the outcome was written: several requests."""


def slots_are_given_back(history: History) -> Iterator[Violation]:
    """A body gives its slot back when it ends, if nothing goes wrong for its process."""
    ended = {body.token: body for body in history.bodies if body.ended < math.inf}
    for note in history.of("group"):
        for token in note.details["held"].keys() & ended.keys():
            body = ended[token]
            if body.ended + GIVEN_BACK < note.at < note.details["held"][
                token
            ] and not history.faults(body.process, body.ended - TTL, note.at):
                yield Violation("a slot is given back", note, f"{token} has ended")


ASKED_WITHIN = 0.5
"""Seconds within which a worker knows that a message has come, and a begun call is in its pool."""


@dataclass
class Wait:
    """A message of a call that waits in a worker for its turn in a group."""

    call: str
    #: When its first message came that waits for the group, since its body has run last.
    since: float
    arrived: float
    ended: float = math.inf


def _waits_in_groups(history: History) -> dict[tuple[str, str], list[Wait]]:
    """By worker and group, the calls that wait for their turn as copies. A call is left out that
    may have left the worker without a trace, or of which another message may wait.
    """
    unclear = {note.details["call"] for note in history.of(*ENDED_BY_CELERY)}
    unclear |= {note.details["call"] for note in history.of("calls") if "expires" in note.details}
    tasks = {note.details["call"]: note.details.get("task") for note in history.of("calls")}
    first: dict[str, float] = {}
    waits: defaultdict[tuple[str, str], list[Wait]] = defaultdict(list)
    latest: dict[str, Wait] = {}
    arrived: set[tuple[str, str]] = set()
    for note in history.of("delivers", "tries", "body", "killed"):
        given = note.details
        if note.what == "killed":
            of_worker = [key for key in waits if f"{key[0]}/main" == given["process"]]
            for wait in (wait for key in of_worker for wait in waits[key]):
                wait.ended = min(wait.ended, note.at)
            continue
        call = given["call"]
        if call in latest:
            latest.pop(call).ended = note.at
        if note.what == "body":
            first.pop(call, None)
        elif note.what == "delivers":
            message = call, given.get("copy", "")
            if given.get("again") or message in arrived:
                unclear.add(call)
            arrived.add(message)
            task = tasks.get(call)
            if given.get("full") and task in GROUPS and call not in unclear:
                since = first.setdefault(call, note.at)
                latest[call] = wait = Wait(call, since, note.at)
                waits[given["worker"], str(GROUPS[task].name)].append(wait)
    return waits


def places_are_of_the_oldest(history: History) -> Iterator[Violation]:
    """In the list of a full group, a worker has the place of its oldest waiting call: no call
    loses its place when it is rescheduled.
    """
    waits = _waits_in_groups(history)
    before: dict[tuple[str, str], tuple[float, float]] = {}
    for note in history.of("group", "clock"):
        if note.what == "clock":
            return
        group = note.details["group"]
        for worker, place in note.details.get("places", {}).items():
            if before.get((worker, group)) == place:
                continue
            before[worker, group] = place
            for wait in waits.get((worker, group), ()):
                there = wait.arrived + ASKED_WITHIN < note.at < wait.ended - ASKED_WITHIN
                if not there or place[0] <= wait.since + ASKED_WITHIN:
                    continue
                if not history.faults_of_host(worker, wait.arrived, note.at):
                    why = (
                        f"{wait.call} waits in {worker} since {wait.since:.3f}, not {place[0]:.3f}"
                    )
                    yield Violation("the oldest has the place", note, why)


def older_calls_begin_first(history: History) -> Iterator[Violation]:
    """A call gets a slot of a full group, or its turn, only if one is left for the place of each
    other worker whose oldest call came more than two seconds before it.
    """
    bodies = {body.token: body for body in history.bodies}
    came: dict[str, float] = {}
    held: defaultdict[str, set[str]] = defaultdict(set)
    unsure = -math.inf
    for note in history.of("delivers", "group", "emptied", "clock"):
        given = note.details
        if note.what == "clock":
            return
        if note.what == "delivers":
            came.setdefault(given["call"], note.at)
            continue
        if note.what == "emptied":
            unsure = note.at + TTL
            continue
        group = given["group"]
        new, held[group] = set(given["held"]) - held[group], set(given["held"])
        for token in new if note.at > unsure else ():
            if (body := bodies.get(token)) is None or body.began.at < note.at:
                continue
            worker, call = body.process.partition("/")[0], body.began.details["call"]
            older = [
                other
                for other, (since, until) in given.get("places", {}).items()
                if other != worker
                and until > note.at
                and since < came.get(call, 0.0) - OVERTAKING / 1000 - ASKED_WITHIN
            ]
            running = sum(until > note.at for until in given["held"].values())
            left = 0 if GROUPS["rated"].name == group else LIMITS[group] - running
            if left < len(older):
                yield Violation("older calls begin first", note, f"{call} before those of {older}")


CHECKS: tuple[Check, ...] = (
    fences_grow,
    one_outcome,
    records_last,
    what_has_expired_is_purged,
    closed_after_its_lease,
    done_stays_done,
    each_call_once,
    body_owns_row,
    no_overlap,
    lease_is_believed_too_long,
    lost_stays_lost,
    effects_once,
    calls_are_repeated,
    effect_is_stored,
    cooldown_holds,
    cooldown_lasts,
    waits_grow,
    waits_are_not_shortened,
    outcomes_are_repeated,
    retries_are_not_repeated,
    what_has_failed_does_not_run,
    what_is_reported_does_not_run,
    what_may_have_been_done_is_not_repeated,
    without_faults_nothing_runs_twice,
    without_faults_no_lease_is_lost,
    body_begins_under_its_lease,
    nothing_lost,
    queues_discard_nothing,
    nothing_left,
    completed_with_its_rows,
    withdrawn_calls_do_not_run,
    queued_once,
    what_has_ended_is_not_queued,
    one_result,
    what_has_expired_answers_nobody,
    own_results,
    last_change_seen,
    bursts_are_over,
    bursts_cost_few_runs,
    newer_calls_are_waited_for_briefly,
    limit_holds,
    rate_holds,
    slots_last,
    slots_are_given_back,
    places_are_of_the_oldest,
    older_calls_begin_first,
    group_holds,
    probes_are_alone,
    closings_grow,
    closings_are_not_shortened,
    what_proves_nothing_opens_no_group,
    holders_keep_their_rows,
    takeovers_wait_for_the_database,
    only_busy_keys_refuse,
    what_has_failed_keeps_no_key,
    other_arguments_wait_for_the_failure,
    what_has_begun_is_not_refused,
    what_keeps_failing_ends,
    only_own_failures_count,
    retries_are_limited,
    what_keeps_crashing_ends,
    only_crashes_count,
    what_a_copy_names_is_no_crash,
    suspicions_are_taken_back,
    ends_are_kept,
    crashes_are_not_forgotten,
    deliveries_are_handled_once,
    what_has_begun_does_not_expire,
    what_is_done_does_not_expire,
    items_are_done_once,
    progress_is_given,
    leases_end_that_are_not_renewed,
    celery_ends_one_call,
    waits_for_the_lease,
)
"""What a history must show."""

BY_THE_DATABASE_CLOCK: frozenset[Check] = frozenset(
    (
        records_last,
        closed_after_its_lease,
        no_overlap,
        lease_is_believed_too_long,
        cooldown_holds,
        cooldown_lasts,
        waits_grow,
        waits_are_not_shortened,
        without_faults_nothing_runs_twice,
        without_faults_no_lease_is_lost,
        body_begins_under_its_lease,
        what_has_expired_is_purged,
        what_has_expired_answers_nobody,
        last_change_seen,
        bursts_are_over,
        bursts_cost_few_runs,
        newer_calls_are_waited_for_briefly,
        limit_holds,
        rate_holds,
        slots_last,
        places_are_of_the_oldest,
        older_calls_begin_first,
        group_holds,
        probes_are_alone,
        closings_grow,
        closings_are_not_shortened,
        holders_keep_their_rows,
        takeovers_wait_for_the_database,
        only_busy_keys_refuse,
        leases_end_that_are_not_renewed,
        waits_for_the_lease,
    )
)
"""These do not hold if the clock of the database steps."""
