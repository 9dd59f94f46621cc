"""The body that every contender runs."""

import threading
import time

from benchmarks.performance import settings
from benchmarks.performance.journal import BEGUN, ENDED, Writer

writer = Writer(settings.given(settings.JOURNAL), settings.given(settings.NOTES))


def work(key: str, seconds: float) -> int:
    """Wait between a note that the body has begun and one that it has ended: for so many seconds,
    or for ever.
    """
    writer.note(BEGUN, key)
    if seconds == settings.FOR_EVER:
        threading.Event().wait()
    elif seconds:
        time.sleep(seconds)
    writer.note(ENDED, key)
    return 1
