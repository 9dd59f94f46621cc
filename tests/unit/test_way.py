"""The way of one call is short: a reader of a delivery meets few files and functions."""

import gc
import math
import sys
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from celery import Celery, signals

from celery_leases import LeasedTask
from celery_leases.attempt.held_lease import HeldLease
from celery_leases.attempt.process import Process
from celery_leases.concurrency import wait_limit
from celery_leases.testing.waits import wait_until
from celery_leases.tracing import SDK
from celery_leases.worker.processes import process_of
from tests.unit.celery_apps import apps
from tests.unit.decision_inputs import a_call
from tests.unit.doc_pages import ROOT

PACKAGE = f"{ROOT / 'celery_leases'}/"
MOST = {"files": 18, "functions": 90, "changes of file": 46, "classes": 29}
"""Lower these when they fall. In Python 3.11 a comprehension is a function too."""


def hold_another_lease(process: Process) -> None:
    """Let the threads of the renewer wait for another lease, so that no call must wake them."""
    renewer = process.renewer
    renewer.add(HeldLease(a_call(token="another"), process.clock.now(), process.clock))
    wait_until(
        lambda: max(renewer._renewal_wakes_at, renewer._deadline_wakes_at) < math.inf,
        10.0,
        "the threads of the renewer to wait for the lease",
    )


@pytest.mark.usefixtures(apps.__name__)
def test_a_first_run_with_database_leases_enters_few_files_and_functions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Other tests in this process have set these off, and have connected receivers.
    monkeypatch.setattr(signals.task_success, "receivers", [])
    monkeypatch.setattr(signals.task_success, "sender_receivers_cache", {})
    monkeypatch.setattr(wait_limit, "in_use", False)
    monkeypatch.delitem(sys.modules, SDK, raising=False)
    app = Celery("way", broker="memory://", backend="cache+memory://")
    app.conf.update(
        leases_eager_stores=True,
        task_always_eager=True,
        leases_url="database",
        leases_database_url=f"sqlite:///{tmp_path / 'records.db'}",
    )

    @app.task(base=LeasedTask, lease_key="invoice:{customer}", shared=False)
    def send(customer: int) -> dict[str, int]:
        return {"customer": customer}

    entered: list[tuple[str, str]] = []

    met: set[type] = set()

    def note(frame: FrameType, event: str, given: Any) -> None:
        if event in ("call", "return") and frame.f_code.co_filename.startswith(PACKAGE):
            if event == "call":
                entered.append((frame.f_code.co_filename, frame.f_code.co_qualname))
            met.update(type(value) for value in (*frame.f_locals.values(), given))

    for customer in range(2):  # makes what a process makes once
        send.apply(args=[customer]).get()
    hold_another_lease(process_of(app, eager=True))
    before = sys.getprofile()
    gc.disable()  # a collection calls finalizers
    sys.setprofile(note)
    try:
        send.apply(args=[2])
    finally:
        sys.setprofile(before)
        gc.enable()
    found = {
        "files": len({file for file, _ in entered}),
        "functions": len(set(entered)),
        "changes of file": sum(one[0] != other[0] for one, other in pairwise(entered)),
        "classes": sum(each.__module__.startswith("celery_leases.") for each in met),
    }
    assert found["functions"] > 50, "the delivery is traced"
    on_the_way = sorted({file.removeprefix(PACKAGE) for file, _ in entered})
    assert all(found[name] <= most for name, most in MOST.items()), f"{found}: {on_the_way}"
