"""Reads a worker's log."""

from collections.abc import Sequence


def latest_was_received(lines: Sequence[str]) -> bool:
    """Whether the worker has received the latest message of a call; *lines* are the call's log
    lines.

    A message that was only taken from its Redis queue is lost by kombu if the process is killed
    then.
    """
    received, rescheduled = (
        sum(word in line for line in lines) for word in ("received", "rescheduled in")
    )
    return received > rescheduled
