"""Clouds: AWS by botocore, Google by google-api-core and google-auth, and plain gRPC."""

import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any
from unittest.mock import patch

from tests.clients.expectations import (
    CONFLICT,
    OUTCOME_UNKNOWN,
    RATE_LIMITED,
    REFUSED,
    UNAUTHORIZED,
    UNREACHABLE,
    Places,
    cases,
    raising,
)
from tests.clients.model_calls import google_says
from tests.clients.other_servers import grpc_aborts, grpc_hangs
from tests.clients.servers import (
    accepts_no_connection,
    answers,
    breaks_off,
    hangs_up,
    is_not_trusted,
    name_servers_away,
    never_answers,
    patience,
    refuses,
    resets,
)


@cache
def _session() -> Any:
    """One session per process, because reading the service descriptions takes long."""
    from botocore.session import Session

    return Session()


def _aws(service: str, url: str) -> Any:
    from botocore.config import Config

    config = Config(
        retries={"total_max_attempts": 1},
        connect_timeout=patience(),
        read_timeout=patience(),
        proxies={},
    )
    return _session().create_client(
        service,
        region_name="eu-west-1",
        endpoint_url=url,
        aws_access_key_id="made",
        aws_secret_access_key="up",
        config=config,
    )


def dynamodb(url: str) -> Any:
    client = _aws("dynamodb", url)
    try:
        return client.get_item(TableName="t", Key={"id": {"S": "1"}})
    finally:
        client.close()


def s3(url: str) -> Any:
    client = _aws("s3", url)
    try:
        return client.get_object(Bucket="b", Key="k")["Body"].read()
    finally:
        client.close()


def invoke(url: str) -> Any:
    client = _aws("lambda", url)
    try:
        return client.invoke(FunctionName="f")
    finally:
        client.close()


def wrong_parameters(_: Places) -> Any:
    """What the library refuses to send."""
    client = _aws("dynamodb", "http://127.0.0.1:9")
    try:
        return client.get_item(Nonsense=1)
    finally:
        client.close()


def no_credentials(_: Places) -> Any:
    from botocore.session import Session

    session = Session()
    session.get_component("credential_provider").providers.clear()
    client = session.create_client("s3", region_name="eu-west-1", endpoint_url="http://127.0.0.1:9")
    try:
        return client.list_buckets()
    finally:
        client.close()


def aws_says(code: str) -> dict[str, Any]:
    """The body of AWS's errors in JSON."""
    return {"__type": f"com.amazonaws.dynamodb.v20120810#{code}", "message": "No."}


def s3_says(code: str) -> str:
    """The body of S3's errors."""
    return f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code><Message>No.</Message></Error>'


_THROTTLED = aws_says("ThrottlingException")
_TOO_MUCH = aws_says("ProvisionedThroughputExceededException")

BOTOCORE = [
    *cases(
        "botocore",
        dynamodb,
        {
            "400 ThrottlingException": (answers(400, _THROTTLED), RATE_LIMITED),
            "400 ThrottlingException, x-amz-retry-after": (
                answers(400, _THROTTLED, x_amz_retry_after="1500"),
                RATE_LIMITED.after(1.5),
            ),
            "400 ProvisionedThroughputExceededException": (answers(400, _TOO_MUCH), RATE_LIMITED),
            "400 RequestLimitExceeded": (
                answers(400, aws_says("RequestLimitExceeded")),
                RATE_LIMITED,
            ),
            "400 ExpiredTokenException": (
                answers(400, aws_says("ExpiredTokenException")),
                UNAUTHORIZED,
            ),
            "400 UnrecognizedClientException": (
                answers(400, aws_says("UnrecognizedClientException")),
                UNAUTHORIZED,
            ),
            "400 AccessDeniedException": (answers(400, aws_says("AccessDeniedException")), REFUSED),
            "400 ValidationException": (answers(400, aws_says("ValidationException")), REFUSED),
            "400 ResourceNotFoundException": (
                answers(400, aws_says("ResourceNotFoundException")),
                REFUSED,
            ),
            "400 ConditionalCheckFailedException": (
                answers(400, aws_says("ConditionalCheckFailedException")),
                REFUSED,
            ),
            "500 InternalServerError": (
                answers(500, aws_says("InternalServerError")),
                OUTCOME_UNKNOWN,
            ),
            "503, not JSON": (answers(503, "<html>Service Unavailable</html>"), OUTCOME_UNKNOWN),
            "does not answer": (never_answers, OUTCOME_UNKNOWN),
            "hangs up": (hangs_up, OUTCOME_UNKNOWN),
            "resets": (resets, OUTCOME_UNKNOWN),
            "refuses the connection": (refuses, UNREACHABLE),
            "accepts nobody": (accepts_no_connection, UNREACHABLE),
            "name servers away": (name_servers_away, UNREACHABLE),
            "is not trusted": (is_not_trusted, REFUSED),
        },
    ),
    *cases(
        "botocore, S3:",
        s3,
        {
            "503 SlowDown": (answers(503, s3_says("SlowDown")), RATE_LIMITED),
            "403 AccessDenied": (answers(403, s3_says("AccessDenied")), REFUSED),
            "400 ExpiredToken": (answers(400, s3_says("ExpiredToken")), UNAUTHORIZED),
            "404 NoSuchKey": (answers(404, s3_says("NoSuchKey")), REFUSED),
            "500 InternalError": (answers(500, s3_says("InternalError")), OUTCOME_UNKNOWN),
            "breaks off": (breaks_off, OUTCOME_UNKNOWN),
        },
    ),
    *cases(
        "botocore, Lambda:",
        invoke,
        {
            "429, Retry-After": (
                answers(429, x_amzn_errortype="TooManyRequestsException", retry_after="3"),
                RATE_LIMITED.after(3),
            ),
            "403 ExpiredTokenException": (
                answers(403, x_amzn_errortype="ExpiredTokenException"),
                UNAUTHORIZED,
            ),
            "502 ServiceException": (
                answers(502, x_amzn_errortype="ServiceException"),
                OUTCOME_UNKNOWN,
            ),
        },
    ),
    *raising(
        "botocore",
        {
            "ParamValidationError": (wrong_parameters, REFUSED),
            "NoCredentialsError": (no_credentials, UNAUTHORIZED),
        },
    ),
]


def google_rest(url: str) -> Any:
    """One POST, its answer made into an error as every generated REST client does it."""
    import requests
    from google.api_core.exceptions import from_http_response

    with requests.post(url, json={}, timeout=patience()) as response:
        raise from_http_response(response)


def _grpc(wrap: Callable[[Any], Any], target: str) -> Any:
    import grpc

    with grpc.insecure_channel(target.removeprefix("http://")) as channel:
        return wrap(channel.unary_unary("/shop.Charges/Create"))(b"", timeout=patience())


def grpc(target: str) -> Any:
    return _grpc(lambda method: method, target)


def grpc_streaming(target: str) -> Any:
    """One call of a method that answers with many messages."""
    import grpc

    with grpc.insecure_channel(target.removeprefix("http://")) as channel:
        return list(channel.unary_stream("/shop.Charges/List")(b"", timeout=patience()))


def grpc_async(target: str) -> Any:
    """One call of a method in an event loop of its own."""
    import asyncio

    import grpc.aio

    async def call() -> Any:
        async with grpc.aio.insecure_channel(target.removeprefix("http://")) as channel:
            return await channel.unary_unary("/shop.Charges/Create")(b"", timeout=patience())

    return asyncio.run(call())


def google_grpc(target: str) -> Any:
    """One call of a method, wrapped as every generated gRPC client does it."""
    from google.api_core.grpc_helpers import wrap_errors

    return _grpc(wrap_errors, target)


def google_retrying(target: str) -> Any:
    """One call of a method, repeated by the library until it gives up."""
    from google.api_core.exceptions import ServiceUnavailable
    from google.api_core.retry import Retry, if_exception_type

    retry = Retry(if_exception_type(ServiceUnavailable), initial=0.01, maximum=0.01, timeout=0.02)
    return retry(google_grpc)(target)


def google_token(url: str) -> Any:
    """A fresh access token for a refresh token."""
    from google.auth.transport.requests import Request
    from google.oauth2.credentials import Credentials

    credentials = Credentials(
        token=None,
        refresh_token="made-up",
        token_uri=url,
        client_id="somebody",
        client_secret="made-up",
    )
    request = Request()
    try:
        return credentials.refresh(
            lambda *args, **options: request(*args, **{**options, "timeout": patience()})
        )
    finally:
        request.session.close()


def google_credentials(_: Places) -> Any:
    """Credentials in a file that does not exist."""
    from google.auth import default

    with patch.dict(os.environ, GOOGLE_APPLICATION_CREDENTIALS="/nowhere/at/all.json"):
        return default()


_RETRY_INFO = {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "13s"}

GOOGLE = [
    *cases(
        "google-api-core, REST:",
        google_rest,
        {
            "429": (answers(429, google_says(429, "RESOURCE_EXHAUSTED")), RATE_LIMITED),
            "429, RetryInfo": (
                answers(429, google_says(429, "RESOURCE_EXHAUSTED", _RETRY_INFO)),
                RATE_LIMITED.after(13),
            ),
            "401": (answers(401, google_says(401, "UNAUTHENTICATED")), UNAUTHORIZED),
            "403": (answers(403, google_says(403, "PERMISSION_DENIED")), REFUSED),
            "403 rateLimitExceeded": (
                answers(403, {"error": {"code": 403, "errors": [{"reason": "rateLimitExceeded"}]}}),
                RATE_LIMITED,
            ),
            "404": (answers(404, google_says(404, "NOT_FOUND")), REFUSED),
            "503": (answers(503, google_says(503, "UNAVAILABLE")), OUTCOME_UNKNOWN),
        },
    ),
    *cases(
        "google-api-core, gRPC:",
        google_grpc,
        {
            "ResourceExhausted": (grpc_aborts("RESOURCE_EXHAUSTED"), RATE_LIMITED),
            "ResourceExhausted, RetryInfo": (
                grpc_aborts("RESOURCE_EXHAUSTED", retry_after=13),
                RATE_LIMITED.after(13),
            ),
            "ServiceUnavailable": (grpc_aborts("UNAVAILABLE"), OUTCOME_UNKNOWN),
            "DeadlineExceeded": (grpc_hangs, OUTCOME_UNKNOWN),
            "InternalServerError": (grpc_aborts("INTERNAL"), OUTCOME_UNKNOWN),
            "NotFound": (grpc_aborts("NOT_FOUND"), REFUSED),
            "InvalidArgument": (grpc_aborts("INVALID_ARGUMENT"), REFUSED),
            "FailedPrecondition": (grpc_aborts("FAILED_PRECONDITION"), REFUSED),
            "PermissionDenied": (grpc_aborts("PERMISSION_DENIED"), REFUSED),
            "Unauthenticated": (grpc_aborts("UNAUTHENTICATED"), UNAUTHORIZED),
            "Aborted": (grpc_aborts("ABORTED"), CONFLICT),
        },
    ),
    *cases(
        "google-api-core, retrying:",
        google_retrying,
        {"RetryError": (grpc_aborts("UNAVAILABLE"), OUTCOME_UNKNOWN)},
    ),
    *cases(
        "google-auth",
        google_token,
        {
            "RefreshError": (
                answers(400, {"error": "invalid_grant", "error_description": "No."}),
                REFUSED,
            ),
            "TransportError": (refuses, UNREACHABLE),
        },
    ),
    *raising("google-auth", {"DefaultCredentialsError": (google_credentials, UNAUTHORIZED)}),
]

GRPC = [
    *cases(
        "grpc",
        grpc,
        {
            "RESOURCE_EXHAUSTED": (grpc_aborts("RESOURCE_EXHAUSTED"), RATE_LIMITED),
            "RESOURCE_EXHAUSTED, RetryInfo": (
                grpc_aborts("RESOURCE_EXHAUSTED", retry_after=0.5),
                RATE_LIMITED.after(0.5),
            ),
            "DEADLINE_EXCEEDED": (grpc_hangs, OUTCOME_UNKNOWN),
            "UNAVAILABLE": (grpc_aborts("UNAVAILABLE"), OUTCOME_UNKNOWN),
            "INTERNAL": (grpc_aborts("INTERNAL"), OUTCOME_UNKNOWN),
            "UNKNOWN": (grpc_aborts("UNKNOWN"), OUTCOME_UNKNOWN),
            "DATA_LOSS": (grpc_aborts("DATA_LOSS"), OUTCOME_UNKNOWN),
            "CANCELLED": (grpc_aborts("CANCELLED"), OUTCOME_UNKNOWN),
            "INVALID_ARGUMENT": (grpc_aborts("INVALID_ARGUMENT"), REFUSED),
            "NOT_FOUND": (grpc_aborts("NOT_FOUND"), REFUSED),
            "ALREADY_EXISTS": (grpc_aborts("ALREADY_EXISTS"), REFUSED),
            "PERMISSION_DENIED": (grpc_aborts("PERMISSION_DENIED"), REFUSED),
            "FAILED_PRECONDITION": (grpc_aborts("FAILED_PRECONDITION"), REFUSED),
            "OUT_OF_RANGE": (grpc_aborts("OUT_OF_RANGE"), REFUSED),
            "UNIMPLEMENTED": (grpc_aborts("UNIMPLEMENTED"), REFUSED),
            "UNAUTHENTICATED": (grpc_aborts("UNAUTHENTICATED"), UNAUTHORIZED),
            "ABORTED": (grpc_aborts("ABORTED"), CONFLICT),
            "refuses the connection": (refuses, UNREACHABLE),
            # Not a valid host name, so no resolver is asked.
            "name unknown": (lambda: nullcontext("dns:///127.0.0.1..:1"), UNREACHABLE),
        },
    ),
    *cases(
        "grpc, streaming:",
        grpc_streaming,
        {
            "RESOURCE_EXHAUSTED, RetryInfo": (
                grpc_aborts("RESOURCE_EXHAUSTED", retry_after=2.5),
                RATE_LIMITED.after(2.5),
            ),
            "UNAVAILABLE": (grpc_aborts("UNAVAILABLE"), OUTCOME_UNKNOWN),
        },
    ),
    *cases(
        "grpc, async:",
        grpc_async,
        {
            "RESOURCE_EXHAUSTED, RetryInfo": (
                grpc_aborts("RESOURCE_EXHAUSTED", retry_after=2.5),
                RATE_LIMITED.after(2.5),
            ),
            "INVALID_ARGUMENT": (grpc_aborts("INVALID_ARGUMENT"), REFUSED),
            "DEADLINE_EXCEEDED": (grpc_hangs, OUTCOME_UNKNOWN),
            "refuses the connection": (refuses, UNREACHABLE),
        },
    ),
]
