"""In the main process of a worker on a Redis broker: fetch a message and note it in one step.

Kombu's BRPOP takes a message out of its queue, and kombu notes it as unacknowledged only when it
has read the reply. If the worker is killed in between, the message is lost. A script of the broker
does both at once. When it has found no message, the worker waits.

The time that is noted names this fetch: the tag is the same each time a message is fetched.

A wait for several keys takes a message out of its queue: kombu waits by BRPOP. If the worker has
one queue, and has seen no message with a priority, it waits for a message at the first key, by
BLMOVE to the second one, so the message stays in the queue, whose other workers find it there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from kombu.transport.redis import Channel
from kombu.transport.virtual.base import QoS
from kombu.utils.encoding import bytes_to_str
from kombu.utils.json import dumps, loads

from celery_leases.stores.redis.workers import FETCH
from celery_leases.worker.returning import return_message

WAIT: Final = 1.0
"""Seconds for which a worker waits at one key of its queue before it looks at the others."""

UNREADABLE: Final = (ValueError, TypeError, LookupError, AttributeError)
"""What kombu raises for a message of another form. It does so with each delivery."""


class Fetching:
    """Fetches messages on a *channel* of kombu, in place of its own methods.

    It calls *unanswered* if the broker may have noted a message and the reply did not come, with
    the seconds since the request was sent.
    """

    def __init__(self, channel: Any, unanswered: Callable[[float], object]) -> None:
        self._channel = channel
        self._on_unanswered = unanswered
        self._own_start = channel._brpop_start  # noqa: SLF001
        self._own_read = channel._brpop_read  # noqa: SLF001
        self._own_restore = channel.qos.restore_by_tag
        #: Commands that the broker has refused.
        self._refused: set[str] = set()
        #: Messages have priorities.
        self._prioritized = False
        #: The next command, and that whose reply this channel waits for; none: kombu's own.
        self._next = "EVAL"
        self._asked = ""
        #: The last command has moved a message to the second key.
        self._moved = False
        #: The time that the script notes.
        self._sent_at = 0.0
        #: The tag of the message that is being delivered, and noted.
        self._noted: str | None = None

    def install(self) -> None:
        """Let kombu call these methods."""
        channel = self._channel
        channel._brpop_start = self.start  # noqa: SLF001
        channel._brpop_read = channel.handlers["BRPOP"] = self.read  # noqa: SLF001
        channel.qos.append = self.append
        channel.qos.restore_by_tag = self.restore

    def start(self, timeout: float | None = None) -> None:
        """Send the request for the next message."""
        channel = self._channel
        queues = channel._queue_cycle.consume(len(channel.active_queues))  # noqa: SLF001
        key_of = channel._q_for_pri  # noqa: SLF001
        keys = [key_of(queue, step) for step in channel.priority_steps for queue in queues]
        if self._asked == "EVAL":  # kombu has closed the connection
            self._unanswered()
        self._asked = self._next if queues and "EVAL" not in self._refused else ""
        if self._asked == "BLMOVE" and not self._can_wait(queues):
            self._asked = ""
        if self._asked == "EVAL":
            if self._moved:
                keys[:2] = keys[1::-1]
            keys += channel.unacked_key, channel.unacked_index_key
            names = self._names(keys)
            self._sent_at = time.time()
            self._send("EVAL", FETCH.text, len(names), *names, self._sent_at)
        elif self._asked == "BLMOVE":
            self._send("BLMOVE", *self._names(keys[:2]), "RIGHT", "RIGHT", WAIT)
        else:
            self._own_start(*(() if timeout is None else (timeout,)))

    def _unanswered(self) -> None:
        self._on_unanswered(time.monotonic() - self._channel._brpop_sent_at)  # noqa: SLF001

    def _can_wait(self, queues: Sequence[str]) -> bool:
        channel = self._channel
        one_key = len(queues) == 1 and len(channel.priority_steps) > 1 and not self._prioritized
        # Its other keys may have no TTL. Older versions of kombu have no such queues.
        expires = queues[0] in getattr(channel, "_expires", ())
        return one_key and not expires and "BLMOVE" not in self._refused

    def _names(self, keys: Iterable[str]) -> list[str]:
        return [f"{self._channel.global_keyprefix}{key}" for key in keys]

    def _send(self, *command: Any) -> None:
        channel = self._channel
        channel._in_poll = channel.client.connection  # noqa: SLF001
        channel._brpop_sent_at = time.monotonic()  # noqa: SLF001
        channel.client.connection.send_command(*command)

    def read(self, **options: Any) -> bool:
        """Read the reply, and deliver the message; return whether there was one."""
        asked, self._next, self._moved = self._asked, "", False
        if not asked:
            self._own_read(**options)
            self._next = "EVAL"
            return True
        found = self._reply(options)
        if asked == "BLMOVE":
            self._next, self._moved = "EVAL", bool(found)
        elif found:
            self._next = "EVAL"
            self._deliver(*found)
            return True
        elif found is None:
            self._next = "BLMOVE"
        return False  # no error, after which kombu may sleep

    def _reply(self, options: Mapping[str, Any]) -> Any:
        channel, client = self._channel, self._channel.client
        asked, self._asked = self._asked, ""
        try:
            return client.parse_response(client.connection, asked, **options)
        except channel.ResponseError:
            self._refused.add(asked)  # until the next connection
            return None
        except channel.connection_errors:
            client.connection.disconnect()
            if asked == "EVAL":
                self._unanswered()
            raise
        finally:
            channel._in_poll = None  # noqa: SLF001
            if flush := getattr(channel, "_flush_brpop_reauth", None):  # since kombu 5.7
                flush()

    def _deliver(self, key: bytes, stored: bytes, noted: bytes) -> None:
        channel, tag = self._channel, bytes_to_str(noted)
        name = bytes_to_str(key)[len(channel.global_keyprefix) :]
        queue = name.rsplit(channel.sep, 1)[0]
        channel._queue_cycle.rotate(queue)  # noqa: SLF001
        consumed = queue in channel.connection._callbacks  # noqa: SLF001
        self._noted = tag
        over = False
        try:
            message = loads(bytes_to_str(stored))
            priority = channel._get_message_priority(message, reverse=False)  # noqa: SLF001
            self._prioritized |= channel.priority(priority) != channel.priority_steps[0]
            channel.connection._deliver(message, queue)  # noqa: SLF001
            over = True  # if it is still noted, the consumer acknowledges none
        except UNREADABLE:
            over = True
            raise
        finally:  # after another error, of a signal handler, another worker returns the message
            if over and self._noted and consumed:
                channel.qos._remove_from_indices(tag).execute()  # noqa: SLF001
            self._noted = None

    def append(self, message: Any, tag: str) -> None:
        """Note a message as unacknowledged, as kombu does, and keep the time that is noted."""
        qos, info = self._channel.qos, message.delivery_info
        if tag == self._noted:
            self._noted = None
            message.fetched_at = self._sent_at
        else:
            message.fetched_at = time.time()
            stored = dumps([message._raw, info["exchange"], info["routing_key"]])  # noqa: SLF001
            with qos.pipe_or_acquire() as pipe:
                pipe.zadd(qos.unacked_index_key, {tag: message.fetched_at})
                pipe.hset(qos.unacked_key, tag, stored).execute()
        QoS.append(qos, message, tag)

    def restore(self, tag: str, client: Any = None, leftmost: bool = False) -> None:
        """Return a message to its queue as kombu does, but not if this channel has fetched it and
        another worker has it now.
        """
        message = self._channel.qos._delivered.get(tag)  # noqa: SLF001
        if message is None or "EVAL" in self._refused:
            self._own_restore(tag, client, leftmost)
        else:
            fetched = getattr(message, "fetched_at", "")
            return_message(self._channel, tag, fetched, leftmost=leftmost)


def noted_at_once(channel: Any, unanswered: Callable[[float], object]) -> None:
    """Let the broker note each message that it takes out of a queue, where kombu notes messages;
    see :class:`Fetching`.
    """
    own = getattr(type(channel), "_brpop_start", None) is Channel._brpop_start  # noqa: SLF001
    if own and channel.ack_emulation and "_brpop_start" not in vars(channel):
        Fetching(channel, unanswered).install()
