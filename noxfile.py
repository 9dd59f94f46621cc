"""The versions this library is tested with: ``nox`` runs them all, ``nox -s lowest`` the oldest of
everything. ``nox -s package installed`` checks what a release uploads.

Every pair of values of two columns stands in some row, except that Python 3.14 has only one, with
the newest of everything. ``nox -l`` lists the rows; what follows ``--`` goes to pytest in place of
the default tests. Rows whose Python is not installed are skipped.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import nox

nox.options.sessions = ["lowest", "versions", "django"]
nox.options.reuse_existing_virtualenvs = True

OLDEST = (
    "celery==5.5.0",
    "kombu==5.5.2",
    "redis==4.6.0",
    "sqlalchemy==2.0.0",
    "psycopg[binary]==3.1.18",
)

CELERY_5_5, CELERY_5_6, CELERY_5_7 = "celery==5.5.*", "celery==5.6.*", "celery==5.7.*"
OLD_ALCHEMY, NEW_ALCHEMY = "sqlalchemy==2.0.*", "sqlalchemy==2.1.*"
# The oldest redis-py that Celery and this library allow together, and the newest, which the
# resolver finds.
OLD_REDIS, OLD_REDIS_5_7, NEW_REDIS = "redis==4.6.0", "redis==6.4.0", "redis"

ROWS = (
    ("3.11", CELERY_5_5, OLD_ALCHEMY, OLD_REDIS),
    ("3.12", CELERY_5_5, NEW_ALCHEMY, NEW_REDIS),
    ("3.13", CELERY_5_5, OLD_ALCHEMY, NEW_REDIS),
    ("3.11", CELERY_5_6, NEW_ALCHEMY, NEW_REDIS),
    ("3.12", CELERY_5_6, OLD_ALCHEMY, OLD_REDIS),
    ("3.13", CELERY_5_6, NEW_ALCHEMY, OLD_REDIS),
    ("3.11", CELERY_5_7, OLD_ALCHEMY, NEW_REDIS),
    ("3.12", CELERY_5_7, NEW_ALCHEMY, OLD_REDIS_5_7),
    ("3.13", CELERY_5_7, OLD_ALCHEMY, OLD_REDIS_5_7),
    ("3.14", CELERY_5_7, NEW_ALCHEMY, NEW_REDIS),
)

DJANGOS = (("3.11", "django==5.2.*"), ("3.12", "django==6.0.*"), ("3.13", "django==6.1.*"))
"""Each release of Django that is supported, with a Python that it runs on."""

OF_DJANGO = ("tests/integration/test_django_project.py", "tests/unit/test_django_databases.py")

SEAM = (
    "tests/unit",
    "tests/integration/test_one_body.py",
    "tests/integration/test_canvas.py",
    "tests/crash/test_terminations.py",
)
"""The tests that see the difference between two versions: the rules, and what lies between us and
Celery.
"""

SAME_EVERYWHERE = """
    call_group chosen_combinations claim_rules claimed_rows combinations copies dead_test_process
    decisions delays docs docs_delivery docs_failures docs_running drill durations error_facts
    errors failures groups hostile_errors imports interleavings kills_between_steps ops
    option_defaults options outcomes performance_page play policies redaction release rerun
    rule_syntax rules sequences status_messages tune_command tuning typing waiting
""".split()  # noqa: SIM905 - shorter
"""The files of tests/unit that see a difference between two Pythons at most: pure functions, pages,
and our own tools.
"""

MORE = (
    "tests/contract",
    "tests/integration/test_control_flow.py",
    "tests/integration/test_pools.py",
    "tests/integration/test_effects.py",
    "tests/integration/test_transactions.py",
    "tests/crash/test_kills.py",
    "tests/crash/test_kill_timer.py",
    "tests/crash/test_interruptions.py",
)


def _named(row: tuple[str, ...]) -> str:
    python, celery, alchemy, redis = (pin.removesuffix(".*") for pin in row)
    return f"{python} {celery} {alchemy} {'new' if redis == NEW_REDIS else 'old'}-redis"


def _test(session: nox.Session, pins: tuple[str, ...], tests: tuple[str, ...]) -> None:
    session.install("--upgrade", "pip>=25.1")
    session.install("--editable", ".", "--group", "test", *pins)
    session.run("python", "-m", "pytest", "--processes", "4", *(session.posargs or tests))


@nox.session(python="3.11")
def lowest(session: nox.Session) -> None:
    """The oldest release of everything that the package allows."""
    ignored = (f"--ignore=tests/unit/test_{name}.py" for name in SAME_EVERYWHERE)
    _test(session, OLDEST, (*SEAM, *ignored))


@nox.session
@nox.parametrize("python,celery,alchemy,redis", ROWS, ids=[_named(row) for row in ROWS])
def versions(session: nox.Session, celery: str, alchemy: str, redis: str) -> None:
    """One row of the matrix."""
    _test(session, (celery, alchemy, redis), SEAM + MORE)


@nox.session
@nox.parametrize("python,release", DJANGOS, ids=[f"{row[0]} {row[1][:-2]}" for row in DJANGOS])
def django(session: nox.Session, release: str) -> None:
    """One release of Django."""
    _test(session, (release,), OF_DJANGO)


# -- what a release uploads ------------------------------------------------------------------------

DIST = Path("dist")
TOOL = (sys.executable, "-m")
"""Runs the tools of the environment of nox, which the installed package must not see."""


@nox.session(venv_backend="none")
def package(session: nox.Session) -> None:
    """Build the wheel and the sdist, and check their metadata and files. The version, the changelog
    and the documentation must agree, with the tag in the arguments too.
    """
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    for problem in _disagreements(project["version"], session.posargs):
        session.error(problem)
    shutil.rmtree(DIST, ignore_errors=True)
    session.run(*TOOL, "build", "--outdir", str(DIST), silent=True)
    wheel, sdist = _built("*.whl"), _built("*.tar.gz")
    session.run(*TOOL, "twine", "check", "--strict", str(wheel), str(sdist))
    tracked = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True)
    ours = {name for name in tracked.stdout.split("\n") if name and not name.startswith(".")}
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    _compare(session, wheel, names, {name for name in ours if name.startswith("celery_leases/")})
    with tarfile.open(sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    _compare(session, sdist, names - {"PKG-INFO", ".gitignore"}, ours)


@nox.session(reuse_venv=False)
@nox.parametrize("kind", ["*.whl", "*.tar.gz"], ids=["wheel", "sdist"])
@nox.parametrize("pins", [OLDEST[:-1], ()], ids=["oldest", "newest"])
def installed(session: nox.Session, kind: str, pins: tuple[str, ...]) -> None:
    """Install one of the two into an empty environment, and do what the README says."""
    session.install(str(_built(kind)), *pins)
    readme, quickstart = Path("README.md").resolve(), Path("tests/quickstart.py").resolve()
    session.chdir(session.create_tmp())  # where the checkout cannot be imported
    session.run("python", str(quickstart), str(readme))
    if kind == "*.whl" and not pins:
        place = session.virtualenv.location
        found = Path(session.invoked_from) / "build" / "sbom.cdx.json"
        found.parent.mkdir(exist_ok=True)
        options = ("--output-reproducible", "--output-file", str(found))
        session.run(*TOOL, "cyclonedx_py", "environment", *options, place, external=True)


def _built(kind: str) -> Path:
    (path,) = DIST.glob(kind)
    return path.resolve()


def _compare(session: nox.Session, path: Path, names: set[str], expected: set[str]) -> None:
    if names != expected:
        missing, foreign = sorted(expected - names), sorted(names - expected)
        session.error(f"{path.name}: missing {missing}, not in git {foreign}")


def _disagreements(version: str, tags: list[str]) -> list[str]:
    """What is of another version than *version*. A released one has a date in the changelog, and
    no page says what to do before it.
    """
    found = []
    in_code = re.search(r'^RELEASE: Final = "(.+)"$', SCHEMA.read_text(), re.MULTILINE)
    if in_code is None or in_code[1] != version:
        found.append(f"{SCHEMA}: RELEASE is not {version!r}, the version in pyproject.toml")
    head = re.findall(r"^## \[.*$", Path("CHANGELOG.md").read_text(), re.MULTILINE)[0]
    released = head != "## [Unreleased]"
    if released and not re.fullmatch(rf"## \[{re.escape(version)}\] - \d{{4}}(-\d\d){{2}}", head):
        found.append(f"CHANGELOG.md: write '## [{version}] - ' and the date as its first heading")
    if tags and (tags != [f"v{version}"] or not released):
        found.append(f"{tags} is not v{version}, or the changelog has no date for it")
    pages = [Path("README.md"), *sorted(Path("docs").rglob("*.md"))] if released else []
    for page in pages:
        found += [f"{page}: {text}" for text in BEFORE.findall(page.read_text())]
    return found


SCHEMA = Path("celery_leases/stores/sql/schema.py")
BEFORE = re.compile(r".*(?:once it is released|[Bb]efore the (?:first )?release|Until a package).*")
"""What the pages say as long as there is no release."""
