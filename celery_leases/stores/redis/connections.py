"""Connections of redis-py that wait no longer than the delivery may that uses them, and those that
are used without redis-py's pool and retries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final, cast

import redis
from redis.exceptions import NoScriptError, ResponseError

from celery_leases.concurrency import os_threads, wait_limit
from celery_leases.value_class import value_class


class DirectClient(redis.Redis):
    """A redis-py client of one server whose connections may be used without its pool."""

    def make_connection(self) -> DirectConnection:
        """A new connection, which connects when it is used."""
        return DirectConnection(self.connection_pool.make_connection())


@value_class(frozen=True, slots=True)
class ScriptCall:
    """A call of a script as packed commands: by its SHA, and with its text."""

    sha: str
    by_sha: bytes
    with_text: Callable[[], bytes]

    def finish(self, connection: Any) -> None:
        """Read the reply of the call by SHA; if the server does not have the script, call it with
        its text.
        """
        try:
            connection.read_response()
        except NoScriptError:
            connection.send_packed_command([self.with_text()])
            connection.read_response()


class DirectConnection:
    """A connection that sends commands without redis-py's retries. Its socket can be polled without
    reading from it.
    """

    __slots__ = ("__weakref__", "_look", "_socket", "connection", "scripts", "unread")

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        #: The call whose reply has not been read, and its socket: another one has no such reply.
        self.unread: tuple[ScriptCall, Any] | None = None
        #: The SHAs of the scripts that the server has run on this connection.
        self.scripts: set[str] = set()
        self._socket: Any = None
        self._look: Any = None

    def send(self, command: bytes, replies: int | None = None) -> Any:
        """Send a packed command once and return its reply; raises the errors of redis-py.

        With *replies*, *command* contains that many commands, and the result is a list with a reply
        or an error for each. An exception before all replies were read closes the connection.
        """
        connection = self.connection
        try:
            self.prepare()
            connection.send_unlimited([command])
            if replies is not None:
                return [_reply_or_error(connection) for _ in range(replies)]
            return connection.read_response()
        except ResponseError:
            raise  # a complete reply
        except BaseException:
            connection.disconnect()
            raise

    def send_unawaited(self, call: ScriptCall) -> None:
        """Send *call*, and read the reply only before the next command on the same connection.

        The first call of a script on a connection is awaited, so that the server is known to have
        the script. Raises the errors of redis-py, but not those of a reply that is read later.
        """
        connection = self.connection
        try:
            self.prepare()
            connection.send_unlimited([call.by_sha])
            if call.sha in self.scripts:
                self.unread = call, connection._sock  # noqa: SLF001 - see prepare()
                return
            call.finish(connection)
            self.prepare()
            self.scripts.add(call.sha)
        except ResponseError:
            raise  # a complete reply
        except BaseException:
            connection.disconnect()
            raise

    def prepare(self) -> None:
        """Read the reply that has not been read. Connect again if it does not come, the server has
        closed the connection, or has sent unexpected data.
        """
        connection = self.connection
        if wait_limit.in_use:
            connection.limit_wait()
        if self.unread is not None:
            call, socket = self.unread
            if socket is not None and socket is connection._sock:  # noqa: SLF001 - redis-py does not expose the socket otherwise; kombu reads it too
                try:
                    call.finish(connection)
                except ResponseError:
                    pass
                except (redis.ConnectionError, redis.TimeoutError):
                    connection.disconnect()
            self.unread = None
        if self._socket is not connection._sock:  # noqa: SLF001 - as above
            self._watch(connection._sock)  # noqa: SLF001 - as above
        if self._socket is not None and self._look(0):  # without a socket, sending connects
            connection.disconnect()
            connection.connect()

    def _watch(self, socket: Any) -> None:
        self._socket = socket
        self.scripts.clear()
        if socket is not None:
            self._look = os_threads.readable_poll(socket.fileno())


def _reply_or_error(connection: Any) -> Any:
    try:
        return connection.read_response()
    except ResponseError as error:
        return error


def packed(arguments: Sequence[Any], head: bytes = b"", heads: int = 0) -> bytes:
    """A command in Redis' protocol, from arguments that are texts or integers. *head* is its first
    *heads* arguments in that form.
    """
    command = b"*%d\r\n%b" % (heads + len(arguments), head)
    for argument in arguments:
        data = argument.encode() if type(argument) is str else b"%d" % argument
        command += b"$%d\r\n%b\r\n" % (len(data), data)
    return command


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
