"""Errors like those of client libraries, with the same names and attributes, without the
libraries.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def fake_class(dotted: str, *bases: type[BaseException]) -> type[BaseException]:
    """A class with this module and name. *bases* are real classes, or made here."""
    module, _, name = dotted.rpartition(".")
    made: type[BaseException] = type(name, bases or (Exception,), {"__module__": module})
    return made


def fake_error(
    dotted: str, *bases: type[BaseException], said: Any = "no", **attributes: Any
) -> Any:
    """An error of such a class, raised with the text *said* (a tuple: the arguments) and carrying
    *attributes*.
    """
    error = fake_class(dotted, *bases)(*(said if isinstance(said, tuple) else (said,)))
    for name, value in attributes.items():
        setattr(error, name, value)
    return error


def caused(error: BaseException, cause: BaseException | None) -> Any:
    error.__cause__ = cause
    return error


def answer(status: int | None = None, headers: Any = None, **more: Any) -> Any:
    """A response; *more* is held by the instance itself, like a body that was read."""
    return SimpleNamespace(status_code=status, headers=headers or {}, **more)


def http_error(
    status: int, body: Any = None, dotted: str = "shop.clients.ApiError", **headers: str
) -> Any:
    """What most SDKs raise: a status, a response with headers (``retry_after="3"``), and a parsed
    body.
    """
    named = {name.replace("_", "-").title(): value for name, value in headers.items()}
    return fake_error(dotted, status_code=status, response=answer(status, named), body=body)


def aws(code: str, status: int = 400, **headers: str) -> Any:
    metadata = {
        "HTTPStatusCode": status,
        "HTTPHeaders": {name.replace("_", "-"): value for name, value in headers.items()},
    }
    return fake_error(
        "botocore.exceptions.ClientError",
        response={"Error": {"Code": code, "Message": "no"}, "ResponseMetadata": metadata},
    )


class RpcError(Exception):
    """grpcio's: its facts are methods."""

    __module__ = "grpc"

    def __init__(self, code: str, said: str = "no", metadata: Any = ()) -> None:
        super().__init__(said)
        self._code, self._metadata = code, metadata

    def code(self) -> Any:
        return SimpleNamespace(name=self._code, value=(1, "what it means"))

    def trailing_metadata(self) -> Any:
        """Pairs of a name and a value."""
        return self._metadata
