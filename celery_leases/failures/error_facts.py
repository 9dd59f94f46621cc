"""The facts of an error as plain data, read by duck typing without importing a client library."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

from celery_leases.failures import error_codes, error_responses, retry_info
from celery_leases.failures.exception_chain import error_chain
from celery_leases.failures.safe_attribute_reader import Reader, as_seconds, members
from celery_leases.text.redaction import message_of

MESSAGE_MAX: Final = 500
NAMES_MAX: Final = 24
_VALIDATION: Final = frozenset(
    {"pydantic_core._pydantic_core.ValidationError", "pydantic.error_wrappers.ValidationError"}
)
_FALSE_IS_DEFAULT: Final = frozenset(
    {
        "stripe._error.APIConnectionError",
        "stripe.error.APIConnectionError",
        "google.auth.exceptions.TransportError",
        "google.auth.exceptions.TimeoutError",
        "google.auth.exceptions.DefaultCredentialsError",
    }
)
"""Classes whose ``retryable`` or ``should_retry`` is ``False`` by default, and which their
libraries also raise for interrupted responses: that ``False`` is ignored.
"""


@dataclass(frozen=True, slots=True)
class ErrorFacts:
    """The facts of one error. Those of the outermost error also have the facts of the errors that
    it wraps, in ``chain``.
    """

    #: Dotted names of the class and its superclasses, most specific first; builtins without their
    #: module.
    names: tuple[str, ...] = ()
    #: HTTP status of the response.
    status: int | None = None
    #: Error codes and types from attributes and the body, as they are written there.
    codes: tuple[str, ...] = ()
    #: SQLSTATE, five characters.
    sqlstate: str | None = None
    #: Number of an OSError (also of name resolution), or of MySQL.
    errno: int | None = None
    #: Name of a gRPC status code, such as ``"UNAVAILABLE"``.
    grpc: str | None = None
    #: Reply code of a mail server, which is no HTTP status.
    smtp: int | None = None
    #: The headers that rules and delays read, by lower-case name; values cut to 200 characters.
    headers: Mapping[str, str] = field(default_factory=dict)
    #: Whether the error says that a retry may help; ``None``: it does not say.
    retryable: bool | None = None
    #: Seconds to wait, from an attribute of the error.
    retry_after: float | None = None
    #: Seconds to wait, from a ``google.rpc.RetryInfo`` in its details.
    retry_info: float | None = None
    #: SQLAlchemy has invalidated the connection.
    invalidated: bool = False
    #: Celery could not convert the arguments to the pydantic models in the task's signature.
    arguments: bool = False
    #: The message without secrets, cut to 500 characters.
    message: str = ""
    #: The facts of each error: this one, then those that it wraps. Empty in its members.
    chain: tuple[ErrorFacts, ...] = ()

    @property
    def code(self) -> str | None:
        """The first of the codes."""
        return self.codes[0] if self.codes else None


def facts_of(error: BaseException, headers: Container[str] = ()) -> ErrorFacts:
    """The facts of *error*. A fact that it does not have is that of the first error it wraps that
    has it.

    *headers* are lower-case names of additional headers to read. Never raises, and fetches nothing.
    """
    read = Reader()
    return facts_from(error_chain(error, read), read, headers)


def facts_from(
    errors: Sequence[BaseException], read: Reader, headers: Container[str] = ()
) -> ErrorFacts:
    """The facts of an error and the errors that it wraps, the outermost first: see
    :func:`facts_of`.
    """
    chain = tuple(_facts(read, error, headers) for error in errors)
    first: dict[str, Any] = {}
    for one in _FIELDS:
        found = (
            value
            for facts in chain
            if (value := getattr(facts, one)) not in (None, (), "", {}, False)
        )
        # False is a fact of its own only if None is another value.
        first[one] = next(found, getattr(chain[0], one))
    if first["retryable"] is None:
        first["retryable"] = next(
            (facts.retryable for facts in chain if facts.retryable is not None), None
        )
    return ErrorFacts(**first, chain=chain)


_FIELDS: Final = tuple(one.name for one in fields(ErrorFacts) if one.name != "chain")


def names_of(kind: type) -> tuple[str, ...]:
    """The dotted names of a class and its superclasses, without the base classes of all
    exceptions.
    """
    return tuple(
        one.__qualname__ if one.__module__ == "builtins" else f"{one.__module__}.{one.__qualname__}"
        for one in kind.__mro__[:NAMES_MAX]
        if not any(one is base for base in (object, BaseException, Exception))
    )


def _facts(read: Reader, error: BaseException, headers: Container[str]) -> ErrorFacts:
    facts = ErrorFacts(
        names_of(type(error)), message="" if read.timed_out else message_of(error, MESSAGE_MAX)
    )
    try:
        return _read(read, error, facts, headers)
    except BaseException:  # noqa: BLE001 - an attribute that raises must not hide the error
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
    # The code of a SQLAlchemy error is an anchor in its documentation.
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
        value = read.attribute(error, name)
        if value is True or (value is False and _FALSE_IS_DEFAULT.isdisjoint(names)):
            return value
    return None


def _retry_info(read: Reader, error: BaseException, bodies: list[Any]) -> float | None:
    for pair in members(error_responses.grpc_metadata(read, error)):
        if (
            isinstance(pair, tuple)
            and pair[:1] == ("grpc-status-details-bin",)
            and isinstance(pair[-1], bytes)
        ):
            return retry_info.in_status(pair[-1])
    delay = retry_info.in_details(read, members(read.attribute(error, "details")))
    for body in bodies:
        inner = body.get("error", body) if isinstance(body, dict) else None
        if delay is None and isinstance(inner, dict):
            delay = retry_info.in_details(read, members(inner.get("details")))
    return delay


def _of_the_arguments(error: BaseException) -> bool:
    """Whether Celery itself has called pydantic, as it does before it runs the body."""
    caller, traceback = "", error.__traceback__
    while traceback is not None:
        module = str(traceback.tb_frame.f_globals.get("__name__"))
        if module.partition(".")[0] not in ("pydantic", "pydantic_core"):
            caller = module
        traceback = traceback.tb_next
    return caller == "celery.app.base"
