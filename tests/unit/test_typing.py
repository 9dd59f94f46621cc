"""A user's project under ``mypy --strict``, with the stubs that celery-types has for Celery."""

import ast
import inspect
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from celery_leases import LeasedMixin, LeasedTask, leased_task
from celery_leases.body.null_lease import Unleased
from celery_leases.lease import Lease
from celery_leases.options import APP_ONLY, OPTION_NAMES, TaskOptions
from tests.unit.celery_apps import apps

PROJECT = """
from typing import Any, assert_type

from celery import Celery, Task
from celery.result import AsyncResult
from celery_leases import Group, LeasedMixin, LeasedTask, leased_task
from celery_leases.lease import Lease
from celery_leases.options import TaskOptions
from celery_leases.status import LeaseStatus

app = Celery("typed", broker="memory://")
OPTIONS: TaskOptions = {"lease_key": "{number}", "lease_ttl": "30s", "queue": "slow"}


class MyTask(LeasedMixin, Task[Any, Any]):
    abstract = True
    lease_ttl = 30
    lease_key = "other:{number}"


@app.task(base=LeasedTask, bind=True, lease_key="invoice:{number}")
def send(self: LeasedTask, number: int) -> float:
    assert_type(self.lease, Lease)
    self.lease.check()
    return self.lease.remaining()


@app.task(base=MyTask, bind=True)
def other(self: MyTask, number: int) -> bool:
    self.lease.check()
    return self.lease.held


@leased_task(app, bind=True, **OPTIONS)
def bound(self: LeasedTask, number: int, note: str = "") -> float:
    assert_type([each for each in self.lease.each([1])], list[int])
    return self.lease.remaining()


@leased_task(lease_key=lambda number: str(number), lease_group=Group("g", limit=2), max_retries=3)
def shared(number: int) -> str:
    return ""


@leased_task(app, bind=True, base=MyTask)
def based(self: MyTask, number: int) -> None:
    self.lease.check()


send.delay(1)
other.apply_async((1,))
based.delay(1)
assert_type(bound.delay(1, note="x"), AsyncResult[float])
assert_type(bound.apply_async((1,)).get(), float)
assert_type(shared.delay(1).get(), str)
assert_type(shared(1), str)
assert_type(shared.lease_status(1), LeaseStatus)
shared.delay_on_commit(1)
shared.delay_in(None, 1)
"""

MISTAKES = """
from celery import Celery
from celery_leases import LeasedTask, leased_task
from celery_leases.options import TaskOptions

app = Celery("typed", broker="memory://")


@leased_task(app, bind=True)
def bound(self: LeasedTask, number: int) -> float:
    self.lease.chek()  # wrong
    return 0.0


bound.delay("wrong")  # wrong
bound.delay(numbr=1)  # wrong
bound.delay_on_commit("wrong")  # wrong
bound.lease_status()  # wrong
text: str = bound.delay(1).get()  # wrong
app.task(bind=True)(leased_task(app, lease_ttl=[]))  # wrong
leased_task(app, lease_tll="5m")  # wrong
leased_task(app, lease_runs="twice")  # wrong
leased_task(app, lease_outbox=True)  # wrong
leased_task(app, lease_fingerprint="month")  # wrong
leased_task(app, lease_failures=5)  # wrong
options: TaskOptions = {"lease_on_done": "again"}  # wrong


class Mine(LeasedTask):
    lease_on_lost = "explode"  # wrong
"""

FROZEN = """
from celery_leases.decide.answers import Acquired
from celery_leases.record import Record


def change(acquired: Acquired, record: Record) -> None:
    acquired.record = record
"""
"""An assignment to a value that only the type checker guards."""


@pytest.mark.timeout(300)
def test_a_project_with_celery_types_is_checked_without_errors(tmp_path: Path) -> None:
    for name in ("mypy", "celery-types"):
        try:
            version(name)
        except PackageNotFoundError:
            pytest.skip(f"{name} is not installed: it is in the dependency group lint")
    (tmp_path / "project.py").write_text(PROJECT)
    (tmp_path / "mistakes.py").write_text(MISTAKES)
    (tmp_path / "frozen.py").write_text(FROZEN)
    command = [
        sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"),
        "project.py", "mistakes.py", "frozen.py",
    ]  # fmt: skip
    checked = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    found = re.findall(r"^(\w+)\.py:(\d+): error: (.*)", checked.stdout, re.MULTILINE)
    assert not [error for error in found if error[0] == "project"], checked.stdout + checked.stderr
    wrong = {
        number for number, line in enumerate(MISTAKES.splitlines(), 1) if line.endswith("# wrong")
    }
    assert {int(number) for file, number, _ in found if file == "mistakes"} == wrong, checked.stdout
    frozen = [text for file, _, text in found if file == "frozen"]
    assert len(frozen) == 1
    assert "read-only" in frozen[0]


def test_the_options_are_those_of_registration() -> None:
    typed = set(TaskOptions.__annotations__)
    assert {name for name in typed if name.startswith("lease")} == {
        f"lease_{name}" for name in OPTION_NAMES if name not in APP_ONLY
    }


def test_a_class_may_set_the_options_with_the_same_types() -> None:
    tree = ast.parse(inspect.getsource(LeasedMixin))
    declared = {
        node.target.id: ast.unparse(node.annotation).replace("types.", "")
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    for name, hint in TaskOptions.__annotations__.items():
        if name.startswith("lease_"):
            assert declared[name] == f"ClassVar[{hint.__forward_arg__}]", name


@pytest.mark.usefixtures(apps.__name__)
def test_the_decorator_registers_a_leased_task_of_its_app() -> None:
    app = Celery("typed", broker="memory://")
    app.conf.update(task_always_eager=True)

    @leased_task(app, bind=True, lease_key="{number}", shared=False)  # type: ignore[call-overload]
    def double(self: LeasedTask, number: int) -> int:
        assert self.lease.key
        return 2 * number

    assert app.tasks[double.name].lease_options.key == "{number}"
    assert double.delay(4).get() == 8
    assert LeasedTask[[int], int].__origin__ is LeasedTask  # type: ignore[attr-defined]


def test_what_stands_for_a_lease_has_all_that_a_body_may_use() -> None:
    def public(kind: type) -> dict[str, Any]:
        return {name: getattr(kind, name) for name in dir(kind) if not name.startswith("_")}

    attributes = {"key", "token", "fence", "attempt", "previous"}  # set by Lease.__init__
    assert public(Unleased).keys() == public(Lease).keys() | attributes
    for name, method in public(Lease).items():
        if callable(method):
            given = inspect.signature(getattr(Unleased, name)).parameters
            assert list(given) == list(inspect.signature(method).parameters), name
