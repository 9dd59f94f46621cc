"""The alert rules and the dashboard in ops/: what they ask is what the exporter has, and the alerts
are silent on a healthy run and fire on sick ones.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from celery_leases.ops.gauges import GAUGES
from celery_leases.ops.metrics import METRICS, PREFIX
from tests.unit.doc_pages import markdown_rows, page, section

OPS = Path(__file__).parents[2] / "ops"
RULES = OPS / "prometheus" / "celery_leases.rules.yml"
TESTS = OPS / "prometheus" / "celery_leases.test.yml"
DASHBOARD = OPS / "grafana" / "celery_leases.json"

LABELS = {metric.full_name: {*metric.labels} for metric in METRICS.values()} | {
    f"{PREFIX}{name}": set[str]() for name in GAUGES
}
LABELS[f"{PREFIX}records"], LABELS[f"{PREFIX}groups"] = {"task", "state"}, {"state"}
SAMPLES = {
    name: labels
    for name, labels in LABELS.items()
    if name not in {m.full_name for m in METRICS.values() if m.buckets}
} | {
    f"{metric.full_name}{end}": {*metric.labels, *({"le"} if end == "_bucket" else ())}
    for metric in METRICS.values()
    if metric.buckets
    for end in ("_bucket", "_sum", "_count")
}
"""The labels of each sample that the exporter has, by its name."""


def promtool(*words: str) -> None:
    found = shutil.which("promtool")
    if found is None:
        in_ci = os.environ.get("CI", "").lower() in {"1", "true"}
        if in_ci and not os.environ.get("LEASES_NO_PROMTOOL"):
            pytest.fail("missing promtool (a skip on a laptop)", pytrace=False)
        pytest.skip("missing promtool: install Debian's prometheus")
    done = subprocess.run([found, *words], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def alerts() -> list[dict[str, Any]]:
    (group,) = YAML(typ="safe").load(RULES)["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    return rules


def expressions() -> list[str]:
    """All expressions of PromQL in ops/, and the series of the tests."""
    dashboard = json.loads(DASHBOARD.read_text())
    panels = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    variables = [each["query"] for each in dashboard["templating"]["list"]]
    cases = YAML(typ="safe").load(TESTS)["tests"]
    series = [given["series"] for case in cases for given in case["input_series"]]
    return [*panels, *variables, *(rule["expr"] for rule in alerts()), *series]


def test_the_alerts_are_silent_on_a_healthy_run_and_fire_on_sick_ones() -> None:
    tested = TESTS.read_text()
    assert [rule["alert"] for rule in alerts() if f'"{rule["alert"]}"' not in tested] == []
    promtool("check", "rules", str(RULES))
    promtool("test", "rules", str(TESTS))


def test_alerts_and_dashboard_ask_for_what_the_exporter_has() -> None:
    known = set().union(*SAMPLES.values())
    asked = set()
    for expression in expressions():
        for name, labels in re.findall(rf"\b({PREFIX}\w+)\b(?:\{{([^}}]*)\}})?", expression):
            assert name in SAMPLES, expression
            asked.add(name)
            used = set(re.findall(r"(\w+)\s*(?:=|!=|=~|!~)\s*\"", labels))
            assert used <= SAMPLES[name], expression
        for by in re.findall(r"by \(([^)]*)\)", expression):
            assert {label.strip() for label in by.split(",")} <= known, expression
    assert len(asked) > 10


def test_the_dashboard_shows_every_metric() -> None:
    """And nothing lies over something else."""
    text = DASHBOARD.read_text()
    assert [name for name in LABELS if name not in text] == []
    places = [panel["gridPos"] for panel in json.loads(text)["panels"]]
    taken = [
        (x, y)
        for at in places
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(taken) == len(set(taken))
    assert max(x for x, _ in taken) < 24


def test_no_key_is_a_label() -> None:
    assert not {"key", "call_id", "holder", "group"} & set().union(*LABELS.values())
    rows = markdown_rows(section(page("metrics"), "What is measured"))[1:]
    assert {row[0].strip("`"): set(re.findall(r"`(\w+)`", row[1])) for row in rows} == LABELS
