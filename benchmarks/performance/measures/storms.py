"""Many calls of one held key: when they get their answer, and whether other tasks run meanwhile."""

import time

from benchmarks.performance import machine, roster
from benchmarks.performance.bench import Bench, Running, keys
from benchmarks.performance.figures import Figure, figure
from benchmarks.performance.findings import Finding, Table
from benchmarks.performance.journal import ANSWERED, BEGUN, ENDED, PUT_BACK
from benchmarks.performance.settings import FOR_EVER
from celery_leases.testing.waits import wait_until

COPIES = 50
FULL = (12.0, 5000, 20)
QUICK = (2.0, 300, 3)
"""The seconds of the body that many calls wait for; the number of calls of a held key, and of calls
of another task meanwhile.
"""
PATIENCE = 90.0
EVERY = 1.0
"""Seconds between two calls of another task, while a key is held."""


def measure(bench: Bench, quick: bool) -> Finding:
    """Both modes, one after the other."""
    body, crowd, others = QUICK if quick else FULL
    facts: dict[str, Figure] = {}
    copies: list[list[str]] = [
        [f"{COPIES} calls, one body of {body:g} s", "last answer after its end, s"]
    ]
    copies[0] += ["rescheduled", "messages published meanwhile", "worker's CPU, s"]
    waiting = [
        [
            f"{crowd:,} calls of a held key",
            "another task of the queue waits at most, s",
            "half of them, s",
        ]
    ]
    for contender in roster.OURS:
        with bench.running([contender], notes=BEGUN + ENDED + ANSWERED + PUT_BACK) as (one,):
            last, reschedule, messages, cpu = _storm(one, body)
        copies.append(
            [contender.title, f"{last:.2f}", str(reschedule), str(messages), f"{cpu:.2f}"]
        )
        with bench.running([contender], notes=BEGUN + ENDED) as (one,):
            waits = sorted(_crowd(one, crowd, others))
        waiting.append([contender.title, f"{waits[-1]:.2f}", f"{waits[len(waits) // 2]:.2f}"])
        facts |= {
            f"storm last {contender.name}": figure([last]),
            f"storm rescheduled {contender.name}": figure([reschedule]),
        }
        facts[f"crowd {contender.name}"] = figure([waits[-1]])
    tables: list[Table] = [copies, waiting]
    text = f"Each once; {others} calls of the other task."
    return Finding("storms", tables, text, facts)


def _storm(one: Running, body: float) -> tuple[float, int, int, float]:
    """Seconds from the end of the body to the last answer; reschedules, messages, CPU seconds."""
    (key,) = keys(1)
    start, pids = len(one.journal), one.worker.pids()
    cpu, published = machine.cpu(pids), one.stage.bench.messages()
    one.caller.publish([key] * COPIES, seconds=body)

    def answered() -> list[float]:
        return [entry.time for entry in one.journal.entries(start) if entry.what == ANSWERED]

    wait_until(lambda: len(answered()) >= COPIES, body + PATIENCE, "all answers")
    entries = one.journal.entries(start)
    (end,) = [entry.time for entry in entries if entry.what == ENDED]
    messages = one.stage.bench.messages() - published - COPIES
    reschedule = sum(entry.what == PUT_BACK for entry in entries)
    return max(answered()) - end, reschedule, messages, machine.used(cpu, machine.cpu(pids))


def _crowd(one: Running, calls: int, others: int) -> list[float]:
    """How many seconds each call of another task waited while *calls* calls waited for a held
    key.
    """
    (key,) = keys(1)
    start = len(one.journal)
    one.caller.publish([key], seconds=FOR_EVER)
    one.worker.until(lambda: len(one.journal) > start, "the body that holds the key")
    one.caller.publish([key] * calls, seconds=FOR_EVER)
    asked: dict[str, float] = {}
    for name in keys(others):
        asked[name] = one.caller.publish([name], task="other")["began"]
        time.sleep(EVERY)

    def ran() -> dict[str, float]:
        return {
            entry.key: entry.time for entry in one.journal.entries(start) if entry.what == ENDED
        }

    one.worker.until(lambda: asked.keys() <= ran().keys(), "the end of the other tasks", PATIENCE)
    return [ran()[name] - moment for name, moment in asked.items()]
