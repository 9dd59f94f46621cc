"""Commands on connections of redis-py that are used without its pool and retries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import redis
from redis.exceptions import NoScriptError, ResponseError

from celery_leases.concurrency import os_threads, wait_limit
from celery_leases.concurrency.shared_trips import SharedTrips
from celery_leases.errors import StoreUnavailable
from celery_leases.stores.redis.commands import SCAN_COUNT, RedisCommands
from celery_leases.stores.redis.errors import REDIS_ERRORS
from celery_leases.stores.redis.lease_scripts import Script
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


class DirectCommands(RedisCommands):
    """The commands on a :class:`DirectClient`, without redis-py's pool."""

    _client: DirectClient
    _trips: SharedTrips[tuple[Any, ...], tuple[Any]] | None = None

    def share_trips(self, running: Callable[[], int]) -> None:
        """Let callers share round trips."""
        self._trips = SharedTrips(self._run_together, running)

    def run_together(self, script: Script, *keys_and_args: Any) -> Any:
        """Run a script; see :meth:`RedisCommands.run_together`."""
        if self._trips is None:
            return self.run(script, *keys_and_args)
        call = (script, *keys_and_args)
        (reply,) = self._trips.run(call, lambda: (self.run(*call),))
        return reply

    def _run_together(self, calls: Sequence[tuple[Any, ...]]) -> list[tuple[Any] | None]:
        """The reply to each script; ``None``: the server refused it. Repeated once if the server
        has closed the connection.
        """
        try:
            replies = self.run_all(calls)
        except StoreUnavailable as error:
            if not isinstance(error.__context__, redis.ConnectionError):
                raise
            replies = self.run_all(calls)
        return [None if isinstance(reply, Exception) else (reply,) for reply in replies]

    def run(self, script: Script, *keys_and_args: Any) -> Any:
        """Run a script; see :meth:`RedisCommands.run`."""
        try:
            return self._pool.use(DirectConnection.send, packed(keys_and_args, script.called, 3))
        except NoScriptError:
            return self.execute("EVAL", script.text, script.keys, *keys_and_args)
        except REDIS_ERRORS as error:
            raise self.unavailable(error) from None

    def run_unawaited(self, script: Script, *keys_and_args: Any) -> None:
        """Run a script whose reply is not needed; see :meth:`RedisCommands.run_unawaited`."""
        if self._trips is not None and self._trips.send((script, *keys_and_args)):
            return

        def with_text() -> bytes:
            return packed(("EVAL", script.text, script.keys, *keys_and_args))

        call = ScriptCall(script.sha, packed(keys_and_args, script.called, 3), with_text)
        try:
            self._pool.use(DirectConnection.send_unawaited, call)
        except REDIS_ERRORS as error:
            raise self.unavailable(error) from None

    def close(self) -> None:
        """Close all connections, also those that other threads use. The next call opens new
        ones.
        """
        self._client.connection_pool.disconnect()
        for direct in self._pool.all():
            direct.connection.disconnect()

    def _execute(self, permit: Any, *command: Any) -> Any:
        return permit.send(packed(command))

    def _execute_many(self, permit: Any, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        replies: list[Any] = permit.send(b"".join(map(packed, commands)), len(commands))
        return replies

    def _scan_page(
        self, permit: Any, client: Any, cursor: int, pattern: str
    ) -> tuple[Any, list[Any]]:
        after, names = self._execute(permit, "SCAN", cursor, "MATCH", pattern, "COUNT", SCAN_COUNT)
        return after, names
