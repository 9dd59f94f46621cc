"""The page of ``make play`` without workers: its web server, and the provider of its documents."""

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from flask.testing import FlaskClient
from ruamel.yaml import YAML

from example_project.demo.json_over_http import Refused
from example_project.play import web
from example_project.play.desk import Desk, NotPossible, Workers
from example_project.play.provider import Provider, Settings

ROOT = Path(__file__).parents[2]


class FakeDesk:
    """Records its calls."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.raises: Exception | None = None

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def note(*values: Any) -> int:
            self.told.append((name, *values))
            if self.raises is not None:
                raise self.raises
            return 7

        return note


@pytest.fixture
def desk() -> FakeDesk:
    """What the page of the test controls."""
    return FakeDesk()


@pytest.fixture
def news() -> web.PageState:
    """What the page of the test shows."""
    return web.PageState(lambda: {"documents": []})


@pytest.fixture
def page(desk: FakeDesk, news: web.PageState) -> FlaskClient:
    return web.make_page(cast(Desk, desk), news, hosts=["localhost"]).test_client()


BUTTONS = [
    ("/documents", {}, ("submit",)),
    ("/documents/3/presses", {"times": 2}, ("press", 3, 2)),
    ("/documents/3/retry", {}, ("retry", 3)),
    ("/documents/3/resolution", {"outcome": "done"}, ("resolve", 3, "done")),
    ("/group/opening", {}, ("open_group",)),
    ("/provider", {"latency": 2}, ("configure", {"latency": 2})),
    ("/workers/worker-a@here/death", {}, ("kill", "worker-a@here")),
]


@pytest.mark.parametrize(("path", "value", "told"), BUTTONS)
def test_a_button_is_a_post_of_this_page_and_nothing_else(page, desk, path, value, told) -> None:
    assert page.get(path).status_code == 405
    assert page.post(path, data=value).status_code == 415
    elsewhere = {"Sec-Fetch-Site": "cross-site"}
    assert page.post(path, json=value, headers=elsewhere).status_code == 403
    assert page.post(path, json=value, base_url="http://rebound.example").status_code == 400
    assert desk.told == []
    assert page.post(path, json=value).status_code == 200
    assert desk.told == [told]


def test_a_refused_action_is_reported(page: FlaskClient, desk: FakeDesk) -> None:
    for value in ({}, {"times": 0}, {"times": 11}, {"times": True}, []):
        refused = page.post("/documents/3/presses", json=value)
        assert (refused.status_code, type(refused.get_json()["error"])) == (422, str)
    assert page.post("/documents/3/resolution", json={"outcome": "maybe"}).status_code == 422
    assert desk.told == []
    desk.raises = NotPossible("the group is open")
    answer = page.post("/group/opening", json={})
    assert (answer.status_code, answer.get_json()) == (409, {"error": "the group is open"})
    desk.raises = Refused(422, {}, {"error": "latency is a number from 0 to 5"})
    answer = page.post("/provider", json={})
    assert (answer.status_code, answer.get_json()["error"]) == (422, desk.raises.body["error"])


def test_the_page_needs_nothing_inline_and_nothing_from_elsewhere(page: FlaskClient) -> None:
    text = page.get("/").get_data(as_text=True)
    assert not re.findall(r"\son\w+=|\sstyle=|<style|https?://|<script(?! src=)", text)
    for path in ("/", *re.findall(r'(?:src|href)="([^"]+)"', text), "state"):
        answer = page.get(path if path.startswith("/") else f"/{path}")
        assert answer.status_code == 200, path
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
    labelled = set(re.findall(r'for="([^"]+)"', text))
    fields = re.findall(r"<input id=\"([^\"]+)\" type=\"range\"", text)
    assert set(fields) <= labelled


def luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_every_text_colour_can_be_read() -> None:
    text = (web.PAGE / "play.css").read_text()
    colours = dict(re.findall(r"--(\w+): (#[0-9a-f]{6});", text.replace("#fff;", "#ffffff;")))
    grounds = [luminance(colours.pop(name)) for name in ("paper", "ground")]
    colours.pop("line")
    assert len(colours) == 6
    for name, colour in colours.items():
        for ground in grounds:
            assert (ground + 0.05) / (luminance(colour) + 0.05) >= 4.5, name


def test_the_stream_begins_with_the_state_and_goes_on_with_what_is_new() -> None:
    looks = iter([{"documents": [1]}, {"documents": [1]}, {"documents": [1, 2]}])
    news = web.PageState(lambda: next(looks))
    news.refresh()
    stream = web._stream(news, heartbeat=0.0)
    first = next(stream)
    assert json.loads(re.findall(r"^data: (.*)$", first, re.MULTILINE)[0])["documents"] == [1]
    news.refresh()
    assert next(stream).startswith(":")
    news.refresh()
    assert '"documents": [1, 2]' in next(stream)


def test_a_server_that_does_not_answer_is_shown_beside_the_last_state() -> None:
    away = [False]

    def look() -> dict[str, Any]:
        if away[0]:
            raise ConnectionRefusedError("no")
        return {"documents": [1]}

    news = web.PageState(look)
    seen = []
    for away[0] in (False, True, False):
        news.refresh()
        seen.append(json.loads(news.latest()[1]))
    assert [one["documents"] for one in seen] == [[1], [1], [1]]
    problem = "A server does not answer: ConnectionRefusedError"
    assert [one["problem"] for one in seen] == [None, problem, None]


def test_a_worker_is_gone_after_two_missed_answers() -> None:
    workers = Workers()

    def up() -> list[bool]:
        return [worker["up"] for worker in workers.listed()]

    workers.heard(["b@x", "a@x"])
    assert [worker["short"] for worker in workers.listed()] == ["a", "b"]
    workers.heard(["a@x"])
    assert up() == [True, True]
    workers.heard(["a@x"])
    assert up() == [True, False]
    workers.gone("a@x")
    assert up() == [False, False]
    workers.heard(["a@x", "b@x"])
    assert up() == [True, True]


# -- the provider ----------------------------------------------------------------------------------


def test_the_provider_refuses_for_the_time_of_retry_after() -> None:
    now = [100.0]
    provider = Provider(clock=lambda: now[0])
    provider.configure(Settings(trouble="limited", limit=20))
    refused = provider.summarise("leases", 1, "k")
    assert (refused.status, refused.headers) == (429, (("Retry-After", "20"),))
    now[0] += 19.5
    assert provider.summarise("leases", 1, "k").headers == (("Retry-After", "1"),)
    now[0] += 0.5
    assert provider.summarise("leases", 1, "k").status == 200
    provider.configure(Settings(trouble="limited_silently"))
    silent = provider.summarise("plain", 1, "l")
    assert (silent.status, silent.headers) == (429, ())
    books = provider.books()
    assert books["calls"] == {"leases": 3, "plain": 1}
    assert books["refused"] == {"leases": 2, "plain": 1}
    assert [charge["account"] for charge in books["charges"]] == ["leases"]


def test_the_provider_charges_for_what_it_does_not_answer() -> None:
    provider = Provider(rand=lambda: 0.5)
    assert provider.find("k").status == 404
    provider.configure(Settings(trouble="timeout"))
    assert provider.summarise("leases", 4, "k").after > 10
    assert provider.find("k").body == {"id": "sum_1", "summary": "What matters in document 4"}
    provider.configure(Settings(tells=False, error_rate=0.6))
    assert provider.find("k").status == 501
    assert provider.summarise("leases", 4, "k").status == 500
    provider.configure(Settings(trouble="quota"))
    quota = provider.summarise("leases", 4, "k")
    assert (quota.status, quota.body["error"]["code"]) == (429, "insufficient_quota")
    assert len(provider.books()["charges"]) == 1


@pytest.mark.parametrize(
    "values",
    [
        [], {"colour": 1}, {"latency": 6}, {"latency": True}, {"error_rate": "1"}, {"limit": -1},
        {"trouble": "ill"}, {"tells": 1},
    ],
)  # fmt: skip
def test_the_provider_refuses_settings_that_it_does_not_know(values: object) -> None:
    with pytest.raises(ValueError, match=r"is|are"):
        Settings.of(values)


def check(path: Path) -> subprocess.CompletedProcess[str]:
    """Validate against the schema that check-jsonschema carries, offline."""
    command = [
        sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec",
        str(path),
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_compose_file_is_valid() -> None:
    done = check(ROOT / "docker-compose.yml")
    assert done.returncode == 0, done.stdout


def test_a_misspelt_key_is_found(tmp_path: Path) -> None:
    broken = tmp_path / "docker-compose.yml"
    broken.write_text(
        (ROOT / "docker-compose.yml").read_text().replace("healthcheck:", "heathcheck:", 1)
    )
    done = check(broken)
    assert done.returncode != 0
    assert "heathcheck" in done.stdout


def test_every_server_is_waited_for_until_it_is_healthy() -> None:
    services = YAML(typ="safe").load(ROOT / "docker-compose.yml")["services"]
    servers = {name for name, service in services.items() if "image" in service}
    assert servers == {"redis", "postgres", "rabbitmq"}
    assert all("healthcheck" in services[name] for name in servers)
    for service in ("worker-a", "worker-b", "page"):
        waited = services[service]["depends_on"] | services["migrate"]["depends_on"]
        assert {name for name, how in waited.items() if how["condition"] == "service_healthy"} == {
            *servers,
            "provider",
        }
        assert waited["migrate"] == {"condition": "service_completed_successfully"}


def test_every_module_that_a_service_runs_exists() -> None:
    services = YAML(typ="safe").load(ROOT / "docker-compose.yml")["services"]
    commands = [" ".join(service.get("command", ())) for service in services.values()]
    modules = {
        name for command in commands for name in re.findall(r"example_project[\w.]*", command)
    }
    assert len(modules) == 5
    for name in modules:
        assert importlib.util.find_spec(name) is not None, name
    for name in ("worker-a", "worker-b"):
        assert (services[name]["init"], services[name]["restart"]) == (True, "always")
        assert f"--hostname={name}@%h" in services[name]["command"]


PROBE = """
import importlib, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
importlib.import_module({module!r})
"""
ABSENT = (
    *("psycopg", "psycopg2", "asyncpg", "pymysql", "MySQLdb", "pytest", "hypothesis", "fakeredis"),
    *("alembic", "django", "fastapi", "starlette", "uvicorn", "matplotlib", "prometheus_client"),
    *("gevent", "eventlet", "selenium", "httpx"),
)
"""What the other groups install."""


@pytest.mark.parametrize(
    "module",
    [
        "example_project.demo.__main__",
        "example_project.demo.cooldown",
        "example_project.play.__main__",
        "benchmarks.peers.__main__",
    ],
)
def test_a_demo_imports_only_what_its_group_installs(module: str) -> None:
    probe = PROBE.format(absent=ABSENT, module=module)
    done = subprocess.run(
        [sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
