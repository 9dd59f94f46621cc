"""What the page shows, and what its buttons do, without HTTP."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from celery.result import AsyncResult

from celery_leases import LeaseStatus
from celery_leases.errors import AlreadyDone, LeaseIsLive, UnknownKey
from celery_leases.ops.client import OperatorClient
from example_project.celery import app
from example_project.demo.json_over_http import ask
from example_project.play import tasks, worker_commands

DOCUMENTS_MAX: Final = 40
PRESSES_MAX: Final = 10
LOG_LINES: Final = 40
LOST_AFTER: Final = 15.0
"""Seconds after which a message counts as lost."""
PING: Final = 1.0
"""Seconds to wait for the answers of workers."""
MISSED: Final = 2
"""After so many missed answers in a row a worker counts as dead."""
log = logging.getLogger(__name__)


class NotPossible(Exception):
    """The action of a button is not possible now; the text says why."""


@dataclass
class Document:
    """A submitted document; ``done`` is its final status."""

    number: int
    presses: int = 0
    plain: list[AsyncResult] = field(default_factory=list)
    ended: dict[str, str] = field(default_factory=dict)
    done: LeaseStatus | None = None
    told: tuple[Any, ...] = ()
    told_plain: tuple[Any, ...] = ()

    @property
    def key(self) -> str:
        """Its key."""
        return tasks.KEY.format(document=self.number)


class Workers:
    """All workers that have ever answered, and whether each one is alive."""

    def __init__(self) -> None:
        self._missed: dict[str, int] = {}

    def heard(self, names: Sequence[str]) -> None:
        """Note which workers answered, and which did not."""
        for name in {*self._missed, *names}:
            self._missed[name] = 0 if name in names else self._missed[name] + 1

    def gone(self, name: str) -> None:
        """Note that a worker was killed."""
        self._missed[name] = MISSED

    def listed(self) -> list[dict[str, Any]]:
        """All of them by name."""
        return [
            {"name": name, "short": name.partition("@")[0], "up": missed < MISSED}
            for name, missed in sorted(self._missed.items())
        ]

    def __contains__(self, name: str) -> bool:
        return name in self._missed


class Desk:
    """The documents, the operator's tools, and the provider's settings. Thread-safe."""

    def __init__(self, client: OperatorClient, provider_url: str) -> None:
        self.workers = Workers()
        self._client = client
        self._provider = provider_url
        self._documents: dict[int, Document] = {}
        self._log: deque[dict[str, Any]] = deque(maxlen=LOG_LINES)
        self._logged = 0
        self._closed_group: str | None = None
        self._lock = threading.Lock()

    # -- the buttons -------------------------------------------------------------------------------

    def submit(self) -> int:
        """Submit a new document on both sides, and return its number."""
        with self._lock:
            number = len(self._documents) + 1
            if number > DOCUMENTS_MAX:
                raise NotPossible(f"{DOCUMENTS_MAX} documents are enough: start the play again")
            self._documents[number] = Document(number)
        self.press(number, 1)
        return number

    def press(self, number: int, times: int) -> None:
        """Press the button of a document *times* times, on both sides."""
        document = self._document(number)
        for _ in range(times):
            tasks.summarise.delay(number)
            call = tasks.summarise_plain.delay(number)
            with self._lock:
                document.presses += 1
                document.plain.append(call)

    def retry(self, number: int) -> None:
        """Let a document that cools down, or has failed, run now."""
        self._change(number, lambda key: self._client.retry(key, task=tasks.summarise.name))
        self._call(number)

    def resolve(self, number: int, outcome: Literal["done", "retry"]) -> None:
        """Enter whether a charge was made, as a person found out."""
        document, name = self._document(number), tasks.summarise.name
        if self._client.status(document.key, task=name).state != "uncertain":
            raise NotPossible(f"document {number} is not uncertain")
        text = f"What matters in document {number}"
        result = {"document": number, "summary": text} if outcome == "done" else None
        self._change(
            number, lambda key: self._client.resolve(key, outcome, task=name, result=result)
        )
        found = "it was charged" if outcome == "done" else "it was not charged"
        self._say(f"Document {number}: a person decided that {found}")
        if outcome == "retry":
            self._call(number)

    def open_group(self) -> None:
        """Open the provider's group."""
        if not self._client.open_group(tasks.GROUP):
            raise NotPossible("the group is open already")

    def configure(self, settings: Mapping[str, Any]) -> None:
        """Change the settings of the provider. Raises Refused."""
        ask(f"{self._provider}/settings", settings, method="PUT")

    def kill(self, name: str) -> None:
        """Kill a worker."""
        if name not in self.workers:
            raise NotPossible(f"there is no worker {name}")
        app.control.broadcast(worker_commands.die.__name__, destination=[name])
        self.workers.gone(name)
        self._say(f"{name.partition('@')[0]} was killed")

    def _call(self, number: int) -> None:
        """Publish the message that the record stores, or else a new one."""
        key, name = self._document(number).key, tasks.summarise.name
        if self._client.publish(key, task=name) is None:
            tasks.summarise.delay(number)

    def _document(self, number: int) -> Document:
        with self._lock:
            if number not in self._documents:
                raise NotPossible(f"there is no document {number}")
            return self._documents[number]

    def _change(self, number: int, how: Any) -> None:
        try:
            how(self._document(number).key)
        except (AlreadyDone, LeaseIsLive, UnknownKey) as error:
            raise NotPossible(str(error)) from None

    # -- the page ----------------------------------------------------------------------------------

    def look(self) -> dict[str, Any]:
        """The state of the page, as JSON."""
        books = ask(f"{self._provider}/books")
        settings = ask(f"{self._provider}/settings")
        with self._lock:
            documents = [*self._documents.values()]
        shown = [self._shown(document, books["charges"]) for document in documents]
        return {
            "documents": shown,
            "totals": {side: _total(side, books) for side in ("leases", "plain")},
            "group": self._group(),
            "workers": self.workers.listed(),
            "provider": settings | {"limited_for": books["limited_for"]},
            "log": [*self._log],
        }

    def look_after(self) -> None:
        """Ping the workers and publish lost messages again, in an endless loop.

        A worker that is killed may lose a message that it was just taking from Redis. In production
        beat runs the rescue.
        """
        while True:
            try:
                replies = app.control.ping(timeout=PING)
                self._client.rescue(older=LOST_AFTER)
            except Exception as error:  # noqa: BLE001 - any of the servers may be away
                log.warning("cannot look after the workers: %s", error)
                time.sleep(PING)
            else:
                self.workers.heard([name for reply in replies or () for name in reply])

    def _shown(self, document: Document, charges: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        mine = [charge for charge in charges if charge["document"] == document.number]
        paid = Counter(charge["account"] for charge in mine)
        status = self._status(document)
        plain = self._plain(document)
        self._tell(document, status, paid)
        self._tell_plain(document, plain, paid)
        leases = {
            name: getattr(status, name)
            for name in ("state", "attempt", "crashes", "retry_after", "scope", "resumes", "reason")
        }
        leases |= {
            "message": status.message(),
            "code": status.message_code.value,
            "pages": _pages(status),
            "paid": paid["leases"],
            "evidence": _evidence(status, mine) if status.state == "uncertain" else None,
        }
        return {
            "number": document.number,
            "presses": document.presses,
            "pages": tasks.PAGES,
            "leases": leases,
            "plain": plain | {"paid": paid["plain"]},
        }

    def _status(self, document: Document) -> LeaseStatus:
        if document.done is not None:
            return document.done
        status = self._client.status(document.key, task=tasks.summarise.name, group=tasks.GROUP)
        if status.state == "done":
            document.done = status
        return status

    def _plain(self, document: Document) -> dict[str, Any]:
        with self._lock:
            calls = [*document.plain]
        for call in calls:
            if call.id not in document.ended and (state := call.state) in ("SUCCESS", "FAILURE"):
                document.ended[call.id] = state
        ended = Counter(document.ended.values())
        waiting = len(calls) - len(document.ended)
        return {"finished": ended["SUCCESS"], "failed": ended["FAILURE"], "open": waiting}

    def _group(self) -> dict[str, Any]:
        found = next((one for one in self._client.groups() if one.group == tasks.GROUP), None)
        state = found.state if found is not None else "open"
        if state != self._closed_group:
            if self._closed_group is not None:
                self._say(f"The provider's group is {state.replace('_', ' ')}")
            self._closed_group = state
        return {
            "name": tasks.GROUP,
            "state": state,
            "retry_after": found.retry_after if found is not None else None,
            "reason": found.reason if found is not None else None,
        }

    # -- the log -----------------------------------------------------------------------------------

    def _tell(self, document: Document, status: LeaseStatus, paid: Counter[str]) -> None:
        told = (status.state, status.attempt, status.message_code)
        if told == document.told or status.state == "absent":
            return
        document.told = told
        self._say(f"Document {document.number}: {_in_the_log(status, paid['leases'])}")

    def _tell_plain(self, document: Document, plain: Mapping[str, Any], paid: Counter[str]) -> None:
        told = (plain["finished"], plain["failed"], plain["open"])
        if plain["open"] or not any(told) or told == document.told_plain:
            return
        document.told_plain = told
        self._say(
            f"Document {document.number} on plain Celery: {plain['finished']} of "
            f"{document.presses} presses have a result, paid {_times(paid['plain'])}"
        )

    def _say(self, text: str) -> None:
        with self._lock:
            self._logged += 1
            at = time.strftime("%H:%M:%S")
            self._log.append({"id": self._logged, "at": at, "text": text})


_CRASHED = ("crashed", "abandoned")


def _in_the_log(status: LeaseStatus, paid: int) -> str:
    if status.state == "done":
        return f"done, paid {_times(paid)}"
    crashed = status.previous is not None and status.previous.ended in _CRASHED
    if status.state == "running" and status.attempt > 1 and crashed:
        done = _pages(status)
        return f"taken over after a crash, attempt {status.attempt} continues after page {done}"
    return status.message()


def _pages(status: LeaseStatus) -> int:
    """How many pages have been read."""
    if status.state == "done":
        return tasks.PAGES
    return int(status.progress.get("pages", 0)) if isinstance(status.progress, dict) else 0


def _evidence(status: LeaseStatus, charges: Sequence[Mapping[str, Any]]) -> str:
    """What the provider has charged for the call in doubt, for the person who decides."""
    key = status.effects[-1].idempotency_key if status.effects else ""
    found = next((charge for charge in charges if charge["idempotency_key"] == key), None)
    if found is None:
        return f"The provider has no charge with the idempotency key {key[:12]}…"
    return (
        f"The provider has charge {found['id']}, {found['cents']} cents, with the key {key[:12]}…"
    )


def _total(side: str, books: Mapping[str, Any]) -> dict[str, int]:
    mine = [charge for charge in books["charges"] if charge["account"] == side]
    return {
        "paid": len(mine),
        "cents": sum(charge["cents"] for charge in mine),
        "calls": books["calls"].get(side, 0),
        "refused": books["refused"].get(side, 0),
    }


def _times(number: int) -> str:
    return {0: "never", 1: "once", 2: "twice"}.get(number, f"{number} times")
