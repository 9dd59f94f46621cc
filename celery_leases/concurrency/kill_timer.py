"""A kernel timer that kills this process at a given time, unless it is moved or cancelled before.

The timer needs no running thread of this process. So it also ends a process that is stopped or
frozen, or that holds the interpreter's lock in one long call. See ``timer_create(2)``.
"""

from __future__ import annotations

import ctypes
import os
import signal
from functools import cache
from typing import Any, ClassVar, Final

from celery_leases.concurrency import os_threads

_ABSOLUTE: Final = 1  # TIMER_ABSTIME
_BY_SIGNAL: Final = 0  # SIGEV_SIGNAL


class _Event(ctypes.Structure):
    """``struct sigevent``."""

    _fields_: ClassVar = [
        ("value", ctypes.c_void_p),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("padding", ctypes.c_char * 48),
    ]


class _Timespec(ctypes.Structure):
    _fields_: ClassVar = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


class _Itimerspec(ctypes.Structure):
    _fields_: ClassVar = [("interval", _Timespec), ("value", _Timespec)]


class KillTimer:
    """Kills this process at *moment*, in seconds of
    :func:`celery_leases.concurrency.os_threads.boot_clock`.

    Each body has a timer of its own. Setting a cancelled timer does nothing, so threads that set
    and cancel it need no lock. A forked child does not inherit the timer. Raises :class:`OSError`
    where the system has no such timer.
    """

    def __init__(self, moment: float) -> None:
        library = _library()
        if library is None or os_threads.BOOT_CLOCK is None:
            raise OSError("this system has no POSIX timer on the boot clock")
        self._library = library
        self._timer = ctypes.c_void_p()
        event = _Event(signo=signal.SIGKILL, notify=_BY_SIGNAL)
        if library.timer_create(
            os_threads.BOOT_CLOCK, ctypes.byref(event), ctypes.byref(self._timer)
        ):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self.set(moment)

    def set(self, moment: float) -> None:
        """Kill at *moment* instead; at once if that time is over."""
        nanoseconds = max(1, int(moment * 1e9))
        when = _Itimerspec(value=_Timespec(*divmod(nanoseconds, 1_000_000_000)))
        self._library.timer_settime(self._timer, _ABSOLUTE, ctypes.byref(when), None)

    def cancel(self) -> None:
        """Delete the timer."""
        self._library.timer_delete(self._timer)


@cache
def available() -> bool:
    """Whether this system has such a timer; found out by making one."""
    try:
        KillTimer(os_threads.boot_clock() + 3600).cancel()
    except OSError:
        return False
    return True


@cache
def _library() -> Any:
    """The C library that has ``timer_create``; ``None`` if no library has it."""
    for name in (None, "librt.so.1"):
        try:
            library = ctypes.CDLL(name, use_errno=True)
            create, settime, delete = (
                library.timer_create,
                library.timer_settime,
                library.timer_delete,
            )
        except (OSError, AttributeError):
            continue
        create.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
        settime.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
        delete.argtypes = [ctypes.c_void_p]
        return library
    return None
