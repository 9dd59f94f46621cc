"""What a worker's log says of one call."""

from collections.abc import Sequence


def latest_was_received(lines: Sequence[str]) -> bool:
    """Whether the latest message of the call that *lines* are about has been received, not only
    taken from its queue.

    kombu loses what a process that is killed in between had taken from Redis.
    """
    received, rescheduled = (
        sum(word in line for line in lines) for word in ("received", "rescheduled in")
    )
    return received > rescheduled
