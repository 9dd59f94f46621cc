"""What must hold after a run: the promises that the simulator checks too, and that nothing is left.

The rows are those that a trigger of the database has noted, the bodies those of a journal that each
process appends to. Both clocks are of one machine.
"""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from sqlalchemy import text

from celery_leases.testing.waits import wait_until
from tests.simulation.checker import (
    History,
    done_stays_done,
    each_call_once,
    fences_grow,
    one_outcome,
)
from tests.simulation.history import Note, Row
from tests.soak.deployment import TTL, Deployment
from tests.soak.load import Key

CHECKS = (fences_grow, one_outcome, done_stays_done, each_call_once)
DRAIN = 180.0
"""Seconds in which all work is done once all is healed, at most."""


@dataclass
class Judgement:
    """What a run has shown."""

    violations: list[str] = field(default_factory=list)
    keys: int = 0
    runs: int = 0
    versions: int = 0
    overlaps: int = 0
    longest_overlap: float = 0.0
    drained_in: float = 0.0


def judged(deployment: Deployment, published: Counter[Key]) -> Judgement:
    """Wait until the work is done, and judge all of it."""
    found = Judgement(keys=len(published))
    began = time.monotonic()
    undone = _undone(deployment, published)
    try:
        wait_until(lambda: not _undone(deployment, published), DRAIN, "all work to be done")
        deployment.stage.worker = deployment.workers["prefork"]
        deployment.stage.wait_until_drained(DRAIN)
    except TimeoutError as error:
        undone = _undone(deployment, published)
        found.violations.append(f"nothing lost: {len(undone)} keys are not done: {undone[:5]}")
        found.violations.append(f"nothing left: {error}")
        for key in undone[:3]:
            found.violations += _story(deployment, key.partition(": ")[0])
        found.violations += _queues(deployment)
    found.drained_in = time.monotonic() - began
    notes = _rows(deployment)
    found.versions = len(notes)
    history = History(notes)
    found.violations += [str(each) for check in CHECKS for each in check(history)]
    found.violations += _effects(deployment, published)
    found.violations += _left(deployment)
    _bodies(deployment, found)
    return found


def _undone(deployment: Deployment, published: Counter[Key]) -> list[str]:
    with deployment.database.connect() as connection:
        rows = connection.execute(text("SELECT key, state FROM celery_leases_records"))
        states = {row.key: row.state for row in rows}
    wanted = {f"{key.task}:{key.name}" for key in published}
    return sorted(f"{key}: {states.get(key)}" for key in wanted if states.get(key) != "done")


def _story(deployment: Deployment, key: str) -> list[str]:
    """What is known of a key: its bodies, and what the workers have logged about it."""
    name = key.partition(":")[2]
    told = [str(event) for event in _events(deployment) if event.get("name") == name]
    for worker in deployment.workers.values():
        lines = worker.full_log().splitlines()
        told += [f"{worker.pool}: {line}" for line in lines if f"key {key}:" in line][-8:]
    return told


def _queues(deployment: Deployment) -> list[str]:
    """How many messages wait in the queues of the workers, and how many consumers these have."""
    with deployment.stage.app.connection_for_read() as connection:
        channel = connection.default_channel
        found = [
            queue(channel).queue_declare(passive=True)
            for queue in deployment.stage.app.amqp.queues.values()
        ]
    return [f"queue {each}" for each in found]


def _rows(deployment: Deployment) -> list[Note]:
    with deployment.database.connect() as connection:
        found = connection.execute(text("SELECT at, old, new FROM proofs_audit ORDER BY id"))
        return [
            Note(
                row.at,
                "row",
                {
                    "key": (row.new or row.old)["stored_key"],
                    "old": _row(row.old),
                    "new": _row(row.new),
                    # Who wrote it is not known, but a foreign owner or fence is seen all the same.
                    "pid": int((row.old or row.new)["owner"].rpartition("-")[2] or "0", 16),
                },
            )
            for row in found
        ]


def _row(given: dict[str, Any] | None) -> Row | None:
    if given is None:
        return None
    return Row(
        key=given["key"],
        task=given["task"].rpartition(".")[2],
        state=given["state"],
        fence=given["fence"],
        owner=given["owner"],
        call=given["call_id"],
        ended=given["ended"],
        result=given["result"],
        retry_at=(given["retry_at"] or 0) / 1e6,
        resumes=bool(given["resumes"]),
    )


def _events(deployment: Deployment) -> list[dict[str, Any]]:
    journal = deployment.stage.journal
    return [json.loads(line) for line in journal.read_text().splitlines()]


def _effects(deployment: Deployment, published: Counter[Key]) -> list[str]:
    """An effect has one idempotency key, and a completion is one commit of the body's own."""
    keys: defaultdict[str, set[str]] = defaultdict(set)
    for event in _events(deployment):
        if event["what"] == "charge":
            keys[event["name"]].add(event["idempotency_key"])
    with deployment.database.connect() as connection:
        counted = text("SELECT name, count(*) AS number FROM proofs GROUP BY name")
        invoices = {row.name: row.number for row in connection.execute(counted)}
    wrong = []
    for key in published:
        charges = len(keys[key.name])
        if charges != (key.way == "effect"):
            wrong.append(f"effects once: {key.name} was charged under {charges} keys")
        if invoices.get(key.name, 0) != (key.way == "complete"):
            wrong.append(f"one commit: {key.name} has {invoices.get(key.name, 0)} invoices")
    return wrong


def _left(deployment: Deployment) -> list[str]:
    """No row runs, and no lease is held longer than it lasts."""
    wrong = []
    with deployment.database.connect() as connection:
        query = "SELECT count(*) FROM celery_leases_records WHERE state = 'running'"
        if number := connection.execute(text(query)).scalar():
            wrong.append(f"nothing left: {number} rows are running")
    if deployment.stage.lease_store == "redis":
        import redis

        with redis.Redis.from_url(deployment.servers["redis"].url) as client:

            def held() -> list[Any]:
                return list(client.scan_iter("celery_leases:lease*"))

            try:
                wait_until(lambda: not held(), 3 * TTL, "all leases to end")
            except TimeoutError:
                wrong.append(f"nothing left: {held()[:5]} are held")
    return wrong


def _bodies(deployment: Deployment, found: Judgement) -> None:
    """Count the runs, and measure for how long two bodies of a key ran at once."""
    begun: dict[tuple[str, int, int], float] = {}
    spans: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for event in _events(deployment):
        one = (event.get("name", ""), event.get("attempt", 0), event["pid"])
        if event["what"] == "begin":
            found.runs += 1
            begun[one] = event["t"]
        elif event["what"] == "over" and one in begun:
            spans[one[0]].append((begun.pop(one), event["t"]))
    for of_key in spans.values():
        for one, other in combinations(of_key, 2):
            overlap = min(one[1], other[1]) - max(one[0], other[0])
            if overlap > 0:
                found.overlaps += 1
                found.longest_overlap = max(found.longest_overlap, overlap)
