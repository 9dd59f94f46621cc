"""FastAPI's part, in process: the status router, server-sent events, exception handlers, publishing
from the loop.
"""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip(
    "fastapi", reason="FastAPI is not installed: it is in the dependency group test"
)
httpx = pytest.importorskip(
    "httpx", reason="httpx is not installed: it is in the dependency group test"
)

from celery import Celery  # noqa: E402
from fastapi import FastAPI, Header, HTTPException, Request  # noqa: E402

from celery_leases import LeasedTask  # noqa: E402
from celery_leases.decide.latest import replaced_mark  # noqa: E402
from celery_leases.errors import LeaseConfigurationError, StoreUnavailable  # noqa: E402
from celery_leases.keys import stored_key  # noqa: E402
from celery_leases.web import fastapi as ours  # noqa: E402
from celery_leases.web.async_client import AsyncLeaseClient, version_of  # noqa: E402
from celery_leases.web.fastapi import add_exception_handlers, leases_router, submit  # noqa: E402
from celery_leases.web.http import idempotency_key  # noqa: E402
from celery_leases.worker.processes import process_of  # noqa: E402
from tests.unit.celery_apps import apps  # noqa: E402
from tests.unit.test_async_client import KEY, LONG, Scripted, a_status  # noqa: E402

__all__ = ["apps"]

ME = {"Authorization": "me"}
STREAM = ME | {"Accept": "text/event-stream"}
SECRET = "secret of the server"


async def may(key: str, request: Request) -> bool:
    """The authoriser: it accepts ``me``, raises 401 for ``nobody``, and refuses all others."""
    request.app.state.asked.append(key)
    who = request.headers.get("authorization")
    if who == "nobody":
        raise HTTPException(401)
    return bool(who == "me")


@pytest.fixture
def shop(apps: None, tmp_path: Path) -> Any:
    """A shop on FastAPI and eager Celery."""
    celery = Celery("shop", broker="memory://", set_as_current=False)
    celery.conf.update(task_always_eager=True, leases_url="database", leases_eager_stores=True)
    celery.conf.leases_database_url = f"sqlite:///{tmp_path / 'records.db'}"
    ran: list[Any] = []

    @celery.task(base=LeasedTask, name="shop.order", lease_key="order:{key}")
    def order(key, amount=1):
        ran.append((key, threading.get_ident()))
        if amount < 0:
            raise ValueError(SECRET)
        return {"amount": amount}

    app = FastAPI()
    app.state.asked = []
    add_exception_handlers(app)
    client = AsyncLeaseClient.from_app(celery)
    app.include_router(leases_router(may, client))

    @app.post("/orders")
    async def post(
        amount: int = 1, idempotency_key_header: str | None = Header(None, alias="Idempotency-Key")
    ):
        key = idempotency_key(idempotency_key_header, caller=7)
        return await submit(order, (key, amount), idempotent=True, location=f"/leases/order:{key}")

    @app.get("/broken")
    async def broken():
        raise StoreUnavailable(SECRET, False)

    return SimpleNamespace(app=app, order=order, ran=ran, client=client, celery=celery)


async def asked(app: FastAPI, method: str, url: str, headers: dict[str, str] | None = None) -> Any:
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://shop", timeout=LONG) as http:
        return await http.request(method, url, headers=headers or {})


def ask(app: FastAPI, method: str, url: str, headers: dict[str, str] | None = None) -> Any:
    """The same from a test that has no loop."""
    return asyncio.run(asked(app, method, url, headers))


def scripted(*states: Any, **options: Any) -> FastAPI:
    """An app with a router on a key that has one status after the other."""
    app = FastAPI()
    app.state.asked = []
    client = AsyncLeaseClient(Scripted(*states))  # type: ignore[arg-type]
    app.include_router(leases_router(may, lambda: client, **({"slowest": 0.001} | options)))
    return app


def events(text: str) -> list[dict[str, Any]]:
    """The events of a stream, and its comments, as a browser reads them."""
    found = []
    for block in text.split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in block.split("\n") if ": " in line)
        found.append(fields | {"data": json.loads(fields["data"])} if "data" in fields else fields)
    return found


# -- status and publishing -------------------------------------------------------------------------


def test_an_order_is_accepted_and_looked_at(shop: Any) -> None:
    header = ME | {"Idempotency-Key": "k-1"}
    first = ask(shop.app, "POST", "/orders?amount=5", header)
    assert (first.status_code, first.headers["location"]) == (202, "/leases/order:7:k-1")
    again = ask(shop.app, "POST", "/orders?amount=5", header)
    assert (again.status_code, again.json()["result"]) == (200, {"amount": 5})
    shown = ask(shop.app, "GET", first.headers["location"], ME)
    assert (shown.status_code, shown.json()["state"], shown.headers["vary"]) == (
        200,
        "done",
        "Accept",
    )
    refused = ask(shop.app, "POST", "/orders?amount=6", header)
    assert (refused.status_code, refused.json()["code"]) == (422, "key_reused")
    assert ask(shop.app, "POST", "/orders").json()["code"] == "idempotency_key_refused"
    ((key, thread),) = shop.ran
    assert (key, thread != threading.get_ident()) == ("7:k-1", True)


def test_a_failure_cools_down_and_its_text_stays_inside(shop, caplog) -> None:
    header = {"Idempotency-Key": "k-1"}
    ask(shop.app, "POST", "/orders?amount=-1", header)
    again = ask(shop.app, "POST", "/orders?amount=-1", header)
    assert (again.status_code, again.json()["code"]) == (429, "cooling_down")
    caplog.clear()
    broken = ask(shop.app, "GET", "/broken")
    assert (broken.status_code, broken.headers["retry-after"]) == (503, "5")
    assert SECRET not in again.text + broken.text
    assert SECRET in caplog.text


@pytest.mark.parametrize(("who", "code"), [("me", 200), ("you", 403), ("nobody", 401)])
@pytest.mark.parametrize("accept", ["application/json", "text/event-stream"])
def test_the_authoriser_decides_before_anything_is_looked_up(who, code, accept) -> None:
    app = scripted(a_status("done"))
    sent = ask(app, "GET", f"/leases/{KEY}", {"Authorization": who, "Accept": accept})
    assert sent.status_code == code
    assert app.state.asked == [KEY]
    assert ("done" in sent.text) == (code == 200)


@pytest.mark.parametrize("authorise", [None, True, "me"])
def test_a_router_without_an_authoriser_is_refused(authorise: Any) -> None:
    with pytest.raises(LeaseConfigurationError, match="anyone could see"):
        leases_router(authorise, AsyncLeaseClient(Scripted(a_status("done"))))  # type: ignore[arg-type]


def test_a_stored_key_is_not_a_way_around_the_authoriser(shop: Any) -> None:
    """Under it the key would be another one than the authoriser was asked about."""
    shop.order.delay("1")
    assert ask(shop.app, "GET", "/leases/t:shop.order%7Corder:1", ME).status_code == 404
    assert ask(shop.app, "GET", "/leases/order:1", ME).json()["state"] == "done"


def test_a_shared_key_is_not_a_way_around_the_task(shop: Any) -> None:
    shop.order.delay("1")
    shared = "/leases//shop.order/order:1"
    assert ask(shop.app, "GET", shared, ME).json()["state"] == "done"
    assert ask(shop.app, "GET", f"{shared}?task=shop.other", ME).status_code == 404


def test_nothing_is_changed_by_the_view(shop: Any) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert ask(shop.app, method, "/leases/order:1", ME).status_code == 405


def test_a_store_that_does_not_answer_is_503(apps: None) -> None:
    sent = ask(scripted(StoreUnavailable(SECRET, False)), "GET", f"/leases/{KEY}", ME)
    assert (sent.status_code, sent.json()["code"]) == (503, "unavailable")
    assert SECRET not in sent.text


# -- events ----------------------------------------------------------------------------------------


def test_each_change_is_an_event_and_the_stream_ends_with_the_work() -> None:
    """With an id, and nothing that a cache or a proxy would keep."""
    running = a_status("running", attempt=1)
    app = scripted(
        a_status("absent"),
        running,
        running,
        replace(running, progress={"ü\n": 1}),
        a_status("done"),
    )
    sent = ask(app, "GET", f"/leases/{KEY}", STREAM)
    assert sent.headers["content-type"].startswith("text/event-stream")
    assert (sent.headers["cache-control"], sent.headers["x-accel-buffering"]) == ("no-store", "no")
    retry, *told = events(sent.text)
    assert retry == {"retry": "2000"}
    assert [one["event"] for one in told] == ["status"] * len(told)
    # The view looks once before the stream begins.
    assert [(one["data"]["state"], one["data"]["progress"]) for one in told] == [
        ("running", None),
        ("running", {"ü\n": 1}),
        ("done", None),
    ]
    assert len({one["id"] for one in told}) == 3


def test_a_browser_that_reconnects_gets_what_it_has_not_received() -> None:
    running = a_status("running", attempt=1)
    app = scripted(running, running, a_status("done"))
    sent = ask(app, "GET", f"/leases/{KEY}", STREAM | {"Last-Event-ID": version_of(running)})
    assert [one["data"]["state"] for one in events(sent.text)[1:]] == ["done"]


def test_a_browser_that_has_received_the_end_gets_204() -> None:
    done = a_status("done")
    seen = ask(
        scripted(done), "GET", f"/leases/{KEY}", STREAM | {"Last-Event-ID": version_of(done)}
    )
    assert (seen.status_code, seen.text) == (204, "")
    other = ask(scripted(done), "GET", f"/leases/{KEY}", STREAM | {"Last-Event-ID": "other"})
    assert events(other.text)[1]["data"]["state"] == "done"


def test_a_stream_has_heartbeats_and_ends_after_its_maximal_time() -> None:
    app = scripted(a_status("running"), heartbeat=0.001, longest=0.5, slowest=5.0)
    sent = ask(app, "GET", f"/leases/{KEY}", STREAM)
    assert sent.text.count("event: status") == 1
    assert sent.text.count("\n\n:\n\n") > 2


def test_an_outage_of_a_store_is_an_event(monkeypatch) -> None:
    monkeypatch.setattr(ours, "UNAVAILABLE_AFTER", 0.001)
    away = StoreUnavailable(SECRET, False)
    app = scripted(a_status("running"), a_status("running"), away, away, a_status("done"))
    told = events(ask(app, "GET", f"/leases/{KEY}", STREAM).text)[1:]
    assert [one["event"] for one in told] == ["status", "problem", "problem", "status"]
    assert told[1]["data"]["code"] == "unavailable"
    assert SECRET not in json.dumps(told)


def test_reading_stops_when_the_client_disconnects() -> None:
    client = Scripted(a_status("running"))
    reads = AsyncLeaseClient(client)  # type: ignore[arg-type]

    async def leave() -> int:
        stream: AsyncIterator[str] = ours._events(reads, KEY, {}, None, 15.0, 300.0, 0.001)
        assert (await anext(stream)).startswith("retry")
        assert "running" in await anext(stream)
        waiting = asyncio.ensure_future(anext(stream))
        before = client.asked
        while client.asked < before + 3:  # noqa: ASYNC110 - the client is asked in another thread
            await asyncio.sleep(0.001)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        await reads.close()
        return len(others)

    assert asyncio.run(leave()) == 0


def test_the_loop_goes_on_while_the_broker_is_slow(shop, monkeypatch) -> None:
    published = threading.Event()

    def slow(*_: Any, **__: Any) -> None:
        assert published.wait(LONG)

    monkeypatch.setattr(LeasedTask, "apply_async", slow)

    async def both() -> Any:
        sent = asyncio.ensure_future(asked(shop.app, "POST", "/orders", {"Idempotency-Key": "k"}))
        shown = await asked(shop.app, "GET", "/leases/order:1", ME)
        assert (shown.json()["state"], sent.done()) == ("absent", False)
        published.set()
        return await sent

    assert asyncio.run(both()).status_code == 202


# -- who may see what ------------------------------------------------------------------------------


def test_a_function_that_calls_an_async_authoriser_is_awaited(shop: Any) -> None:
    """A coroutine that is not awaited would be true."""

    async def only_1(key: str) -> bool:
        return key == "order:1"

    shop.app.include_router(
        leases_router(lambda key: only_1(key), shop.client, prefix="/waited")  # noqa: PLW0108
    )
    codes = [ask(shop.app, "GET", f"/waited/order:{n}").status_code for n in (1, 2)]
    assert codes == [200, 403]


def test_the_authoriser_is_asked_about_the_task_that_is_shown(shop: Any) -> None:
    told: list[tuple[str | None, list[str]]] = []

    async def public_only(request: Request, task: str | None = None) -> bool:
        told.append((task, request.query_params.getlist("task")))
        return task != "shop.order" or "open" in request.query_params

    shop.order.delay("1")
    shop.app.include_router(
        leases_router(public_only, shop.client, task="shop.order", prefix="/fixed")
    )
    found = [
        ask(shop.app, "GET", f"/fixed/order:1{query}").status_code
        for query in (
            *("", "?task=", "?task=shop.order", "?open=1"),
            *("?task=shop.public", "?task=shop.public&task=shop.order"),
        )
    ]
    assert found == [403, 403, 403, 200, 404, 404]
    assert told == [("shop.order", ["shop.order"])] * 4


def test_a_call_that_a_newer_one_has_replaced_has_a_status_of_its_own(shop: Any) -> None:
    """Also in a stream."""

    @shop.celery.task(
        base=LeasedTask, name="shop.index", lease_key="index:{page}", lease_runs="latest"
    )
    def index(page):
        return page

    index.delay("1")
    marks, key = process_of(shop.celery).leases, stored_key(index.name, "index:1")
    marks.swap_mark(key, replaced_mark("older"), None, "newer", 60.0)
    url = "/leases/index:1?task=shop.index&call="
    for call, code in (("older", "replaced"), ("not-begun", "waiting")):
        assert ask(shop.app, "GET", f"{url}{call}", ME).json()["message_code"] == code
    stream = ask(shop.app, "GET", f"{url}older", STREAM).text
    assert events(stream)[-1]["data"]["message_code"] == "replaced"
