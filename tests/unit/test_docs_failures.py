"""The page about failures says what the rules do: its tables are compared with them, its examples
run.
"""

import inspect
import re
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import celery_leases
from celery_leases import CoolingDown, LeaseClient
from celery_leases.ops.client import OperatorClient
from celery_leases.options import Failures
from celery_leases.rules import Rules, cooldown, permanent, retry
from tests.unit.doc_pages import blocks, eagerly, executed, markdown_rows, page, section

PAGE = page("failures")
RULES = page("rules")
EXAMPLES = page("call-a-paid-api") + RULES


def default_rules() -> list[Any]:
    """The default rules in the order in which they are asked."""
    return list(Rules.default().rows())


def rule_table() -> list[list[str]]:
    """The rows of the table of default rules."""
    return markdown_rows(page("failure-rules"))[1 : len(default_rules()) + 1]


class Answered(Exception):
    """What a client library raises for an answer with that status and those headers."""

    def __init__(
        self, status: int | None = None, headers: dict[str, str] | None = None, **details: Any
    ) -> None:
        super().__init__(f"the answer was {status}")
        self.status_code = status
        self.headers = headers or {}
        self.__dict__.update(details)


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The names that the examples of the pages on failures define, with a model and a bank
    that do as they are told.
    """
    models, bank = ModuleType("models"), ModuleType("bank")
    world: dict[str, Any] = {
        "paid": [],
        "answer": Answered(429, {"Retry-After": "290"}),
        "payments": {},
    }

    def complete(model: str, document_id: int) -> str:
        world["paid"].append((model, document_id))
        if isinstance(world["answer"], Exception):
            raise world["answer"]
        return str(world["answer"])

    def pay(amount: int, reference: str) -> None:
        world["payments"][reference] = {"amount": amount}
        raise TimeoutError("no answer within 5 s")

    def find_payment(reference: str) -> Any:
        return world["payments"].get(reference)

    models.__dict__["complete"] = complete
    bank.__dict__.update(pay=pay, find_payment=find_payment)
    monkeypatch.setitem(sys.modules, "models", models)
    monkeypatch.setitem(sys.modules, "bank", bank)
    monkeypatch.delenv("CELERY_BROKER_URL", raising=False)
    source = eagerly(
        "".join(blocks(EXAMPLES, "python")), tmp_path, "postgresql+psycopg://localhost/texts"
    )
    with executed(source, "texts") as names:
        yield {**names, **world, "world": world}


def test_the_text_about_the_rule_table_counts_right() -> None:
    rules, text = default_rules(), page("failure-rules")
    phases = [rule.phase.value for rule in rules]
    assert phases == ["first"] * 7 + ["each"] * (len(rules) - 11) + ["last"] * 4
    assert "The first seven look" in text
    assert "The last four match" in text
    told: dict[str, set[str]] = defaultdict(set)
    for rule in rules:
        if rule.action.kind != "permanent" and not rule.name.startswith("asked-"):
            told[rule.action.server_delay].add(rule.name)
    assert told["instead"] == {"rate-limited"}
    assert told["ignore"] == {"out-of-quota", "bad-credentials"}
    group = {
        rule.name
        for rule in rules
        if "group" in (rule.action.scope, getattr(rule.action.then, "scope", ""))
    }
    assert group == {"rate-limited", "out-of-quota", "bad-credentials", "connect-phase"}
    assert all(f"`{name}`" in section(PAGE, "Groups") for name in group)


def test_the_statuses_in_the_rule_table_meet_their_rules() -> None:
    met: dict[str, set[int]] = defaultdict(set)
    for status in range(400, 600):
        met[Rules.default().classify(Answered(status), time.time()).rule].add(status)
    listed = {}
    for name, matches, *_ in rule_table():
        if matches[0].isdigit():
            runs = re.findall(r"(\d{3})(?: to (\d{3}))?", matches.split(";")[0])
            listed[name.strip("`")] = {
                n for first, last in runs for n in range(int(first), int(last or first) + 1)
            }
    unknown = met.pop("anything-else")
    assert {501, 505} < met.pop("request-refused")
    assert listed == met
    assert min(unknown) > 505


def test_delays_are_taken_from_the_answer_in_the_order_of_the_page() -> None:
    rows = markdown_rows(section(page("failure-rules"), "Where a delay comes from"))[1:]
    listed = [name for row in rows for name in re.findall(r"`([^`]+)`", row[0])]
    empty = {"x-ratelimit-remaining-requests": "0", "x-ratelimit-remaining-tokens": "0"}
    headers = {
        "retry-after-ms": "1000",
        "retry-after": "2",
        "x-amz-retry-after": "3000",
        "x-ratelimit-reset-requests": "6m0s",
        "x-ratelimit-reset-tokens": "12ms",
        "anthropic-ratelimit-requests-reset": time.strftime(
            "%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 60)
        ),
        "x-ratelimit-reset": "7",
        "ratelimit": '"default";r=0;t=40',
    }
    info = {"details": [{"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "4s"}]}
    extra: dict[str, Any] = {"retry_after": 0.5, "body": {"error": info}}
    found = []
    while (
        source := Rules.default()
        .classify(Answered(429, headers | empty, **extra), time.time())
        .source
    ) is not None:
        found.append(re.sub("-ratelimit-requests-reset$", "-ratelimit-…-reset", source))
        headers.pop(source, None)
        extra.pop(
            {"exception": "retry_after", "google.rpc.RetryInfo": "body"}.get(source, ""), None
        )
    assert found == listed


def test_the_ways_to_write_a_ruling_have_their_parameters() -> None:
    text = section(RULES, "Rules of your own")
    for function in (retry, cooldown, permanent):
        (written,) = re.findall(rf"^\| `{function.__name__}\((.*)\)` \|", text, re.MULTILINE)
        assert [name.strip(" =") for name in written.split(",")] == list(
            inspect.signature(function).parameters
        )
    for name in inspect.signature(Rules.on).parameters.keys() - {"self", "name"}:
        assert f"`{name}`" in text
    asked = markdown_rows(section(RULES, "From the body"))[1:]
    for name, written in (re.findall(r"`(\w+)\((.*)\)`", row[0])[0] for row in asked):
        known = inspect.signature(getattr(celery_leases, name)).parameters
        assert name == "PermanentFailure" or {
            word.strip(" =") for word in written.split(",")
        } == set(known)


def test_the_numbers_in_the_text_are_the_defaults() -> None:
    failures = Failures()
    assert f"`Failures.retries` ({failures.retries})" in PAGE
    assert f"`Failures.failures`-th failure ({failures.failures})" in PAGE
    requests = 3 * (failures.retries + 1)
    assert (
        f"inside a task with {failures.retries} quick retries is {requests} requests"
        in " ".join(EXAMPLES.split())
    )
    assert (failures.cooldown.base, failures.cooldown.cap) == (300, 6 * 3600)
    assert (
        "failed 10 times: for up to 5 minutes after the first failure, doubling to up to 6 hours"
        in " ".join(PAGE.split())
    )


def test_a_hook_is_given_the_facts_that_the_page_names() -> None:
    seen: list[Any] = []
    Rules().use(lambda _, facts: seen.append(facts)).classify(Answered(500), time.time())
    text = section(RULES, "Rules of your own")
    listed = re.search(r"`facts` has (.*?)\. A", " ".join(text.split()))
    assert listed
    names = re.findall(r"`(\w+)`", listed[1])
    assert len(names) > 8
    assert all(hasattr(seen[0], name) for name in names)


def test_the_example_of_a_limit_is_one_paid_call_for_twenty_presses(texts: dict[str, Any]) -> None:
    with pytest.raises(Answered):
        texts["summarise"].delay(7)
    for document in [7] * 19 + [8]:
        with pytest.raises(CoolingDown, match=r"^Retry available in 5 minutes") as refused:
            texts["summarise"].delay(document)
    assert 280 < refused.value.retry_after <= 290 * 1.02
    assert (refused.value.reason, refused.value.rule) == ("rate_limited", "rate-limited")
    assert refused.value.retry_at == pytest.approx(time.time() + refused.value.retry_after, abs=5)
    assert texts["paid"] == [("gpt-5", 7)]
    assert texts["what_to_show"](7) == texts["what_to_show"](8) == "Retry available in 5 minutes"
    assert OperatorClient.from_app(texts["app"]).open_group("openai:gpt-5")
    texts["world"]["answer"] = "All is well."
    assert texts["summarise"].delay(7).get() == texts["summarise"].delay(7).get() == "All is well."
    assert len(texts["paid"]) == 2
    assert texts["what_to_show"](7) == "Done"


def test_the_rules_of_the_example_do_what_the_page_says(texts: dict[str, Any]) -> None:
    rules, now = texts["RULES"], time.time()
    assert rules is texts["send_order"].lease_options.failures.rules
    pending = Answered(404)
    pending.args = ("order 7: sync pending",)
    by_hook = rules.classify(pending, now)
    assert (by_hook.rule, by_hook.action.kind, by_hook.delay) == ("user: ask_the_shop", "retry", 20)
    gone = rules.classify(Answered(404), now)
    assert (gone.rule, gone.action.max, gone.action.then.kind) == (
        "user: status=404",
        3,
        "permanent",
    )
    assert gone.rule in RULES
    declined = type("Declined", (Exception,), {"__module__": "shop.errors"})
    assert rules.classify(declined(), now).action.kind == "permanent"
    quota = rules.classify(Answered(400, code="quota_for_today"), now)
    assert (quota.rule, quota.action.scope, quota.action.operator) == ("shop quota", "group", True)
    closed = Answered(503, {"retry-after": "5"})
    closed.args = ("down for maintenance",)
    assert rules.classify(closed, now).delay == 900
    assert rules.classify(Answered(429), now).rule == "rate-limited"


def test_what_the_body_asks_for_is_done(texts: dict[str, Any]) -> None:
    send = texts["send_report"]
    for month, draft, message, state in (
        ("2026-01", "missing", "nobody has written it", "failed"),
        ("2026-02", "locked", "Retry available in 10 seconds: .*somebody is saving it", "pending"),
        ("2026-03", "unfinished", "Retry available in 60 minutes: .*draft not ready", "cooling"),
        ("2026-04", "embargoed", "Retry available in 30 minutes: .*not before noon", "pending"),
    ):
        with pytest.raises(celery_leases.errors.LeasesError, match=message):
            send.delay(month, draft)
        status = send.lease_status(month, draft)
        assert status.state == state, draft
        assert status.attempt == (0 if draft == "embargoed" else 1)
        assert status.failures == (1 if draft in ("missing", "unfinished") else 0)
    assert send.delay("2026-05", "ready").get() == "sent"


def test_the_example_that_looks_first_pays_once(texts: dict[str, Any]) -> None:
    with pytest.raises(TimeoutError):
        texts["pay_out"].delay(31, 100)
    status = texts["pay_out"].lease_status(31, 100)
    assert (status.state, status.reason) == ("cooling", "outcome_unknown")
    assert status.error
    assert status.error.ambiguous
    LeaseClient.from_app(texts["app"]).retry("payout:31")
    assert texts["pay_out"].delay(31, 100).get() == {"amount": 100}
    assert list(texts["payments"]) == ["payout:31"]
