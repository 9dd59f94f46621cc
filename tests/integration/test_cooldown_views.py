"""What people and programs see of a cooldown: its status elsewhere, errors without secrets,
Celery's task events.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.cooldowns import BROKEN, COOLING, OK, TAKEN, cooled, limited, status
from tests.integration.deployments import BOTH_WAYS, Stage, got, stages, until
from tests.integration.event_watcher import Watcher

SECRETS = ("sk-abcdef0123456789", "hunter2", "AKIA0123456789ABCDEF")
TELLING = "denied for api_key=sk-abcdef0123456789 at https://me:hunter2@pay.example, signed by AKIA0123456789ABCDEF"
LOOK = """
import json, sys
from celery_leases import LeaseClient
client = LeaseClient(sys.argv[1], sys.argv[2])
shown = [(status.as_json(), status.message()) for status in (client.status(**one) for one in json.loads(sys.argv[3]))]
print(json.dumps([shown, [name for name in sys.modules if name == "celery" or name.startswith("tests")]]))
"""


module_stage = stages(*BOTH_WAYS, home=COOLING, worker={"options": ("-E",)}, drained=False)
"""A worker that sends task events."""


def shown_elsewhere(stage: Stage, *asked: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """Status and message of keys, as a process sees them that imports no task."""
    argv = [
        sys.executable,
        "-c",
        LOOK,
        stage.env["LEASES_URL"],
        stage.database_url,
        json.dumps(asked),
    ]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    found, modules = json.loads(done.stdout)
    assert not [name for name in modules if name.startswith("tests")]
    return [(values, message) for values, message in found]


def test_a_web_process_shows_a_closed_group_for_any_key(stage: Stage, name: str) -> None:
    group = f"model-{name}"
    stage.tasks.gated.delay(name, [["cooldown", 300, "too many tokens", "group"]], group)
    stage.wait_for_state("gated", f"gated:{name}", "cooling")
    (failed, message), (other, same) = shown_elsewhere(
        stage,
        {"key": f"gated:{name}", "task": f"{COOLING}.gated"},
        {"key": "gated:nobody", "task": f"{COOLING}.gated", "group": group},
    )
    assert message == same == "Retry available in 5 minutes"
    assert (failed["state"], failed["scope"], failed["group"]) == ("cooling", "group", group)
    assert (other["state"], other["scope"], other["group"]) == ("absent", "group", group)
    assert failed["reason"] == other["reason"] == "asked"
    assert failed["rule"] == other["rule"] == "asked-cooldown"


@pytest.mark.parametrize("task", ["slow", "resumes"])
def test_secrets_in_an_error_are_neither_kept_nor_shown(stage: Stage, name: str, task: str) -> None:
    result = getattr(stage.tasks, task).delay(name, [["raise", "RuntimeError", TELLING], OK])
    row = cooled(stage, task, name)
    shown = status(stage, task, name)
    assert shown.error is not None
    assert "denied for api_key=[redacted]" in shown.error.message
    stage.wait_for_log(result.id, "[redacted]")
    if task == "resumes":
        assert got(result)["paid"] == 2
        stage.wait_for_log(result.id, "will run again")
    ours = "\n".join(told(stage, result.id))
    for secret in SECRETS:
        assert secret not in json.dumps(shown.as_json())
        assert secret not in str(row)
        assert secret not in ours


def told(stage: Stage, call: str) -> list[str]:
    """The log records of ``celery_leases`` about a call, with their tracebacks."""
    lines, ours = [], False
    for line in stage.worker.full_log().splitlines():
        if line.startswith("["):
            ours = f"[{call}] " in line and "] Task " not in line
        if ours:
            lines.append(line)
    return lines


@pytest.fixture
def watcher(stage: Stage) -> Iterator[Watcher]:
    made = Watcher(stage)
    yield made
    made.close()


def test_events_show_cooldowns_and_snoozes(stage: Stage, name: str, watcher: Watcher) -> None:
    gate = stage.gate()
    script = [["snooze", 0.2], TAKEN, limited(2), ["when", str(gate), "ok"]]
    call = stage.tasks.quick.delay(name, script).id
    event = watcher.wait_for("task-cooldown", call)
    assert (event["key"], event["reason"]) == (f"quick:{name}", "rate_limited")
    assert 2.0 <= event["retry_after"] <= 2.2
    stage.wait_for("paid", 4, name=name)
    until(lambda: kinds(watcher, call).count("task-retried") == 2, "both retries")
    assert watcher.state.tasks[call].state in ("RETRY", "STARTED")
    assert watcher.state.tasks[call].retry_after == event["retry_after"]
    ours = [kind for kind in kinds(watcher, call) if kind != "task-retried"]
    assert ours == ["task-snoozed", "task-backoff", "task-cooldown"]
    gate.touch()
    watcher.wait_for("task-succeeded", call)
    assert watcher.state.tasks[call].state == "SUCCESS"


def kinds(watcher: Watcher, call: str) -> list[str]:
    """The events with the reason why a call does not run now."""
    return [
        event["type"]
        for event in watcher.of(call)
        if event["type"] not in ("task-received", "task-started")
    ]


def test_the_event_of_a_call_that_waits_for_another_calls_cooldown_names_it(
    stage: Stage, name: str, watcher: Watcher
) -> None:
    script = [limited(1.8), OK]
    stage.tasks.waits.delay(name, script)
    cooled(stage, "waits", name)
    other = stage.tasks.waits.delay(name, script)
    assert watcher.wait_for("task-cooldown", other.id)["key"] == f"waits:{name}"
    watcher.wait_for("task-succeeded", other.id)

    stopped = stage.tasks.stops.delay(name, [BROKEN])
    assert watcher.wait_for("task-cooldown", stopped.id)["reason"] == "error"
    watcher.wait_for("task-failed", stopped.id)
    assert watcher.state.tasks[stopped.id].state == "FAILURE"
