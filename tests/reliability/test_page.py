"""docs/explanation/reliability.md says what the recorded runs have shown."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.mutants.__main__ import modules
from tests.mutants.explained import EXPLAINED, ON_POSTGRESQL
from tests.mutants.mutations import mutations
from tests.reliability import page, runs


@pytest.mark.parametrize("name", page.PARTS)
def test_the_page_agrees_with_the_recorded_run(name: str) -> None:
    assert page.shown(name) == page.PARTS[name](), "write it by python -m tests.reliability"


def test_a_recorded_run_changes_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "page.md"
    shutil.copy(page.PAGE, copy)
    for file in runs.HERE.glob("*.json"):
        shutil.copy(file, tmp_path)
    monkeypatch.setattr(runs, "HERE", tmp_path)
    found = json.loads((tmp_path / "soak.json").read_text())
    found["runs"][0]["longest_overlap"] = 77.7
    runs.record("soak", found)
    page.write(copy)
    assert "77.7 s" in page.shown("page", copy)
    assert "77.7 s" not in page.shown("page")


def test_each_explained_mutation_exists() -> None:
    names = {each.name for module in modules() for each in mutations(module)}
    assert not EXPLAINED.keys() - names
    assert all(any(name.startswith(each) for name in names) for each in ON_POSTGRESQL)
