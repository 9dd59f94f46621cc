"""What a release needs: valid workflows, the versions that were tested, one version everywhere."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from ruamel.yaml import YAML

from tests.unit.doc_pages import ROOT, markdown_rows, page

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


@pytest.fixture(scope="module")
def noxfile() -> ModuleType:
    """The module ``noxfile.py``."""
    pytest.importorskip("nox")
    return __import__("noxfile")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_is_valid_and_its_actions_are_pinned(path: Path) -> None:
    command = (sys.executable, "-m", "check_jsonschema", "--builtin-schema")
    done = subprocess.run(
        [*command, "vendor.github-workflows", str(path)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    text = path.read_text()
    assert text.count("uses: ") == len(re.findall(r"uses: [\w/-]+@[0-9a-f]{40} # v\d", text))


def test_only_the_upload_may_sign_and_it_runs_no_code_of_the_checkout() -> None:
    release = YAML(typ="safe").load(ROOT / ".github/workflows/release.yml")
    assert release["permissions"] == {"contents": "read"}
    jobs = release["jobs"]
    assert [name for name, job in jobs.items() if "permissions" in job] == ["publish"]
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert [step["uses"].partition("@")[0] for step in jobs["publish"]["steps"]] == [
        "actions/download-artifact",
        "pypa/gh-action-pypi-publish",
    ]


def test_the_supported_versions_are_those_that_nox_runs(noxfile: ModuleType) -> None:
    rows = {row[0]: re.findall(r"\d+\.\d+", row[1]) for row in markdown_rows(page("versions"))}
    pythons, celeries, alchemies, _ = zip(*noxfile.ROWS, strict=True)

    def series(pins: tuple[str, ...]) -> list[str]:
        return sorted(set(re.findall(r"==(\d+\.\d+)", " ".join(pins))))

    assert rows["Python"] == sorted(set(pythons))
    assert rows["Celery"] == series(celeries)
    assert rows["SQLAlchemy"] == series(alchemies)
    assert rows["Django"] == series(tuple(release for _, release in noxfile.DJANGOS))
    assert rows["redis-py"] == ["4.6"] == series((noxfile.OLD_REDIS,))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    classified = re.findall(r"Python :: (3\.\d+)", " ".join(project["classifiers"]))
    assert rows["Python"] == classified
    for low, name in ((celeries[0], "celery[redis]"), (alchemies[0], "sqlalchemy")):
        (bound,) = (one for one in project["dependencies"] if one.startswith(name))
        assert bound.startswith(f"{name}>={series((low,))[0]}")


RELEASED = ("## [Unreleased]", "## [0.1.0] - 2026-12-01")


@pytest.mark.parametrize(
    ("file", "old", "new", "tag", "expected"),
    [
        ("README.md", "", "", [], []),
        ("README.md", "", "", ["v0.1.0"], ["['v0.1.0'] is not v0.1.0, or the changelog"]),
        ("CHANGELOG.md", *RELEASED, ["v0.1.0"], []),
        ("CHANGELOG.md", *RELEASED, ["v0.1.1"], ["['v0.1.1'] is not v0.1.0"]),
        ("CHANGELOG.md", RELEASED[0], "## [0.1.1] - 2026-12-01", [], ["CHANGELOG.md: write"]),
        ("CHANGELOG.md", RELEASED[0], "## [0.1.0]", [], ["CHANGELOG.md: write"]),
        ("celery_leases/stores/sql/schema.py", '"0.1.0"', '"0.1.1"', [], ["celery_leases"]),
    ],
)
def test_a_release_has_one_version(
    noxfile: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    file: str, old: str, new: str, tag: list[str], expected: list[str],
) -> None:  # fmt: skip
    for name in ("README.md", "CHANGELOG.md", str(noxfile.SCHEMA)):
        text = (ROOT / name).read_text() if name != "README.md" else "pip install celery-leases"
        copy = tmp_path / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(text.replace(old, new) if old and name == file else text)
    monkeypatch.chdir(tmp_path)
    found = noxfile._disagreements("0.1.0", tag)
    assert [one[: len(start)] for one, start in zip(found, expected, strict=True)] == expected


def test_a_released_version_has_no_page_for_the_time_before(
    noxfile: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("README.md", str(noxfile.SCHEMA), "docs/tutorial/first-task.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    (tmp_path / "CHANGELOG.md").write_text(RELEASED[1])
    monkeypatch.chdir(tmp_path)
    found = noxfile._disagreements("0.1.0", [])
    assert {one.partition(":")[0] for one in found} == {"README.md", "docs/tutorial/first-task.md"}
