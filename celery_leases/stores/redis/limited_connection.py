"""Connections of redis-py that wait no longer than the delivery may that uses them."""

from __future__ import annotations

from functools import cache
from typing import Any

from celery_leases.concurrency import wait_limit


@cache
def limited(connection_class: type[Any]) -> type[Any]:
    """*connection_class* with timeouts that are shortened to
    :func:`celery_leases.concurrency.wait_limit.bounded` before each command.
    """

    class LimitedConnection(connection_class):
        #: The timeout of the socket.
        _current: float | None = None

        def limit_wait(self) -> None:
            """Let the open socket wait as long as this delivery may."""
            seconds = wait_limit.bounded(self.socket_timeout)
            if seconds != self._current and self._sock is not None:
                self._sock.settimeout(seconds)
                self._current = seconds

        def send_packed_command(self, command: Any, check_health: bool = True) -> None:
            self.limit_wait()
            super().send_packed_command(command, check_health)

        def _connect(self) -> Any:
            name = "socket_connect_timeout"
            given = getattr(self, name, self.socket_timeout)
            setattr(self, name, wait_limit.bounded(given))
            try:
                sock = super()._connect()
            finally:
                setattr(self, name, given)
            self._current = wait_limit.bounded(self.socket_timeout)
            sock.settimeout(self._current)
            return sock

    return LimitedConnection
