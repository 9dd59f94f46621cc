"""Checks the arguments of ``Rules.on``, and converts them to conditions and an action."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, Final, NoReturn

from celery_leases.errors import LeaseConfigurationError
from celery_leases.failures.actions import Action, cooldown, permanent, retry, retry_exactly
from celery_leases.failures.conditions import (
    CodeIn,
    Condition,
    GrpcIn,
    HasHeader,
    MessageHas,
    NamedAs,
    SqlStateStarts,
    StatusIn,
)
from celery_leases.failures.error_codes import GRPC_CODES

Statuses = int | str | range | Iterable[int | str | range]
Words = str | Iterable[str]
Kinds = type[BaseException] | str | Iterable[type[BaseException] | str]
To = Action | float | str | timedelta

_CLASSES: Final = {f"{digit}xx": range(digit * 100, digit * 100 + 100) for digit in range(1, 6)}
_KINDS: Final = {"retry": retry(), "cooldown": cooldown(), "permanent": permanent()}
_EVERYTHING: Final = frozenset(
    {"Exception", "BaseException", "builtins.Exception", "builtins.BaseException"}
)
_NAME: Final = re.compile(r"[^\W\d]\w*(?:\.(?:[^\W\d]\w*|<locals>))*")


def conditions(**given: Any) -> tuple[Condition, ...]:
    """One condition per argument of ``Rules.on`` that is not ``None``.

    Raises :class:`LeaseConfigurationError` for a value that could never match, or without any
    argument.
    """
    made = tuple(_MAKERS[name](value) for name, value in given.items() if value is not None)
    if not made:
        raise LeaseConfigurationError(
            f"Rules.on: a rule needs something to match; write one of {', '.join(_MAKERS)} (or .use for a function)"
        )
    return made


def action(to: object) -> Action:
    """The action that *to* gives: itself, a kind, or a retry after a duration.

    Raises :class:`LeaseConfigurationError` for another value.
    """
    if isinstance(to, Action):
        return to
    if isinstance(to, str) and to in _KINDS:
        return _KINDS[to]
    if not isinstance(to, int | float | str | timedelta):
        _refuse(
            "to", to, "retry(...), cooldown(...), permanent(), or the seconds after which to retry"
        )
    return retry_exactly(to, "Rules.on: to")


def _refuse(name: str, value: object, write: str) -> NoReturn:
    raise LeaseConfigurationError(f"Rules.on: {name}={value!r} is not usable; write {write}")


def _each(name: str, value: Any, single: type | tuple[type, ...], write: str) -> list[Any]:
    if isinstance(value, single):
        return [value]
    try:
        found = list(value)
    except TypeError:
        _refuse(name, value, write)
    if not found or not all(isinstance(one, single) for one in found):
        _refuse(name, value, write)
    return found


def _status(value: Any) -> Condition:
    write = 'a status from 100 to 599, "5xx", a range, or a list of them'
    found: set[int] = set()
    for one in _each("status", value, (int, str, range), write):
        numbers = (
            _CLASSES.get(one.lower())
            if isinstance(one, str)
            else one
            if isinstance(one, range)
            else [one]
        )
        if not numbers or not all(100 <= number <= 599 for number in numbers):
            _refuse("status", value, write)
        found.update(numbers)
    return StatusIn(frozenset(int(number) for number in found))


def _words(name: str, value: Any, write: str, right: Callable[[str], object]) -> list[str]:
    found = _each(name, value, str, write)
    if not all(right(one) for one in found):
        _refuse(name, value, write)
    return found


def _code(value: Any) -> Condition:
    write = 'an error code such as "card_declined" (a star at the end matches any ending), or a list of them'
    return CodeIn(frozenset(_words("code", value, write, lambda one: one.strip(" *"))))


def _exc(value: Any) -> Condition:
    write = 'an exception class, its name such as "shop.errors.Declined", or a list of them'
    names = set()
    for one in _each("exc", value, (type, str), write):
        if isinstance(one, type) and issubclass(one, BaseException):
            names.add(f"{one.__module__}.{one.__qualname__}")
        elif isinstance(one, str) and _NAME.fullmatch(one):
            names.add(one)
        else:
            _refuse("exc", value, write)
    if not names.isdisjoint(_EVERYTHING):
        _refuse("exc", value, f"{write}; this one would match every failure")
    return NamedAs(frozenset(names))


def _sqlstate(value: Any) -> Condition:
    write = 'a SQLSTATE such as "40001", its beginning such as "40", or a list of them'
    fits = re.compile("[0-9A-Z]{1,5}", re.ASCII).fullmatch
    return SqlStateStarts(tuple(_words("sqlstate", value, write, fits)))


def _grpc(value: Any) -> Condition:
    write = f"one of {', '.join(sorted(GRPC_CODES))}, or a list of them"
    return GrpcIn(frozenset(_words("grpc", value, write, GRPC_CODES.__contains__)))


def _header(value: Any) -> Condition:
    if not isinstance(value, str) or not re.fullmatch(
        r"[!#$%&'*+.^_`|~\w-]{1,100}", value, re.ASCII
    ):
        _refuse("header", value, 'the name of one header, such as "retry-after"')
    return HasHeader(value.lower())


def _message(value: Any) -> Condition:
    write = "a regular expression that is found in the message"
    try:
        if value and isinstance(value, str | re.Pattern):
            return MessageHas(re.compile(value))
    except re.error as error:
        _refuse("message", value, f"{write} ({error})")
    _refuse("message", value, write)


_MAKERS: Final[dict[str, Callable[[Any], Condition]]] = {
    "status": _status,
    "code": _code,
    "exc": _exc,
    "sqlstate": _sqlstate,
    "grpc": _grpc,
    "header": _header,
    "message": _message,
}
