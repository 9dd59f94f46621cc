"""The versions this library is tested with: ``nox`` runs them all, ``nox -s lowest`` the oldest of
everything.

Every pair of values of two columns stands in some row, except that Python 3.14 has only one, with
the newest of everything. ``nox -l`` lists the rows; what follows ``--`` goes to pytest in place of
the default tests. Rows whose Python is not installed are skipped.
"""

from __future__ import annotations

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
    errors failures gates hostile_errors imports interleavings kills_between_steps ops
    option_defaults options outcomes performance_page play policies redaction rerun rule_syntax
    rules sequences status_messages tune_command tuning typing waiting
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
