"""What is played while a connection is cut: the deliveries of one key, and what must come of them.

In each of them no process is killed unless it says so, and no lease can expire: so a body runs as
often as without the cut.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from celery_leases.errors import LeaseHeld
from celery_leases.keys import stored_key
from celery_leases.outbox import calls as outbox
from celery_leases.testing.waits import wait_until
from tests.integration.deployments import Stage

PATIENCE = 40.0
"""Seconds until a call is lost."""
SOON = 5.0
"""Seconds after which a message is late, and a relay or rescue publishes it."""


@dataclass(frozen=True)
class Scenario:
    """*prepare* happens before the cut, *play* while it may happen.

    *begins*: how often the body may begin. *charges* and *invoices*: how often the outside world
    must have been changed. *killed*: how many processes are killed.
    """

    name: str
    task: str
    play: Callable[[Stage, str, Any], None]
    prepare: Callable[[Stage, str], Any] = lambda _stage, _name: None
    begins: tuple[int, ...] = (1,)
    charges: int = 0
    invoices: int = 0

    @property
    def publishes(self) -> bool:
        """Whether its message is in a record, so that it may not be lost at the publisher either.

        Of plain calls, a broker that is cut off loses what Celery believes to be published.
        """
        return self.task in ("once", "kept")


def _call(stage: Stage, task: str, name: str, way: str = "ok", **options: Any) -> Any:
    return getattr(stage.tasks, task).delay(name, way, **options)


def _get(result: Any, timeout: float = PATIENCE) -> Any:
    return result.get(timeout=timeout, interval=0.05)


def _run(way: str = "ok") -> Callable[[Stage, str, Any], None]:
    def play(stage: Stage, name: str, _: Any) -> None:
        _get(_call(stage, "play", name, way))

    return play


def _done(stage: Stage, name: str) -> None:
    _get(_call(stage, "play", name))


def _held(task: str) -> Callable[[Stage, str], Any]:
    def prepare(stage: Stage, name: str) -> Any:
        gate = stage.gate()
        first = _call(stage, task, name, gate=str(gate))
        stage.wait_for("begin", name=name, timeout=PATIENCE)
        return gate, first

    return prepare


def _refused(stage: Stage, name: str, held: Any) -> None:
    gate, first = held
    second = _call(stage, "refuses", name)
    error = second.get(timeout=PATIENCE, interval=0.05, propagate=False)
    assert isinstance(error, LeaseHeld), error
    gate.touch()
    _get(first)


def _waiting(stage: Stage, name: str, held: Any) -> None:
    gate, first = held
    second = _call(stage, "play", name)
    with suppress(TimeoutError):  # it may come later, after a cut
        stage.wait_for_log(second.id, "rescheduled", timeout=SOON)
    gate.touch()
    assert _get(first) == _get(second)


def _publish(stage: Stage, task: str, name: str) -> None:
    """Publish as a program does: if it fails, again."""
    for last in (False, True):
        try:
            if task == "once":
                _call(stage, task, name)
            else:
                with _session(stage) as session, session.begin():
                    stage.tasks.kept.delay_in(session, name)
        except Exception:
            if last:
                raise
        else:
            return


def _session(stage: Stage) -> Session:
    return Session(create_engine(stage.env["LEASES_DATABASE_URL"], poolclass=NullPool))


def _published(task: str) -> Callable[[Stage, str, Any], None]:
    def play(stage: Stage, name: str, _: Any) -> None:
        _publish(stage, task, name)
        try:
            _until_done(stage, task, name, SOON)
        except TimeoutError:
            _published_later(stage, task, name)
            _until_done(stage, task, name, PATIENCE)

    return play


def _until_done(stage: Stage, task: str, name: str, seconds: float) -> None:
    stage.wait_for_state(task, f"{task}:{name}", "done", seconds)


def _change(stage: Stage, task: str, name: str, values: str) -> None:
    key = {"key": stored_key(f"{stage.home}.{task}", f"{task}:{name}")}
    with stage._engine.connect() as connection:
        connection.execute(
            text(f"UPDATE celery_leases_records SET {values} WHERE stored_key = :key"),  # noqa: S608
            key,
        )


def _published_later(stage: Stage, task: str, name: str) -> None:
    """What an operator's relay and rescue publish, as if an hour had passed."""
    _change(stage, task, name, "publish_at = publish_at - 60000000")
    outbox.relay(stage.app)
    _change(stage, task, name, f"{_AN_HOUR_AGO}, publish_at = NULL")
    outbox.rescue(stage.app)


_AN_HOUR_AGO = ", ".join(
    f"{each} = {each} - 3600000000" for each in ("started_at", "retry_at", "published_at")
)


def _left_to_relays(stage: Stage, name: str) -> None:
    """A call that its process did not publish."""
    engine = create_engine(stage.database_url, poolclass=NullPool)
    with engine.begin() as connection:
        stage.tasks.kept.delay_in(connection, name)
    _change(stage, "kept", name, "publish_at = publish_at - 60000000")


def _never_delivered(stage: Stage, name: str) -> None:
    """A call whose message the broker has lost."""
    _left_to_relays(stage, name)
    _change(stage, "kept", name, f"{_AN_HOUR_AGO}, publish_at = NULL")


def _by(operator: Callable[[Any], Any]) -> Callable[[Stage, str, Any], None]:
    """An operator's command publishes; if it fails, it is given again."""

    def play(stage: Stage, name: str, _: Any) -> None:
        def published() -> bool:
            try:
                operator(stage.app)
            except Exception:  # noqa: BLE001 - a cut connection
                return False
            return True

        wait_until(published, PATIENCE, "the command to succeed")
        try:
            _until_done(stage, "kept", name, SOON)
        except TimeoutError:
            _published_later(stage, "kept", name)
            _until_done(stage, "kept", name, PATIENCE)

    return play


def _child_dies(stage: Stage, name: str, held: Any) -> None:
    gate, first = held
    (begun,) = stage.events("begin", name=name)
    os.kill(begun["pid"], signal.SIGKILL)
    gate.touch()
    _get(first)


SCENARIOS = (
    Scenario("first run", "play", _run()),
    Scenario("replay", "play", _run(), _done),
    Scenario("held", "refuses", _refused, _held("refuses")),
    Scenario("wait", "play", _waiting, _held("play")),
    Scenario("cooldown", "play", _run("cooldown"), begins=(2,)),
    Scenario("retry", "play", _run("retry"), begins=(2,)),
    Scenario("effect", "play", _run("effect"), charges=1),
    # A body whose own transaction fails has failed, and runs again.
    Scenario("complete", "play", _run("complete"), begins=(1, 2), invoices=1),
    Scenario("queue-once", "once", _published("once")),
    Scenario("outbox", "kept", _published("kept")),
    Scenario("relay", "kept", _by(outbox.relay), _left_to_relays),
    Scenario("rescue", "kept", _by(outbox.rescue), _never_delivered),
    Scenario("takeover", "play", _child_dies, _held("play"), begins=(2,)),
)
