"""In the main process of a worker on a Redis broker: fetch a message and note it in one step.

Kombu's BRPOP takes a message out of its queue, and kombu notes it as unacknowledged only when it
has read the reply. If the worker is killed in between, nobody can return the message. A script of
the broker does both at once. When it has found no message, kombu waits for one with BRPOP.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from queue import Empty
from typing import Any

from kombu.transport.redis import Channel
from kombu.transport.virtual.base import QoS
from kombu.utils.encoding import bytes_to_str
from kombu.utils.json import loads

from celery_leases.stores.redis.workers import FETCH


class Fetching:
    """Fetches messages on a *channel* of kombu, in place of its own methods, while *allowed*."""

    def __init__(self, channel: Any, allowed: Callable[[], bool]) -> None:
        self._channel = channel
        self._allowed = allowed
        self._own_start = channel._brpop_start  # noqa: SLF001
        self._own_read = channel._brpop_read  # noqa: SLF001
        self._own_append = channel.qos.append
        #: The broker has refused the script.
        self._refused = False
        #: The last request found no message.
        self._found_none = False
        #: The reply that kombu waits for is that of the script.
        self._asked = False
        #: The tag of the message that is being delivered, and noted.
        self._noted: str | None = None

    def install(self) -> None:
        """Let kombu call these methods."""
        channel = self._channel
        channel._brpop_start = self.start  # noqa: SLF001
        channel._brpop_read = channel.handlers["BRPOP"] = self.read  # noqa: SLF001
        channel.qos.append = self.append

    def start(self, timeout: float | None = None) -> None:
        """Send the request for the next message."""
        channel = self._channel
        queues = channel._queue_cycle.consume(len(channel.active_queues))  # noqa: SLF001
        kombus = self._found_none or self._refused or not self._allowed()
        self._asked = bool(queues) and not kombus
        if not self._asked:
            self._own_start(timeout)
            return
        key_of = channel._q_for_pri  # noqa: SLF001
        keys = [key_of(queue, step) for step in channel.priority_steps for queue in queues]
        keys += channel.unacked_key, channel.unacked_index_key
        names = [f"{channel.global_keyprefix}{key}" for key in keys]
        channel._in_poll = channel.client.connection  # noqa: SLF001
        channel._brpop_sent_at = time.monotonic()  # noqa: SLF001
        channel.client.connection.send_command("EVAL", FETCH.text, len(names), *names, time.time())

    def read(self, **options: Any) -> bool:
        """Read the reply, and deliver the message."""
        self._found_none = True
        if self._asked:
            key, message, tag = self._reply(options)
            self._found_none = False
            self._deliver(key, message, bytes_to_str(tag))
        else:
            self._own_read(**options)
            self._found_none = False
        return True

    def _reply(self, options: Mapping[str, Any]) -> tuple[bytes, bytes, bytes]:
        channel, client = self._channel, self._channel.client
        self._asked = False
        try:
            found = client.parse_response(client.connection, "EVAL", **options)
        except channel.ResponseError:
            self._refused = True  # until the next connection
            found = None
        except channel.connection_errors:
            client.connection.disconnect()
            raise
        finally:
            channel._in_poll = None  # noqa: SLF001
            if flush := getattr(channel, "_flush_brpop_reauth", None):  # since kombu 5.7
                flush()
        if not found:
            raise Empty
        return tuple(found)

    def _deliver(self, key: bytes, message: bytes, tag: str) -> None:
        channel = self._channel
        name = bytes_to_str(key)[len(channel.global_keyprefix) :]
        queue = name.rsplit(channel.sep, 1)[0]
        channel._queue_cycle.rotate(queue)  # noqa: SLF001
        consumed = queue in channel.connection._callbacks  # noqa: SLF001
        self._noted = tag
        try:
            channel.connection._deliver(loads(bytes_to_str(message)), queue)  # noqa: SLF001
        finally:
            if self._noted and consumed:  # the consumer acknowledges none, or kombu cannot read it
                channel.qos._remove_from_indices(tag).execute()  # noqa: SLF001
            self._noted = None

    def append(self, message: Any, tag: str) -> None:
        """Note a message as unacknowledged."""
        if tag == self._noted:
            self._noted = None
            QoS.append(self._channel.qos, message, tag)
        else:
            self._own_append(message, tag)


def noted_at_once(channel: Any, allowed: Callable[[], bool]) -> None:
    """While *allowed*, let the broker note each message that it takes out of a queue, where kombu
    notes messages.
    """
    own = getattr(type(channel), "_brpop_start", None) is Channel._brpop_start  # noqa: SLF001
    if own and channel.ack_emulation and "_brpop_start" not in vars(channel):
        Fetching(channel, allowed).install()
