"""What an import loads: a web process and every ``celery`` command pay for it."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest

import celery_leases
from celery_leases import errors
from tests.unit.doc_pages import ROOT


def _loaded_by(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*sys.modules)"
    return set(
        subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True
        ).stdout.split()
    )


@pytest.mark.parametrize("name", ["LeasedTask", "LeaseClient"])
def test_an_import_loads_no_driver_and_not_celerys_worker(name: str) -> None:
    loaded = _loaded_by(f"from celery_leases import {name}")
    assert not {"sqlalchemy", "redis", "celery.worker.request", "celery.worker.consumer"} & loaded
    assert f"celery_leases.{'task' if name == 'LeasedTask' else 'client'}" in loaded


def test_a_task_class_loads_nothing_that_runs_tasks() -> None:
    loaded = _loaded_by("from celery_leases import LeasedTask")
    assert (
        not {
            "celery_leases.attempt.run",
            "celery_leases.record",
            "celery_leases.text.redaction",
        }
        & loaded
    )


def test_a_celery_command_loads_none_of_ours() -> None:
    loaded = _loaded_by("from celery_leases.cli import leases")
    assert not {"celery_leases.ops", "celery_leases.cli.show"} & loaded


def test_a_client_does_not_need_celery() -> None:
    assert "celery" not in _loaded_by("from celery_leases import LeaseClient")


def test_the_contracts_about_frameworks_forget_no_package() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    contracts = {one["id"]: one for one in project["tool"]["importlinter"]["contracts"]}
    layers = contracts["layers"]["layers"]
    below = layers[layers.index("signals") + 1 :]

    def those(names: list[str]) -> set[str]:
        return {f"celery_leases.{name}" for layer in names for name in re.findall(r"\w+", layer)}

    assert set(contracts["celery"]["source_modules"]) == those(below)
    free = those(["alembic", "stores", "testing"])
    assert set(contracts["drivers"]["source_modules"]) == those(layers) - free


def test_every_public_name_can_be_imported_and_is_listed() -> None:
    assert all(getattr(celery_leases, name) is not None for name in celery_leases.__all__)
    assert set(celery_leases.__all__) <= set(dir(celery_leases))
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = celery_leases.no_such_name


def test_every_exception_is_in_the_module_of_the_exceptions() -> None:
    kinds = [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, BaseException)
    ]
    defined = {kind.__name__ for kind in kinds if not kind.__name__.startswith("_")}
    internal = {"DescribedError", "RecordUnreadable", "ValueRefused"}
    assert defined - internal == set(errors.__all__)
    assert {kind.__module__ for kind in kinds if kind.__name__ in errors.__all__} == {
        errors.__name__
    }


def test_each_name_of_the_package_in_a_docstring_exists() -> None:
    """Those with their module."""
    text = "".join(path.read_text() for path in (ROOT / "celery_leases").rglob("*.py"))
    names = {*re.findall(r":\w+:`~?(celery_leases\.[\w.]+)`", text)}
    assert len(names) > 50
    assert [name for name in sorted(names) if not _exists(name)] == []


def _exists(name: str) -> bool:
    parts = name.split(".")
    for place in range(len(parts), 0, -1):
        with suppress(ImportError):
            found: object = import_module(".".join(parts[:place]))
            break
    for part in parts[place:]:
        found = getattr(found, part, None) or getattr(found, "__annotations__", {}).get(part)
    return found is not None
