"""A monitor of Celery's task events, such as Flower."""

import threading
from typing import Any

from celery.events import EventReceiver

from tests.integration.deployments import Stage, until


class Watcher:
    """Celery's event receiver and event state, as in Flower."""

    def __init__(self, stage: Stage) -> None:
        self.state = stage.app.events.State()
        self.seen: list[dict[str, Any]] = []
        self._app = stage.app
        self._receiver: Any = None
        self._ready, self._over = threading.Event(), False
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()
        assert self._ready.wait(20)

    def _listen(self) -> None:
        with self._app.connection_for_read() as connection:
            receiver: Any = EventReceiver(connection, handlers={"*": self._take}, app=self._app)
            self._receiver = receiver
            receiver.on_consume_ready = lambda *_, **__: self._ready.set()
            # One consumer for the whole time: its queue is deleted with it, and events would be
            # lost.
            for _ in receiver.consume(limit=None, timeout=None, wakeup=False, safety_interval=1):
                if self._over:
                    return

    def _take(self, event: dict[str, Any]) -> None:
        self.state.event(dict(event))
        self.seen.append(event)

    def close(self) -> None:
        self._over = self._receiver.should_stop = True
        self._thread.join(20)

    def of(self, call: str) -> list[dict[str, Any]]:
        """The events of one call, in the order in which they arrived."""
        return [event for event in self.seen if event.get("uuid") == call]

    def wait_for(self, kind: str, call: str) -> dict[str, Any]:
        """Wait for the first event of a kind about a call, and return it."""

        def found() -> list[dict[str, Any]]:
            return [event for event in self.of(call) if event["type"] == kind]

        until(lambda: bool(found()), f"{kind} of {call}")
        return found()[0]
