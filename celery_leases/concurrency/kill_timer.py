"""A timer of the kernel that kills this process at a given moment, unless that is put off or
called off before.

It needs no thread of this process to run, so it also ends a body that is stopped, frozen, or holds
the interpreter's lock in one long call. See ``timer_create(2)``.
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

    A timer of its own for each body: putting off one that was called off already does nothing, so
    that no thread has to wait for another. A forked child does not inherit it. Raises
    :class:`OSError` where there is no such timer.
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
        self.put_off(moment)

    def put_off(self, moment: float) -> None:
        """Kill at *moment* instead; one that is over kills at once."""
        nanoseconds = max(1, int(moment * 1e9))
        when = _Itimerspec(value=_Timespec(*divmod(nanoseconds, 1_000_000_000)))
        self._library.timer_settime(self._timer, _ABSOLUTE, ctypes.byref(when), None)

    def call_off(self) -> None:
        """Let the process live."""
        self._library.timer_delete(self._timer)


@cache
def available() -> bool:
    """Whether this system has what it takes; found out by trying."""
    try:
        KillTimer(os_threads.boot_clock() + 3600).call_off()
    except OSError:
        return False
    return True


@cache
def _library() -> Any:
    """The C library with ``timer_create``, wherever this one keeps it."""
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
