"""The body that every contender runs."""

import threading
import time

from benchmarks.performance import settings
from benchmarks.performance.journal import BEGUN, ENDED, Writer

writer = Writer(settings.given(settings.JOURNAL), settings.given(settings.NOTES))


def work(key: str, seconds: float) -> int:
    """Record the begin, wait for *seconds* or for ever, and record the end."""
    writer.note(BEGUN, key)
    if seconds == settings.FOR_EVER:
        threading.Event().wait()
    elif seconds:
        time.sleep(seconds)
    writer.note(ENDED, key)
    return 1
