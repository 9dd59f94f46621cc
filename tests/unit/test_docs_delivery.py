"""docs/explanation/how-it-works.md shows the calls of a delivery in their order."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import fakeredis
import pytest
from celery import Celery

from celery_leases import LeasedTask
from celery_leases.stores.redis.leases import RedisLeaseStore
from celery_leases.worker import processes
from celery_leases.worker.request import request_class
from tests.unit.celery_apps import apps
from tests.unit.doc_pages import ROOT, blocks, page, section

PACKAGE = ROOT / "celery_leases"
Step = tuple[str, str, str]
"""Who calls, whose code is called, and the name of the function."""


def drawn() -> tuple[dict[str, str], list[Step]]:
    """The participants of the diagram by their short names, and its arrows."""
    (diagram,) = blocks(section(page("how-it-works"), "One delivery"), "mermaid")
    places = dict(re.findall(r"^ +participant (\w+) as (.+)$", diagram, re.MULTILINE))
    arrows = re.findall(r"^ +(\w+)->>(\w+): (\w+)\(\)", diagram, re.MULTILINE)
    assert len(arrows) == diagram.count("->>")
    return places, [(places[one], places[other], name) for one, other, name in arrows]


class Calls:
    """The calls between the *places* of the package, and to the body, while it traces."""

    def __init__(self, places: list[str]) -> None:
        self._places = {place: PACKAGE / place for place in places}
        self.found: list[Step] = []

    def _place(self, frame: FrameType | None) -> str | None:
        """Where the innermost function runs that belongs to one of the places."""
        while frame is not None:
            path = Path(frame.f_code.co_filename)
            if path == Path(__file__):
                return "the body" if frame.f_code.co_name == "send_invoice" else "Celery"
            for place, where in self._places.items():
                if path.with_suffix("") == where or where in path.parents:
                    return place
            frame = frame.f_back
        return None

    def _seen(self, frame: FrameType, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call" and (path == __file__ or path.startswith(str(PACKAGE))):
            caller, called = self._place(frame.f_back), self._place(frame)
            if called != caller and caller is not None and called is not None:
                self.found.append((caller, called, frame.f_code.co_name))

    @contextmanager
    def traced(self) -> Iterator[None]:
        """Trace the calls of this thread."""
        sys.setprofile(self._seen)
        try:
            yield
        finally:
            sys.setprofile(None)


QUEUE = "delivered"
"""Messages in memory are those of the whole process, and other tests leave some in ``celery``."""


def deliver(app: Celery, task: Any) -> None:
    """Give the next message of the queue to a worker's main process, which runs it itself."""
    with app.connection_for_read() as connection, connection.SimpleQueue(QUEUE) as queue:
        message = queue.get(timeout=5)
        message.ack()  # or the next look at the queue may find it again

    def acknowledge(*_: Any) -> None:
        """The connection of the message is closed; its queue is in this process."""

    request = request_class(task)(
        message, app=app, task=task, hostname="worker", on_ack=acknowledge, connection_errors=()
    )
    request.execute()


@pytest.mark.usefixtures(apps.__name__)
def test_the_picture_of_a_delivery_shows_its_calls(monkeypatch, tmp_path) -> None:
    server = fakeredis.FakeServer()

    def opened(url: str, *, prefix: str, **_: Any) -> RedisLeaseStore:
        return RedisLeaseStore(fakeredis.FakeRedis(server=server), prefix, "fakeredis")

    monkeypatch.setattr(RedisLeaseStore, "from_url", opened)
    app = Celery("billing", broker="memory://delivery", backend="cache+memory://")
    app.conf.update(
        task_default_queue=QUEUE,
        leases_url="redis://localhost/2",
        leases_database_url=f"sqlite:///{tmp_path / 'records.db'}",
    )
    ran = []

    @app.task(base=LeasedTask, lease_key="invoice:{customer_id}", shared=False)
    def send_invoice(customer_id: int) -> None:
        ran.append(customer_id)

    places, arrows = drawn()
    calls = Calls([place for place in places.values() if place not in ("Celery", "the body")])
    try:
        for customer_id in range(2):
            send_invoice.delay(customer_id)
        deliver(app, send_invoice)  # the first one of a process also makes the tables
        with calls.traced():
            deliver(app, send_invoice)
    finally:
        processes.close_all()
        app.close()
    assert sorted(ran) == [0, 1]
    after = 0
    for arrow in arrows:
        assert arrow in calls.found[after:], f"no call {arrow} at this place"
        after = calls.found.index(arrow, after) + 1
    assert {place for step in calls.found for place in step[:2]} == set(places.values())
