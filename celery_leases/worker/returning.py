"""Ends messages of a Redis broker, unless they were fetched again meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kombu.utils.encoding import bytes_to_str
from kombu.utils.json import loads

if TYPE_CHECKING:
    from celery_leases.stores.redis.workers import Fetched, Push


def return_message(channel: Any, tag: str, fetched: Fetched, *, leftmost: bool = False) -> None:
    """Return a message to its queue, as kombu does, if it was *fetched* then for the last time.

    Otherwise another worker has it. *leftmost*: to the end of the queue.
    """
    from celery_leases.stores.redis.workers import Workers

    workers, (unacked, index) = Workers(channel.pool, ""), unacked_keys(channel)
    stored = workers.stored(tag, unacked)
    if stored is not None and (pushes := pushes_of(channel, stored, leftmost=leftmost)):
        workers.give_back([(tag, fetched, pushes)], unacked, index, channel.global_keyprefix)


def acknowledge_message(channel: Any, tag: str, fetched: Fetched) -> None:
    """Acknowledge a message if it was *fetched* then for the last time."""
    from celery_leases.stores.redis.workers import Workers

    Workers(channel.pool, "").give_back([(tag, fetched, ())], *unacked_keys(channel), "")


class _Pushes(list["Push"]):
    """Stands for a pipeline of Redis to which kombu adds what returns a message."""

    def rpush(self, queue: str, message: str) -> None:
        self.append(("RPUSH", queue, message))

    def lpush(self, queue: str, message: str) -> None:
        self.append(("LPUSH", queue, message))


def pushes_of(channel: Any, stored: bytes, *, leftmost: bool = False) -> Sequence[Push]:
    """What returns a message in kombu's form; none if *channel* does not know its exchange: kombu
    would drop the message.
    """
    pushes = _Pushes()
    channel._do_restore_message(*loads(bytes_to_str(stored)), pushes, leftmost)  # noqa: SLF001
    return pushes


def unacked_keys(channel: Any) -> tuple[str, str]:
    """Kombu's keys of the unacknowledged messages and of the times at which they were fetched."""
    prefix = channel.global_keyprefix
    return f"{prefix}{channel.unacked_key}", f"{prefix}{channel.unacked_index_key}"
