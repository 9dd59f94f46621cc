"""``celery -A … leases …`` about failures, as an operator types it: explain, retry, groups, and
keys that wait.
"""

import json
from typing import Any

import pytest

from celery_leases import CoolingDown
from tests.integration.conftest import MakeStage
from tests.integration.cooldowns import COOLING, OK, refusal
from tests.integration.deployments import REDIS_REDIS_POSTGRES, Stage, got
from tests.integration.terminal import Terminal
from tests.support.records import assert_has


@pytest.fixture(scope="module")
def module_stage(stage_factory: MakeStage) -> Stage:
    """One worker; the stores' own behaviour is shown elsewhere."""
    return stage_factory(REDIS_REDIS_POSTGRES, home=COOLING, worker={"concurrency": 1})


@pytest.fixture(scope="module")
def operator(module_stage: Stage) -> Terminal:
    return Terminal(COOLING, module_stage.env)


def test_explain_shows_which_rule_matches_a_failure_and_what_follows(operator: Terminal) -> None:
    lines = operator.sees("explain", "--status", "429", "--header", "retry-after=37").splitlines()
    assert lines[0] == "rate-limited: status 429"
    text = "\n".join(lines)
    assert "37 s by retry-after" in text
    assert "cooldown of 37 to 41 s" in text

    told = operator.reads("explain", "--task", f"{COOLING}.asks_together", "--status", "429")
    assert_has(told, rule="rate-limited", action="cooldown", reason="rate_limited")
    assert told["whose_wait"] == "all keys of {url}"
    assert told["failures"] == [f"cooldown of {seconds} s" for seconds in (30, 60, 120)]

    told = operator.reads("explain", "--task", f"{COOLING}.firm", "--exc", "UnicodeDecodeError")
    assert (told["rule"], told["action"]) == ("no such document", "permanent")
    assert told["failures"] == ["failed for good (refused)"]

    told = operator.reads("explain", "--task", f"{COOLING}.repeatable", "--exc", "TimeoutError")
    assert (told["rule"], told["reason"]) == ("outcome-unknown", "outcome_unknown")
    assert told["failures"][0].startswith("quick retry")


@pytest.mark.parametrize(
    ("words", "code", "answer"),
    [
        (("explain",), 2, "describe the failure"),
        (("explain", "--status", "99"), 2, "--status"),
        (("explain", "--header", "retry-after"), 2, "is not NAME=VALUE"),
        (
            ("explain", "--status", "429", "--task", "nobody"),
            2,
            f"its leased tasks are {COOLING}.asks",
        ),
        (("explain", "--exc", "os.path"), 2, "is not an exception class"),
        (("group", "close", "model", "--for", "soon"), 2, "'soon' is not usable"),
        (("group", "close"), 2, "GROUP"),
        (("retry", "nothing"), 1, "nothing"),
        (("list", "--state", "sleeping"), 2, "sleeping"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_a_word_of_help(
    operator: Terminal, words: tuple[str, ...], code: int, answer: str
) -> None:
    done = operator.types(*words)
    assert (done.returncode, done.stdout) == (code, "")
    assert answer in done.stderr
    assert "Traceback" not in done.stderr


def test_a_cooling_key_is_listed_and_retried(stage: Stage, operator: Terminal, name: str) -> None:
    script = [["cooldown", 300, "draft not ready"], OK]
    with pytest.raises(CoolingDown, match="Retry available in 5 minutes"):
        got(stage.tasks.slow.delay(name, script))
    key = f"slow:{name}"
    (listed,) = [
        row for row in operator.reads_lines("list", "--state", "cooling") if row["key"] == key
    ]
    assert (listed["reason"], listed["failures"]) == ("asked", 1)
    (line,) = [line for line in operator.sees("list").splitlines() if key in line]
    assert line.split()[0] == "cooling"
    assert "when called, in 4m" in line
    shown = operator.sees("show", key)
    assert shown.splitlines()[0] == "Retry available in 5 minutes"
    assert "draft not ready" in shown

    done = operator.types("retry", key, "--json")
    assert done.returncode == 0
    assert "no message was published" in done.stderr
    let_go = json.loads(done.stdout)
    assert (let_go["state"], let_go["failures"], let_go["retry_after"]) == ("pending", 0, None)
    assert got(stage.tasks.slow.delay(name, script)) == {"name": name, "paid": 2}
    again = operator.types("retry", key)
    assert again.returncode == 1
    assert "leases forget" in again.stderr


def test_the_group_is_closed_listed_and_opened(stage: Stage, operator: Terminal, name: str) -> None:
    group = f"model-{name}"
    assert f"model-{name}" not in operator.sees("group", "list")
    (closed,) = _about(
        operator.reads_lines("group", "close", group, "--for", "2m", "--why", "invoice overdue"),
        group,
    )
    assert_has(closed, state="closed", error="invoice overdue", reason="asked")
    assert 100 < closed["retry_after"] <= 120
    (line,) = [line for line in operator.sees("group", "list").splitlines() if group in line]
    assert line.split()[0] == "closed"
    assert "2 minutes" in line
    assert "invoice overdue" in line
    (longer,) = _about(operator.reads_lines("group", "close", group, "--for", "1s"), group)
    assert longer["retry_after"] > 60, "a standing time is never cut"

    told = refusal(stage.tasks.gated.delay(name, [OK], group))
    assert (told.reason, told.rule) == ("asked", "operator")
    assert f"cooldown group {group}" in str(told)

    operator.sees("group", "open", group)
    assert got(stage.tasks.gated.delay(name, [OK], group)) == {"name": name, "paid": 1}
    again = operator.types("group", "open", group)
    assert again.returncode == 1
    assert "was already open" in again.stderr


def test_retry_says_that_the_group_is_closed(stage: Stage, operator: Terminal, name: str) -> None:
    group = f"model-{name}"
    with pytest.raises(CoolingDown):
        got(stage.tasks.gated.delay(name, [["cooldown", 300, "quota", "group"]], group))
    done = operator.types("retry", f"gated:{name}")
    assert done.returncode == 0
    assert f"leases group open {group}" in done.stderr


def _about(groups: list[dict[str, Any]], group: str) -> list[dict[str, Any]]:
    return [status for status in groups if status["group"] == group]
