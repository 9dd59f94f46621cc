"""Chains, groups and chords whose member dies between its done record and its callbacks.

The window: Celery sends the callbacks of a call, then we mark them as out. A worker that dies in
between leaves no trace of them, so the redelivered call sends them once more. (Where only the pool
child dies there, Celery's main process finds SUCCESS in the result backend and acknowledges:
nothing is sent again. So the whole worker is killed.) Leased callbacks run once all the same, as
the second message is a copy of the first by id; a callback *without* a lease may run twice, and
never more often than the process died there.
"""

from itertools import product

import pytest
from celery import chord, group

from celery_leases.testing.waits import wait_until
from tests.crash.conftest import MakeScene
from tests.crash.crash_deployments import FAILING, Scene
from tests.integration.deployments import BOTH_WAYS, spelled

WINDOWS = ("after release", "after callbacks")


def _named(value: str | tuple[str, ...]) -> str:
    return value if isinstance(value, str) else spelled(value)


EVERY = pytest.mark.parametrize(
    ("combination", "window"), list(product(BOTH_WAYS, WINDOWS)), ids=_named
)
PAIRED = pytest.mark.parametrize(
    ("combination", "window"), list(zip(BOTH_WAYS, WINDOWS, strict=True)), ids=_named
)
CROSSED = pytest.mark.parametrize(
    ("combination", "window"), list(zip(BOTH_WAYS, reversed(WINDOWS), strict=True)), ids=_named
)


def fail(scene: Scene, window: str) -> None:
    """Let a process die in the window; the scene's first worker gets the message."""
    dying = scene.another(env=scene.failpoint(window))
    scene.wait_until_failed(window)
    if window == "after callbacks":
        dying.wait(20)
        scene.start()


def answered_again(scene: Scene) -> None:
    """Wait until the redelivered member got the saved result and is gone."""
    wait_until(
        lambda: bool(scene.log("answered with the saved result")),
        30,
        "the answer to the redelivered member",
    )
    scene.wait_until_drained()


@EVERY
def test_a_chain_goes_on_with_the_first_result(
    scene_factory: MakeScene, name: str, window: str
) -> None:
    """The plain link runs once where the callbacks were not out yet, else at most twice."""
    scene = scene_factory(module=FAILING, start=False)
    tasks = scene.tasks
    signature = tasks.work.s(name, answer=name)
    signature.link(tasks.plain.s())
    result = (signature | tasks.leased_link.s() | tasks.plain.s()).apply_async()
    fail(scene, window)
    assert result.get(timeout=40) == name
    answered_again(scene)
    assert len(scene.events("begin", name=name)) == 1
    assert len(scene.events("leased_link")) == 1
    linked = len(scene.events("plain"))
    # Two plain callbacks: the link, sent twice at most; and the end of the chain, sent once per
    # answer of the link.
    assert linked == 2 if window == "after release" else 3 <= linked <= 4
    scene.done_once("work", name)


@PAIRED
def test_a_group_completes_with_the_first_results(
    scene_factory: MakeScene, name: str, window: str
) -> None:
    scene = scene_factory(module=FAILING, start=False)
    names = [f"{name}{number}" for number in range(3)]
    result = group(scene.tasks.work.s(each) for each in names).apply_async()
    fail(scene, window)
    values = result.get(timeout=40)
    answered_again(scene)
    for each, value in zip(names, values, strict=True):
        (begun,) = scene.events("begin", name=each)
        assert value == {"name": each, "fence": begun["fence"]}
        scene.done_once("work", each)


@CROSSED
def test_a_chord_counts_its_member_once(scene_factory: MakeScene, name: str, window: str) -> None:
    scene = scene_factory(module=FAILING, start=False)
    names = [f"{name}{number}" for number in range(3)]
    result = chord(
        [scene.tasks.work.s(each, answer=each) for each in names], scene.tasks.gather.s()
    ).apply_async()
    fail(scene, window)
    assert result.get(timeout=40) == names
    answered_again(scene)
    assert len(scene.events("gather")) == 1
    for each in names:
        assert len(scene.events("begin", name=each)) == 1
        scene.done_once("work", each)
