"""The base of all errors, and the error for wrong settings. :mod:`celery_leases.errors` exports
them.
"""

from __future__ import annotations

import inspect
import re
from typing import Any, ClassVar, Final

from celery_leases.text.cleaning import printable

PAGE: Final = "docs/reference/errors.md"
"""The page that has a section for each code."""


class DescribedError(BaseException):
    """An exception whose ``args`` are its message and its named ``details``.

    Pickle and Celery's JSON result backends rebuild an exception from ``args`` alone. ``code`` is
    its stable name, ``advice`` says what to write; a traceback ends with both.
    """

    details: ClassVar[tuple[str, ...]] = ()
    code: ClassVar[str] = "error"
    advice: ClassVar[str] = "read the message"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.code = re.sub(r"(?<=.)(?=[A-Z])", "-", cls.__name__).lower()

    @property
    def __notes__(self) -> list[str]:  # type: ignore[override]
        """What Python adds to the traceback; made when a traceback is. ``add_note()`` appends."""
        note = f"What to do: {self.advice}. ({PAGE}#{self.code})"
        notes: list[str] = self.__dict__.setdefault("_notes", [note])
        return notes

    def __init__(self, message: str = "", *values: Any, **named: Any) -> None:
        unknown = named.keys() - set(self.details)
        if unknown or len(values) > len(self.details):
            raise TypeError(
                f"{type(self).__name__} takes a message and {', '.join(self.details) or 'nothing else'}"
            )
        given = dict(zip(self.details, values, strict=False)) | named
        key = given.get("key")
        if isinstance(key, str) and key and (shown := printable(key)) != key:
            message = message.replace(
                key, shown
            )  # messages end in logs; the detail has the key unchanged
        self.__dict__.update({name: given.get(name) for name in self.details})
        super().__init__(
            message or inspect.cleandoc(type(self).__doc__ or ""), *self.__dict__.values()
        )

    def __str__(self) -> str:
        return str(self.args[0])


class LeasesError(DescribedError, Exception):
    """Base of the errors of celery_leases."""

    advice = "catch it to handle every error of celery_leases"

    __module__ = "celery_leases.errors"


class LeaseConfigurationError(LeasesError):
    """An option or a setting of celery_leases is wrong; the message says what to write instead."""

    advice = "write what the message says; `leases doctor` finds further settings to correct"

    __module__ = "celery_leases.errors"
