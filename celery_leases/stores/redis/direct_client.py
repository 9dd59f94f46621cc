"""Sends Redis commands on redis-py's connections, without its pool and its retries."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import redis
from redis.exceptions import ResponseError

from celery_leases.concurrency import os_threads


class DirectClient(redis.Redis):
    """A client of one server that also sends commands directly, on connections that it keeps.

    Beside its pool it keeps one connection for each command that was ever in flight at the same
    time. A forked process opens its own.
    """

    def __init__(self, pool: redis.ConnectionPool) -> None:
        super().__init__(connection_pool=pool)
        self._opened: list[_Line] = []
        self._idle: list[_Line] = []
        self._process = os.getpid()

    def ask(self, command: bytes, replies: int | None = None) -> Any:
        """Send a packed command once, and return its reply; raises the errors of redis-py.

        With *replies* the command consists of that many commands, and the result is a list with a
        reply or an error for each.

        Any exception before the whole reply has been read closes the connection.
        """
        if self._process != os.getpid():
            self._opened, self._idle, self._process = [], [], os.getpid()
        try:
            line = self._idle.pop()
        except IndexError:
            line = _Line(self.connection_pool.make_connection())
            self._opened.append(line)
        connection = line.connection
        try:
            line.replace_if_dead()
            connection.send_packed_command([command])
            if replies is not None:
                return [_reply_or_error(connection) for _ in range(replies)]
            return connection.read_response()
        except ResponseError:
            raise  # it is the reply
        except BaseException:
            connection.disconnect()
            raise
        finally:
            self._idle.append(line)

    def disconnect(self) -> None:
        """Close all connections, those in use by other threads too; the next command opens new
        ones.
        """
        self.connection_pool.disconnect()
        for line in self._opened:
            line.connection.disconnect()


class _Line:
    """A connection, and a way to look at its socket without reading from it."""

    __slots__ = ("_look", "_socket", "connection")

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self._socket: Any = None
        self._look: Any = None

    def replace_if_dead(self) -> None:
        """Connect again if the server has closed the connection, or has sent unexpected data."""
        connection = self.connection
        if self._socket is not connection._sock:  # noqa: SLF001 - kombu reads it too; redis-py has no other way to it
            self._watch(connection._sock)  # noqa: SLF001 - as above
        if self._socket is not None and self._look(0):  # without a socket, sending connects
            connection.disconnect()
            connection.connect()

    def _watch(self, socket: Any) -> None:
        self._socket = socket
        if socket is not None:
            self._look = os_threads.look_at(socket.fileno())


def _reply_or_error(connection: Any) -> Any:
    try:
        return connection.read_response()
    except ResponseError as error:
        return error


def packed(arguments: Sequence[Any], head: bytes = b"", heads: int = 0) -> bytes:
    """A command of texts and integers in Redis' protocol. *head* contains its first *heads*
    arguments, already packed.
    """
    command = b"*%d\r\n%b" % (heads + len(arguments), head)
    for argument in arguments:
        data = argument.encode() if type(argument) is str else b"%d" % argument
        command += b"$%d\r\n%b\r\n" % (len(data), data)
    return command
