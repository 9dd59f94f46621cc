"""The facts of an error, as plain data: read by duck typing, without importing any client
library.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

from celery_leases.common.redaction import message_of
from celery_leases.failures import error_codes, error_responses, retry_info
from celery_leases.failures.exception_chain import error_chain
from celery_leases.failures.safe_attributes import Reader, as_seconds, members

MESSAGE_MAX: Final = 500
NAMES_MAX: Final = 24
_VALIDATION: Final = frozenset(
    {"pydantic_core._pydantic_core.ValidationError", "pydantic.error_wrappers.ValidationError"}
)
_FALSE_BY_DEFAULT: Final = frozenset(
    {
        "stripe._error.APIConnectionError",
        "stripe.error.APIConnectionError",
        "google.auth.exceptions.TransportError",
        "google.auth.exceptions.TimeoutError",
        "google.auth.exceptions.DefaultCredentialsError",
    }
)
"""Not retryable unless somebody said otherwise, which nobody does: it says nothing of an answer
that broke off.
"""


@dataclass(frozen=True, slots=True)
class ErrorFacts:
    """The facts of one error; those of the outermost one also have the errors it wraps, in
    ``chain``.
    """

    #: Dotted names of the class and its superclasses, most specific first; builtins without their
    #: module.
    names: tuple[str, ...] = ()
    #: HTTP status of the answer.
    status: int | None = None
    #: Error codes and types, of attributes and in the body, as written.
    codes: tuple[str, ...] = ()
    #: SQLSTATE, five characters.
    sqlstate: str | None = None
    #: Number of an OSError (also of name resolution), or of MySQL.
    errno: int | None = None
    #: Name of a gRPC status code, such as ``"UNAVAILABLE"``.
    grpc: str | None = None
    #: Reply code of a mail server; not an HTTP status, though it looks like one.
    smtp: int | None = None
    #: The headers that rules and delays look at, by lower-case name; values cut to 200 characters.
    headers: Mapping[str, str] = field(default_factory=dict)
    #: What the error says about itself; ``None``: nothing.
    retryable: bool | None = None
    #: Seconds to wait, from an attribute of the error.
    retry_after: float | None = None
    #: Seconds to wait, from a ``google.rpc.RetryInfo`` in its details.
    retry_info: float | None = None
    #: SQLAlchemy found the connection broken.
    invalidated: bool = False
    #: Celery could not make the task's arguments into what its signature asks for.
    arguments: bool = False
    #: Its text, without secrets, cut to 500 characters.
    message: str = ""
    #: One per error: this one, then those it wraps; empty in its members.
    chain: tuple[ErrorFacts, ...] = ()

    @property
    def code(self) -> str | None:
        """The first of the codes."""
        return self.codes[0] if self.codes else None


def facts_of(error: BaseException, headers: Container[str] = ()) -> ErrorFacts:
    """The facts of *error* and of what it wraps: each the first there is, from the outermost error
    inwards.

    *headers* are the lower-case names of further headers to keep. Never raises, fetches nothing.
    """
    read = Reader()
    return facts_from(error_chain(error, read), read, headers)


def facts_from(
    errors: Sequence[BaseException], read: Reader, headers: Container[str] = ()
) -> ErrorFacts:
    """The same of errors that are known to belong together, the outermost first; there is at least
    one.
    """
    chain = tuple(_facts(read, error, headers) for error in errors)
    first: dict[str, Any] = {}
    for one in _FIELDS:
        found = (
            value
            for facts in chain
            if (value := getattr(facts, one)) not in (None, (), "", {}, False)
        )
        # False is an answer of its own only where None is another one.
        first[one] = next(found, getattr(chain[0], one))
    if first["retryable"] is None:
        first["retryable"] = next(
            (facts.retryable for facts in chain if facts.retryable is not None), None
        )
    return ErrorFacts(**first, chain=chain)


_FIELDS: Final = tuple(one.name for one in fields(ErrorFacts) if one.name != "chain")


def names_of(kind: type) -> tuple[str, ...]:
    """The dotted names of a class and its superclasses, without those that every exception has."""
    return tuple(
        one.__qualname__ if one.__module__ == "builtins" else f"{one.__module__}.{one.__qualname__}"
        for one in kind.__mro__[:NAMES_MAX]
        if not any(one is every for every in (object, BaseException, Exception))
    )


def _facts(read: Reader, error: BaseException, headers: Container[str]) -> ErrorFacts:
    facts = ErrorFacts(
        names_of(type(error)), message="" if read.timed_out else message_of(error, MESSAGE_MAX)
    )
    try:
        return _read(read, error, facts, headers)
    except BaseException:  # noqa: BLE001 - nothing an error carries may hide the error
        return facts


def _read(
    read: Reader, error: BaseException, facts: ErrorFacts, headers: Container[str]
) -> ErrorFacts:
    bodies = error_responses.bodies_of(read, error)
    smtp = error_codes.smtp_of(read, error, facts.names)
    return replace(
        facts,
        status=error_responses.status_of(read, error) if smtp is None else None,
        codes=_codes(read, error, facts.names, bodies),
        sqlstate=error_codes.sqlstate_of(read, error),
        errno=error_codes.errno_of(read, error, facts.names),
        grpc=error_codes.grpc_of(read, error),
        smtp=smtp,
        headers=error_responses.headers_of(read, error, headers),
        retryable=_retryable(read, error, facts.names),
        retry_after=as_seconds(read.attribute(error, "retry_after")),
        retry_info=_retry_info(read, error, bodies),
        invalidated=read.attribute(error, "connection_invalidated") is True,
        arguments=not _VALIDATION.isdisjoint(facts.names) and _of_the_arguments(error),
    )


def _codes(
    read: Reader, error: BaseException, names: Sequence[str], bodies: list[Any]
) -> tuple[str, ...]:
    # SQLAlchemy's code is a link into its documentation.
    first = (
        []
        if names and names[0].startswith("sqlalchemy.")
        else [error_responses.code_of(read, error)]
    )
    others = ("error_code", "type", "status", "reason", "error", "sqlite_errorname")
    first += [read.attribute(error, name) for name in others]
    found = dict.fromkeys(code for value in first if (code := error_responses.as_code(value)))
    for body in bodies:
        found |= dict.fromkeys(error_responses.codes_in(body))
    return tuple(found)[: error_responses.CODES_MAX]


def _retryable(read: Reader, error: BaseException, names: Sequence[str]) -> bool | None:
    if read.attribute(error, "non_retryable") is True:
        return False
    for name in ("retryable", "should_retry"):
        said = read.attribute(error, name)
        if said is True or (said is False and _FALSE_BY_DEFAULT.isdisjoint(names)):
            return said
    return None


def _retry_info(read: Reader, error: BaseException, bodies: list[Any]) -> float | None:
    for pair in members(error_responses.grpc_metadata(read, error)):
        if (
            isinstance(pair, tuple)
            and pair[:1] == ("grpc-status-details-bin",)
            and isinstance(pair[-1], bytes)
        ):
            return retry_info.in_status(pair[-1])
    told = retry_info.in_details(read, members(read.attribute(error, "details")))
    for body in bodies:
        inner = body.get("error", body) if isinstance(body, dict) else None
        if told is None and isinstance(inner, dict):
            told = retry_info.in_details(read, members(inner.get("details")))
    return told


def _of_the_arguments(error: BaseException) -> bool:
    """Whether pydantic was called by Celery itself, which does that before it runs the body."""
    caller, traceback = "", error.__traceback__
    while traceback is not None:
        module = str(traceback.tb_frame.f_globals.get("__name__"))
        if module.partition(".")[0] not in ("pydantic", "pydantic_core"):
            caller = module
        traceback = traceback.tb_next
    return caller == "celery.app.base"
