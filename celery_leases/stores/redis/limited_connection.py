"""Connections of redis-py that wait no longer than the delivery may that uses them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final, cast

from celery_leases.concurrency import wait_limit


def _limited(connection_class: type[Any]) -> type[Any]:
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
            if wait_limit.in_use:
                self.limit_wait()
            self.send_unlimited(command, check_health)

        #: For a caller that has called :meth:`limit_wait`.
        send_unlimited = connection_class.send_packed_command

        def _connect(self) -> Any:
            name = "socket_connect_timeout"
            given = getattr(self, name, self.socket_timeout)
            setattr(self, name, wait_limit.bounded(cast("float", given)))
            try:
                sock = super()._connect()
            finally:
                setattr(self, name, given)
            self._current = wait_limit.bounded(self.socket_timeout)
            sock.settimeout(self._current)
            return sock

    return LimitedConnection


limited: Final = cast("Callable[[type[Any]], type[Any]]", cache(_limited))
