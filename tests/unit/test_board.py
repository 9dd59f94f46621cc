"""The board in process: access, what its pages show, and that an action changes only the keys that
are as the page showed them.
"""

from __future__ import annotations

import base64
import html
import logging
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

pytest.importorskip("jinja2", reason="the board is not installed: it is in the group test")
pytest.importorskip("starlette", reason="the board is not installed: it is in the group test")

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import RedirectResponse

from celery_leases.cli import leases
from celery_leases.client import (
    AttemptStatus,
    ClosingStatus,
    EffectStatus,
    GroupStatus,
)
from celery_leases.errors import LeaseConfigurationError, SchemaOutdated, StoreUnavailable
from celery_leases.ops.board import Operator, Passwords, charts, leases_board
from celery_leases.ops.board.bulk_jobs import Jobs, Step, TooManyJobs
from celery_leases.ops.board.cached_reads import CachedRead, value_of
from celery_leases.ops.board.forms import seen_value
from celery_leases.ops.board.views import ROUTES, workers
from celery_leases.ops.client import OperatorClient
from celery_leases.ops.worker_leases import WorkerLeaseState
from celery_leases.record import State
from celery_leases.testing.waits import wait_until
from tests.support.boards import SECRET, TASK, Shop, Visitor, seen_in, sqlite, words
from tests.support.servers.local import free_port
from tests.unit import doc_pages
from tests.unit.celery_apps import apps

__all__ = ["apps"]

BOARD = Path(leases_board.__code__.co_filename).parent
PAGES = (
    "/",
    "/keys",
    "/groups",
    "/workers",
    "/runtimes",
    "/doctor",
    "/upkeep",
    "/keys?state=failed",
)
ACTIONS = tuple(path for method, path, _ in ROUTES if method == "POST")
PATIENCE = 60.0


@pytest.fixture
def shop(apps: None, tmp_path: Path) -> Iterator[Shop]:
    """A shop whose leases are in the database."""
    made = Shop(sqlite(tmp_path))
    yield made
    made.close()


def board_of(shop: Shop, **options: Any) -> Any:
    """A board that takes the name of the operator from a header."""

    def authorise(request: Request) -> Any:
        who = request.headers.get("x-who", "ann")
        return (
            Operator(who, may_change=False) if who == "reader" else who if who != "nobody" else None
        )

    return leases_board(shop.app, authorise, **options)


@pytest.fixture
def ann(shop: Shop) -> Visitor:
    return Visitor(board_of(shop))


def box(shop: Shop, key: str) -> str:
    """The value of a key's checkbox for its current status."""
    status = shop.client.status(f"t:{TASK}|{key}")
    return seen_value(status)


# -- access ----------------------------------------------------------------------------------------


def test_a_board_without_an_authoriser_is_not_made(shop: Shop) -> None:
    with pytest.raises(LeaseConfigurationError, match="give a function that returns the user"):
        leases_board(shop.app, None)  # type: ignore[arg-type]


def test_a_user_whom_the_authoriser_refuses_sees_and_changes_nothing(shop: Shop) -> None:
    shop.put("order:1", State.FAILED)
    visitor = Visitor(board_of(shop))
    for path in (*PAGES, "/static/board.css", "/nowhere"):
        found = visitor.http.get(path, headers={"x-who": "nobody"})
        assert found.status_code == 403
        assert "order:1" not in found.text
    for path in ACTIONS:
        assert visitor.posts(path, [], **{"x-who": "nobody"}).status_code == 403

    def fails(request: Request) -> str:
        raise ValueError(SECRET)

    failed = Visitor(leases_board(shop.app, fails)).sees("/", 500)
    assert SECRET not in failed

    async def to_login(request: Request) -> RedirectResponse:
        return RedirectResponse("/login")

    sent = Visitor(leases_board(shop.app, to_login)).http.get("/", follow_redirects=False)
    assert sent.headers["location"] == "/login"


def test_a_reader_has_no_buttons_and_is_refused(shop: Shop) -> None:
    shop.put("order:1", State.FAILED)
    visitor = Visitor(board_of(shop))
    visitor.http.headers["x-who"] = "reader"
    for path in (*PAGES, f"/key?stored=t:{TASK}|order:1"):
        assert '<button name="action"' not in visitor.sees(path)
    act = {"action": "retry", "seen": box(shop, "order:1"), "confirmed": "yes"}
    for path in ACTIONS:
        refused = visitor.sends(path, act)
        assert refused.status_code == 403
        assert "You may only read" in refused.text
    assert shop.state("order:1") == "failed"


def test_a_password_is_asked_for(shop: Shop, tmp_path: Path) -> None:
    path = tmp_path / "passwords"
    path.write_text("ann:correct horse battery\n\nbob:another long one\n")
    path.chmod(0o644)
    with pytest.raises(LeaseConfigurationError, match="chmod 600"):
        Passwords(path)
    path.chmod(0o600)
    visitor = Visitor(leases_board(shop.app, Passwords(path)))

    def status(said: str) -> int:
        coded = base64.b64encode(said.encode()).decode()
        return int(visitor.http.get("/", headers={"Authorization": f"Basic {coded}"}).status_code)

    refused = visitor.http.get("/")
    assert (refused.status_code, refused.headers["www-authenticate"][:5]) == (401, "Basic")
    assert [status(f"ann:{word}") for word in ("", "wrong", "another long one")] == [401] * 3
    assert status("eve:correct horse battery") == 401
    assert visitor.http.get("/", headers={"Authorization": "Basic ???"}).status_code == 401
    assert status("ann:correct horse battery") == 200
    for text, problem in (
        ("ann:short", "at least 12"),
        ("\n", "empty"),
        ("no colon here at all", "line 1"),
    ):
        path.write_text(text)
        with pytest.raises(LeaseConfigurationError, match=problem):
            Passwords(path)


def test_the_command_refuses_other_addresses_without_a_password(shop: Shop, tmp_path: Path) -> None:
    def types(*more: str) -> Any:
        return CliRunner().invoke(leases, ["web", *more], obj=SimpleNamespace(app=shop.app))

    for host in ("0.0.0.0", "192.0.2.1", "::", "board.example.com"):  # noqa: S104 - it is refused
        done = types("--host", host)
        assert done.exit_code == 2
        assert "--password-file" in done.output
    assert types("--password-file", str(tmp_path / "none")).exit_code == 1
    assert types("--authoriser", "no.such:thing").exit_code == 2


def test_no_action_is_a_get(ann: Visitor) -> None:
    for path in ACTIONS:
        assert ann.http.get(path).status_code == 405


def test_a_form_of_another_origin_is_refused(shop: Shop) -> None:
    shop.put("order:1", State.FAILED)
    visitor = Visitor(board_of(shop, origins=["https://ops.example.com"]))
    act = {"action": "retry", "seen": box(shop, "order:1"), "confirmed": "yes"}
    for origin in (
        "http://evil.example",
        "null",
        "",
        "http://board.evil.example",
        "http://[",
        "https://board:8443",
    ):
        for path in ACTIONS:
            assert visitor.sends(path, act, Origin=origin).status_code == 403, origin
    assert visitor.posts("/keys/act", act).status_code == 403
    assert visitor.posts("/keys/act", act | {"token": "0" * 64}).status_code == 403
    assert visitor.sends("/keys/act", act, **{"x-who": "eve"}).status_code == 403, "another's token"
    stranger = Visitor(visitor.http.app)
    token = re.search(r'name="token" value="(\w+)"', visitor.sees("/upkeep"))
    assert token is not None
    assert stranger.posts("/keys/act", act | {"token": token[1]}).status_code == 403
    assert shop.state("order:1") == "failed"
    for origin in ("https://board", "https://ops.example.com"):
        assert visitor.sends("/keys/confirm", act, Origin=origin).status_code == 200


def test_an_unknown_host_name_is_refused(shop: Shop) -> None:
    """DNS rebinding would otherwise give a foreign page access to a board without a password."""
    board = board_of(
        shop, hosts=("localhost", "127.0.0.1", "::1"), origins=["https://ops.example.com"]
    )
    for host in ("localhost:8765", "127.0.0.1:8765", "[::1]:8765", "ops.example.com"):
        Visitor(board, f"http://{host}").sees("/groups")
    for host in ("evil.example", "evil.example:8765", "localhost.evil.example"):
        Visitor(board, f"http://{host}").sees("/groups", 403)


def test_pages_have_a_strict_content_security_policy(shop: Shop, ann: Visitor) -> None:
    shop.put("order:1", State.FAILED)
    for path in (*PAGES, f"/key?stored=t:{TASK}|order:1", "/nowhere"):
        found = ann.http.get(path)
        assert not re.search(r"<style|style=|<script(?! src=)|\son\w+=|javascript:", found.text), (
            path
        )
        policy = found.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert found.headers["cache-control"] == "no-store"
        assert found.headers["referrer-policy"] == "same-origin"
    for name in re.findall(r'(?:src|href)="(/static/[^"]+)"', ann.sees("/")):
        assert ann.http.get(name).headers["cache-control"] == "no-cache"
    (cookie,) = Visitor(board_of(shop)).http.get("/").headers.get_list("set-cookie")
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie


def test_htmx_is_vendored_with_its_licence() -> None:
    (script,) = (BOARD / "static").glob("htmx-*.min.js")
    version = script.name.removeprefix("htmx-").removesuffix(".min.js")
    assert f'version:"{version}"' in script.read_text()
    licence = BOARD / "static" / f"htmx-{version}.LICENSE.txt"
    assert "Permission to use, copy, modify" in licence.read_text()
    assert script.name in (BOARD / "templates" / "base.html").read_text()


UNREADABLE_QUERIES = (
    "/keys?state=nonsense", "/keys?since=yesterday", "/keys?since=99999999d",
    "/keys?until=2026-99-99", "/keys?order=random", "/keys?after=%21%21",
    "/keys?after=OTk5OTk5OTk5OTk5OTk5OTk5OTk5OTp4", "/keys?prefix=%00", "/keys?prefix=%ff%fe",
    "/keys?" + "&".join(["state=done"] * 1001), "/key", "/key?stored=nothing",
    "/key?stored=t:" + "x" * 300 + "|",
)  # fmt: skip
UNREADABLE_FORMS: tuple[tuple[str, Any], ...] = (
    ("/keys/confirm", {}),
    ("/keys/confirm", {"action": "drop"}),
    ("/keys/confirm", {"action": "retry"}),
    ("/keys/confirm", {"action": "retry", "seen": "x"}),
    ("/keys/confirm", {"action": "retry", "seen": "\u0661:done:t:a|b"}),
    ("/keys/confirm", {"action": "retry", "seen": f"{2**63}:done:t:a|b"}),
    ("/keys/confirm", {"action": "retry", "seen": "1:gone:t:a|b"}),
    ("/keys/confirm", {"action": "resolve_done", "scope": "filter"}),
    ("/keys/confirm", {"action": "retry", "scope": "filter", "state": "nonsense"}),
    ("/keys/confirm", [("action", "retry"), *[("seen", f"{n}:done:t:a|{n}") for n in range(501)]]),
    ("/keys/act", {"action": "retry", "seen": "1:done:t:a|b"}),
    ("/keys/act", {"action": "retry", "scope": "filter", "confirmed": "yes"}),
    ("/keys/act", {"action": "retry", "scope": "filter", "confirmed": "yes", "unmoved_since": "-1"}),
    ("/keys/act", {"action": "retry", "scope": "filter", "confirmed": "yes", "unmoved_since": str(2**62)}),
    ("/groups/confirm", {"action": "open"}),
    ("/groups/confirm", {"action": "close", "group": "g", "span": "for ever"}),
    ("/groups/act", {"action": "close", "group": "g", "span": "5m"}),
    ("/upkeep/confirm", {"action": "purge", "older": "-5"}),
    ("/upkeep/confirm", {"action": "purge", "older": "30d", "state": "running"}),
    ("/upkeep/act", {"action": "purge", "older": "30d"}),
    ("/upkeep/act", {"action": "purge", "older": "30d", "confirmed": "yes"}),
    ("/upkeep/act", {"action": "purge", "confirmed": "yes", "since": "999999999999999999"}),
)  # fmt: skip


def test_a_query_that_cannot_be_read_is_400(ann: Visitor) -> None:
    for path in UNREADABLE_QUERIES:
        ann.sees(path, 400)


def test_a_form_that_cannot_be_read_is_400_and_changes_nothing(shop: Shop, ann: Visitor) -> None:
    shop.put("b", State.FAILED)
    for path, fields in UNREADABLE_FORMS:
        assert ann.sends(path, fields).status_code == 400, (path, fields)
    assert shop.state("b") == "failed"


def test_other_content_types_and_large_forms_are_refused(ann: Visitor) -> None:
    sent = {"Origin": ann.origin, "Content-Type": "application/json"}
    assert ann.http.post("/keys/act", content="{}", headers=sent).status_code == 415
    assert ann.posts("/keys/act", {"action": "x" * 5_000_000}).status_code == 413
    assert ann.sends("/jobs/stop", {"number": "nothing"}).status_code == 404
    form = sent | {"Content-Type": "application/x-www-form-urlencoded"}
    assert ann.http.post("/keys/act", content=b"\xff\xfe=\x00", headers=form).status_code == 400


# -- pages -----------------------------------------------------------------------------------------


def test_the_overview_shows_what_needs_attention_first(shop: Shop, ann: Visitor) -> None:
    shop.put("order:1")
    shop.put("order:2", State.UNCERTAIN)
    shop.put("order:3", State.RUNNING)
    shop.put("order:4", State.FAILED)
    shop.abandon("order:3")
    shop.client.close_group("openai:x", "5m", f"token={SECRET}")
    page = words(ann.sees("/"))
    assert (
        page.index("order:3")
        < page.index("order:2")
        < page.index("order:4")
        < page.index("openai:x")
        < page.index(TASK + " 1 1")
    )
    assert "order:1" not in page
    assert "5 minutes" in page
    assert SECRET not in page


def test_keys_are_filtered_and_paged_without_a_count(shop, ann, monkeypatch) -> None:
    for number in range(60):
        shop.put(f"order:{number:02}", State.FAILED if number % 2 else State.DONE)
    for name in ("how_many", "stats", "matching", "run_times"):
        monkeypatch.delattr(OperatorClient, name)
    first = ann.sees("/keys")
    assert len(seen_in(first)) == 50
    link = re.search(r'href="(/keys\?[^"]+)" rel="next"', first)
    assert link is not None
    rest = seen_in(ann.sees(link[1]))
    assert len(rest) == 10
    assert not rest.keys() & seen_in(first).keys()
    failed = seen_in(ann.sees("/keys?state=failed&prefix=order:0&since=1h"))
    assert failed.keys() == {f"order:0{number}" for number in (1, 3, 5, 7, 9)}
    assert seen_in(ann.sees("/keys?until=1h")) == {}


def test_the_page_of_a_key_shows_everything_but_secrets(shop: Shop, ann: Visitor) -> None:
    shop.put("<b>&1", State.FAILED)
    message = (
        f'{{"args": [1], "kwargs": {{"password": "{SECRET}", "to": "ann<i>"}}, "options": {{}}}}'
    )
    shop.sql(f"UPDATE celery_leases_records SET message = '{message}'")  # noqa: S608
    page = ann.sees(f"/key?stored=t:{TASK}|%3Cb%3E%261")
    assert "Failed for good" in page
    assert '<svg class="timeline"' in page
    assert 'class="attempt ended-failed"' in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "&lt;b&gt;&amp;1" in page
    assert "ann&lt;i&gt;" in page
    assert SECRET not in page
    assert not re.search(r"<script>|<b>|<i>", page)
    assert "There is no record" in ann.sees(f"/key?stored=t:{TASK}|none", 404)


def test_the_page_of_a_key_shows_effects_progress_and_result(shop, ann, monkeypatch) -> None:
    shop.put("order:1")
    now = datetime.now(UTC)
    effects = (
        EffectStatus("charge", "done", "ch_1", "idem", now, now),
        EffectStatus("mail", "sent", None, "idem", now, None, f"token={SECRET}"),
    )
    status = replace(
        shop.client.status(f"t:{TASK}|order:1"),
        effects=effects,
        progress={"items": 120},
        result={"password": SECRET, "sent": 7},
        scope="group",
        group="openai:x",
        retry_after=240.0,
        attempts=(AttemptStatus(now - timedelta(minutes=2), None, 120.0, "running", "web1/7"),),
    )
    monkeypatch.setattr(OperatorClient, "status", lambda *_: status)
    page = ann.sees(f"/key?stored=t:{TASK}|order:1")
    assert SECRET not in page
    for text in ("charge", "ch_1", '"items": 120', '"sent": 7', "group openai:x", "running 2m"):
        assert text in words(page), text


def test_a_result_that_html_cannot_contain_is_escaped(shop: Shop, ann: Visitor) -> None:
    shop.put("order:1", result='{"half": "\\ud800", "turned": "\\u202e"}')
    page = words(ann.sees(f"/key?stored=t:{TASK}|order:1"))
    assert r'"half": "\ud800"' in page
    assert r'"turned": "\u202e"' in page


def test_run_times_are_drawn_with_ttl_and_limit(shop: Shop, ann: Visitor) -> None:
    for number in range(5):
        shop.put(f"order:{number}")
    shop.sql("UPDATE celery_leases_records SET finished_at = started_at + 4000000")
    page = ann.sees("/runtimes")
    assert "5 runs: p50 4s, p95 4s, p99 4s, longest 4s" in words(page)
    assert 'class="runs"' in page
    for mark in ("p99 4s", "ttl now 15s", "time limit 90s", "shortest safe ttl 10s"):
        assert mark in words(page)
    assert "Fewer than 100 runs" in words(page)


def test_workers_are_listed_with_their_leases(shop, ann, monkeypatch) -> None:
    """As far as the broker has leases of workers, and answers."""
    assert "only workers on a Redis broker have leases" in ann.sees("/workers")
    shop.app.conf.broker_url = f"redis://:{SECRET}@127.0.0.1:{free_port()}/0"
    page = Visitor(board_of(shop)).sees("/workers")
    assert "the broker: " in page
    assert SECRET not in page
    found = [WorkerLeaseState("celery@a<b>", 77, 4, ends_in) for ends_in in (12.0, -3.0, None)]
    monkeypatch.setattr(workers, "workers_of", lambda _: found)
    page = words(Visitor(board_of(shop)).sees("/workers"))
    for lease in ("ends in 12s", "ended 3.0s ago", "ended, its messages are being returned"):
        assert f"celery@a<b> 77 4 {lease}" in page


def test_the_board_stays_readable_without_the_lease_store(apps: None, tmp_path: Path) -> None:
    shop = Shop(sqlite(tmp_path), f"redis://127.0.0.1:{free_port()}/0")
    shop.put("order:1", State.FAILED)
    shop.put("order:2", State.RUNNING)
    visitor = Visitor(board_of(shop))
    for path in ("/", "/keys", "/groups", f"/key?stored=t:{TASK}|order:2", "/runtimes"):
        assert "the lease store does not answer" in visitor.sees(path), path
    assert "order:1" in visitor.sees("/keys")
    assert "It is not known which keys are abandoned." in visitor.sees("/")
    assert "does not answer" in visitor.sees("/doctor")
    act = {"action": "retry", "seen": box(shop, "order:1"), "confirmed": "yes"}
    assert "lease store" in visitor.sends("/keys/act", act).text
    assert shop.state("order:1") == "failed"
    shop.close()


def test_the_board_says_that_the_records_do_not_answer(apps: None, tmp_path: Path) -> None:
    shop = Shop(f"postgresql+psycopg://ann:{SECRET}@127.0.0.1:{free_port()}/nothing")
    for path in ("/", "/keys", "/runtimes"):
        found = Visitor(board_of(shop)).sees(path, 503)
        assert SECRET not in found
        assert "celery_leases" not in found
    shop.close()


def test_an_unexpected_error_is_not_shown(shop, ann, monkeypatch) -> None:
    raised: list[Exception] = [RuntimeError(SECRET)]

    def fails(*_: Any, **__: Any) -> None:
        raise raised[0]

    monkeypatch.setattr(OperatorClient, "page", fails)
    assert SECRET not in ann.sees("/keys", 500)
    away, old = StoreUnavailable(f"<b> token={SECRET}", False), SchemaOutdated("<b> migrate")
    for raised[0] in (away, old):
        found = ann.sees("/keys", 503)
        assert SECRET not in found
        assert "&lt;b&gt;" in found


# -- actions ---------------------------------------------------------------------------------------


def test_selected_keys_are_changed_only_if_they_are_as_the_page_showed_them(shop, ann, caplog):
    caplog.set_level(logging.INFO, "celery_leases.ops.board")
    for number in range(4):
        shop.put(f"order:{number}", State.FAILED)
    boxes = seen_in(ann.sees("/keys"))
    assert len(boxes) == 4
    shop.client.retry(f"t:{TASK}|order:3")
    shop.put("order:3", State.FAILED)  # failed again: the same state, another attempt
    given, text = ann.confirms(
        "/keys/confirm", [("action", "retry"), *[("seen", value) for value in boxes.values()]]
    )
    assert "Retry: 3 keys?" in text
    assert "changed since the page was shown" in text
    assert {key for key in boxes if shop.state(key) == "failed"} == set(boxes), (
        "asking changes nothing"
    )
    shop.client.forget(f"t:{TASK}|order:2")
    done = words(ann.sends("/keys/act", given).text)
    assert "2 changed , 1 unchanged" in done
    assert [shop.state(f"order:{number}") for number in range(4)] == [
        "pending", "pending", "absent", "failed",
    ]  # fmt: skip
    log = caplog.text
    assert "ann (testclient) asks: Retry: 3 selected keys" in log
    assert f"ann (testclient): retry t:{TASK}|order:0, which was failed at fence " in log
    assert f"unchanged: t:{TASK}|order:2" in log
    again = words(ann.sends("/keys/act", given).text)
    assert "0 changed , 3 unchanged" in again, "sent twice, done once"


def test_a_retry_offers_what_can_be_published_and_says_what_was_done(shop, ann) -> None:
    for number in range(3):
        shop.put(f"order:{number}", State.FAILED)
    shop.sql(
        "UPDATE celery_leases_records SET message = "  # noqa: S608
        f"""'{{"task": "{TASK}", "args": [2], "kwargs": {{}}, "options": {{"task_id": "c"}}}}' """
        "WHERE key = 'order:2'"
    )
    boxes = seen_in(ann.sees("/keys"))
    asked = [("action", "retry"), ("seen", boxes["order:0"]), ("seen", boxes["order:1"])]
    given, text = ann.confirms("/keys/confirm", asked)
    assert "No message of these keys is stored" in text
    done = words(ann.sends("/keys/act", given).text)
    assert (
        f"2 keys: no message was published: call the task again with the arguments of the key ({TASK}"
        in done
    )
    given, text = ann.confirms("/keys/confirm", {"action": "retry", "seen": boxes["order:2"]})
    assert "publish the stored messages" in text
    done = words(ann.sends("/keys/act", [*given, ("publish", "yes")]).text)
    assert "1 key: its stored message was published" in done


def test_keys_with_blanks_and_line_breaks_are_found_and_changed(shop: Shop, ann: Visitor) -> None:
    keys = ("order:1", "order:1 ", "order:1\n2", "order:1\r2", "order:%0A|é")
    for key in keys:
        shop.put(key, State.FAILED)
    links = re.findall(r'href="(/key\?stored=[^"]+)"', ann.sees("/keys"))
    assert len(links) == len(keys)
    for link in links:
        (seen,) = seen_in(ann.sees(html.unescape(link))).values()
        sent = re.sub(r"\r\n|\r|\n", "\r\n", seen)
        given, _ = ann.confirms("/keys/confirm", {"action": "retry", "seen": sent})
        assert "1 changed , 0 unchanged" in words(ann.sends("/keys/act", given).text), link
    assert {key: shop.state(key) for key in keys} == dict.fromkeys(keys, "pending")


def test_a_filter_selects_the_keys_as_of_the_confirmation_page(shop: Shop, ann: Visitor) -> None:
    for number in range(3):
        shop.put(f"order:{number}", State.FAILED)
    shop.put("order:9")
    shop.put("other:1", State.FAILED)
    given, text = ann.confirms(
        "/keys/confirm", {"action": "retry", "scope": "filter", "prefix": "order:", "since": "1h"}
    )
    assert "Retry: 3 keys?" in text
    assert "state=failed" in text
    shop.put("order:5", State.FAILED)
    shop.client.retry(f"t:{TASK}|order:2")
    shop.put("order:2", State.FAILED)
    assert "2 changed , 0 unchanged" in words(ann.sends("/keys/act", given).text)
    states = [
        shop.state(key)
        for key in ("order:0", "order:1", "order:2", "order:5", "order:9", "other:1")
    ]
    assert states == ["pending", "pending", "failed", "failed", "done", "failed"]
    _, text = ann.confirms("/keys/confirm", {"action": "forget", "scope": "filter"})
    assert "the filter is empty" in text


def test_an_uncertain_key_is_resolved(shop: Shop, ann: Visitor) -> None:
    shop.put("order:1", State.UNCERTAIN)
    fields = [("action", "resolve_done"), ("seen", box(shop, "order:1"))]
    given, _ = ann.confirms("/keys/confirm", fields)
    wrong = ann.sends("/keys/act", [*given, ("result", "{no json")])
    assert wrong.status_code == 400
    assert "is not JSON" in wrong.text
    assert "1 changed" in words(ann.sends("/keys/act", [*given, ("result", '{"sent": 2}')]).text)
    assert shop.client.status(f"t:{TASK}|order:1").result == {"sent": 2}
    assert "1 unchanged" in words(ann.sends("/keys/act", given).text)


@pytest.mark.parametrize("action", ["resolve_done", "resolve_retry"])
def test_a_key_that_changes_just_before_it_is_resolved_stays_unchanged(
    shop: Shop, ann: Visitor, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    shop.put("order:1", State.UNCERTAIN)
    given, _ = ann.confirms("/keys/confirm", [("action", action), ("seen", box(shop, "order:1"))])
    look, came = OperatorClient._changeable, []

    def looked(client: OperatorClient, *asked: Any, **more: Any) -> Any:
        if not came:
            came.append(True)
            client.resolve(f"t:{TASK}|order:1", "retry")
            shop.put("order:1", State.UNCERTAIN)
        return look(client, *asked, **more)

    monkeypatch.setattr(OperatorClient, "_changeable", looked)
    assert "0 changed , 1 unchanged" in words(ann.sends("/keys/act", given).text)
    assert (came, shop.state("order:1")) == ([True], "uncertain")


def test_groups_are_closed_and_opened(shop: Shop, ann: Visitor) -> None:
    given, text = ann.confirms(
        "/groups/confirm",
        {"action": "close", "group": "openai:<x>", "span": "10m", "why": "a test"},
    )
    assert "No task of the group starts for 10 minutes" in text
    assert shop.client.groups() == []
    ann.sends("/groups/act", given)
    (closed_group,) = shop.client.groups()
    assert (closed_group.group, closed_group.state, closed_group.error) == (
        "openai:<x>",
        "closed",
        "a test",
    )
    assert "openai:&lt;x&gt;" in ann.sees("/groups")
    given, _ = ann.confirms("/groups/confirm", {"action": "open", "group": "openai:<x>"})
    ann.sends("/groups/act", given)
    assert shop.client.groups() == []
    page = ann.sees("/groups")
    assert "All groups are open." in page
    assert page.count('class="closing"') == 1
    assert re.search(r"openai:&lt;x&gt;: \S+ \S+ UTC for 10m, opened \S+: operator", page)
    assert "was already open" in ann.sends("/groups/act", given).text


def test_closings_are_drawn_on_one_axis_that_ends_now() -> None:
    now = datetime(2026, 4, 1, 12, tzinfo=UTC)

    def closing(ago: float, lasts: float, opened: float | None = None) -> ClosingStatus:
        at = now - timedelta(seconds=ago)
        again = at + timedelta(seconds=opened) if opened is not None else None
        return ClosingStatus(at, lasts, 1, "rate_limited", "rate-limited", again)

    shut = GroupStatus("a", "closed", 1, "asked", closings=(closing(100, 600), closing(400, 60)))
    again = GroupStatus("b", "open", 0, "", closings=(closing(710, 300, 45),))
    drawn = charts.closings([shut, GroupStatus("c", "closed", 1, "asked"), again], now)
    assert drawn is not None
    assert [(name, y, [(x, width) for x, width, _ in bars]) for name, y, bars in drawn["rows"]] == [
        ("a", 4, [(310.0, 60.0), (610.0, 100.0)]),
        ("b", 26, [(0.0, 45.0)]),
    ]
    assert drawn["rows"][1][2][0][2] == (
        "2026-04-01 11:48:10 UTC for 5m, opened 11:48:55: rate-limited"
    )
    assert charts.closings([GroupStatus("c", "closed", 1, "asked")], now) is None


def test_old_records_are_counted_and_then_deleted(shop: Shop, ann: Visitor) -> None:
    for number in range(3):
        shop.put(f"order:{number}")
    day = 86_400_000_000
    old = f"started_at = started_at - 40 * {day}, finished_at = finished_at - 40 * {day}"
    shop.sql(f"UPDATE celery_leases_records SET {old} WHERE key <> 'order:2'")  # noqa: S608
    given, text = ann.confirms("/upkeep/confirm", {"action": "purge", "older": "30d"})
    assert "have not changed for 30d: 2 records?" in text
    moment = int(dict(given)["since"]) + 1000  # it becomes old enough after they were counted
    shop.sql(
        f"UPDATE celery_leases_records SET started_at = {moment}, finished_at = {moment}"  # noqa: S608
        " WHERE key = 'order:2'"
    )
    wait_until(
        lambda: shop.client.how_many(shop.client.purgeable(older="30d")) == 3, 60, "its time"
    )
    assert "2 changed" in words(ann.sends("/upkeep/act", given).text)
    assert [shop.state(f"order:{number}") for number in range(3)] == ["absent", "absent", "done"]


# -- mounted ---------------------------------------------------------------------------------------


def test_it_is_mounted_in_fastapi(shop: Shop) -> None:
    shop.put("order:1", State.FAILED)
    site = FastAPI()
    site.mount("/ops/leases", board_of(shop))
    visitor = Visitor(site, under="/ops/leases")
    for path in PAGES:
        page = visitor.sees(path)
        links = re.findall(r'(?:href|src|action|hx-get)="([^"]+)"', page)
        assert links
        assert all(link.startswith("/ops/leases/") for link in links), path
    for name in re.findall(r'(?:src|href)="(/ops/leases/static/[^"]+)"', page):
        assert visitor.http.get(name).status_code == 200
    assert 'aria-current="page">Keys' in visitor.sees("/keys")
    given, _ = visitor.confirms("/keys/confirm", {"action": "retry", "seen": box(shop, "order:1")})
    assert "1 changed" in words(visitor.sends("/keys/act", given).text)
    assert shop.state("order:1") == "pending"
    (cookie,) = Visitor(site).http.get("/ops/leases/").headers.get_list("set-cookie")
    assert "Path=/ops/leases" in cookie


def test_the_documented_example_refuses_unknown_users(apps: None) -> None:
    (example,) = doc_pages.blocks(doc_pages.page("board"), "python")
    with doc_pages.executed(example, "board_example") as names:
        visitor = Visitor(names["site"], under="/leases")
        visitor.sees("/upkeep", 403)
        visitor.http.headers["x-authenticated-user"] = "bob"
        assert "read only" in visitor.sees("/upkeep")
        visitor.http.headers["x-authenticated-user"] = "ann@ops.example.com"
        assert "Rescue" in visitor.sees("/upkeep")


# -- cached reads and jobs -------------------------------------------------------------------------


def test_concurrent_requests_share_one_slow_read(monkeypatch: pytest.MonkeyPatch) -> None:
    go, calls = threading.Event(), []

    def read() -> int:
        calls.append(1)
        assert go.wait(PATIENCE)
        if len(calls) == 2:
            raise StoreUnavailable("away", False)
        return len(calls)

    cached = CachedRead(read, 3600.0)
    assert [cached.get(0.0) for _ in range(3)] == [None] * 3
    go.set()
    first = cached.get(PATIENCE)
    assert first is not None
    assert value_of(first) == 1
    assert cached.get(0.0) is first
    assert len(calls) == 1
    cached.invalidate()
    failed = cached.get(PATIENCE)
    assert failed is not None
    with pytest.raises(StoreUnavailable):
        value_of(failed)
    monkeypatch.setattr("celery_leases.ops.board.cached_reads.FRESH_AFTER_ERROR", 0.0)
    better = cached.get(PATIENCE)
    assert better is not None
    assert value_of(better) == 3


def test_a_job_can_be_stopped_and_the_number_of_running_jobs_is_limited() -> None:
    go, jobs = threading.Event(), Jobs()

    def steps() -> Iterator[Step]:
        for number in range(1000):
            assert go.wait(PATIENCE)
            yield Step(str(number))

    running = [jobs.start(f"job {number}", "ann", 1000, steps()) for number in range(4)]
    with pytest.raises(TooManyJobs):
        jobs.start("one too many", "ann", 1, [])
    for job in running:
        job.stop()
    go.set()
    assert all(job.ended.wait(PATIENCE) for job in running)
    assert all(job.changed == 1 for job in running)
    assert jobs.start("the next", "ann", 0, []).ended.wait(PATIENCE)
