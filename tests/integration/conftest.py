"""Stages: started once per module and combination, because a worker takes a second of a core to start."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from tests.integration.stages import BOTH_WAYS, Stage, spelled

StageFactory = Callable[..., Stage]


@pytest.fixture(scope="module")
def stage_factory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StageFactory]:
    """``stage_factory(combination, **Stage options)`` gives a stage with a running worker until the module ends."""
    stages: list[Stage] = []

    def make(
        combination: tuple[str, ...], *, start: bool = True, urls: Mapping[str, str] | None = None, **options: Any
    ) -> Stage:
        urls = {"redis": request.getfixturevalue("leases_redis").url, **(urls or {})}
        if "rabbit" in combination:
            urls["rabbit"] = request.getfixturevalue("leases_rabbit").url
        if "postgres" in combination and "postgres" not in urls:
            urls["postgres"] = request.getfixturevalue("leases_postgres").new_database()
        stage = Stage(combination, urls, tmp_path_factory.mktemp("stage"), **options)
        stages.append(stage)
        if start:
            stage.worker.start()
        return stage

    yield make
    for stage in stages:
        stage.close()


@pytest.fixture(scope="module", params=BOTH_WAYS, ids=spelled)
def module_stage(request: pytest.FixtureRequest, stage_factory: StageFactory) -> Iterator[Stage]:
    """One stage per module, on both brokers and both lease stores; at its end nothing may be left in the queue."""
    made = stage_factory(request.param)
    yield made
    try:
        if not request.session.testsfailed:
            made.wait_until_drained()
    finally:
        made.close()


@pytest.fixture
def stage(module_stage: Stage, request: pytest.FixtureRequest) -> Iterator[Stage]:
    """The module's stage; the log of a test that failed is shown."""
    module_stage.app.set_current()
    start = len(module_stage.worker.full_log())
    yield module_stage
    request.node.add_report_section("teardown", "log of the worker", module_stage.worker.full_log()[start:])


@pytest.fixture
def name() -> str:
    """A name that no other test uses."""
    return Path(uuid4().hex[:8]).name
