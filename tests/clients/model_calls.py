"""Calls of language models: OpenAI, Anthropic and Gemini."""

import json
from typing import Any

from tests.clients.expectations import (
    CONFLICT,
    ERROR,
    OUT_OF_QUOTA,
    OUTCOME_UNKNOWN,
    RATE_LIMITED,
    REFUSED,
    TOLD_TO_STOP,
    UNAUTHORIZED,
    UNREACHABLE,
    cases,
)
from tests.clients.servers import (
    Server,
    accepts_no_connection,
    answers,
    breaks_off,
    hangs_up,
    http_date,
    is_not_trusted,
    name_servers_away,
    never_answers,
    patience,
    refuses,
    resets,
    rfc3339,
)


def openai(url: str) -> Any:
    import openai as library

    with library.OpenAI(
        api_key="made-up", base_url=f"{url}/v1", max_retries=0, timeout=patience()
    ) as client:
        return client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "Hello"}]
        )


def openai_async(url: str) -> Any:
    """One chat completion in an event loop of its own."""
    import asyncio

    import openai as library

    async def ask() -> Any:
        client = library.AsyncOpenAI(
            api_key="made-up", base_url=f"{url}/v1", max_retries=0, timeout=patience()
        )
        async with client:
            return await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "Hello"}]
            )

    return asyncio.run(ask())


def openai_stream(url: str) -> Any:
    """One chat completion, piece by piece."""
    import openai as library

    with library.OpenAI(
        api_key="made-up", base_url=f"{url}/v1", max_retries=0, timeout=patience()
    ) as client:
        messages: Any = [{"role": "user", "content": "Hello"}]
        return list(client.chat.completions.create(model="m", messages=messages, stream=True))


def anthropic(url: str) -> Any:
    import anthropic as library

    with library.Anthropic(
        api_key="made-up", base_url=url, max_retries=0, timeout=patience()
    ) as client:
        return client.messages.create(
            model="m", max_tokens=1, messages=[{"role": "user", "content": "Hello"}]
        )


def anthropic_stream(url: str) -> Any:
    """One message, piece by piece."""
    import anthropic as library

    with (
        library.Anthropic(
            api_key="made-up", base_url=url, max_retries=0, timeout=patience()
        ) as client,
        client.messages.stream(
            model="m", max_tokens=1, messages=[{"role": "user", "content": "Hello"}]
        ) as stream,
    ):
        return stream.get_final_message()


def gemini(url: str) -> Any:
    from google import genai
    from google.genai import types

    options = types.HttpOptions(base_url=url, timeout=round(patience() * 1000))
    client = genai.Client(api_key="made-up", http_options=options)
    try:
        return client.models.generate_content(model="m", contents="Hello")
    finally:
        client.close()


def openai_says(code: str | None, kind: str = "invalid_request_error") -> dict[str, Any]:
    return {"error": {"message": "No.", "type": kind, "param": None, "code": code}}


def google_says(code: int, status: str, *details: Any) -> dict[str, Any]:
    return {"error": {"code": code, "message": "No.", "status": status, "details": list(details)}}


def anthropic_says(kind: str, error_code: str | None = None) -> dict[str, Any]:
    details = {"details": {"error_code": error_code}} if error_code else {}
    return {
        "type": "error",
        "error": {"type": kind, "message": "No.", **details},
        "request_id": "req_1",
    }


_LIMIT = openai_says("rate_limit_exceeded", "requests")
_SPENT = openai_says("project_spend_limit_exceeded", "billing")
_BROKEN = openai_says(None, "server_error")
_EMPTY_WINDOW = {
    "x_ratelimit_remaining_requests": "12",
    "x_ratelimit_reset_requests": "6m0s",
    "x_ratelimit_remaining_tokens": "0",
    "x_ratelimit_reset_tokens": "1m30s",
}


def _in_openai_stream(kind: str, code: str | None = None) -> Server:
    chunk = {
        "id": "c",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": [],
    }
    error = {"error": {"message": "No.", "type": kind, "code": code}}
    events = "".join(f"data: {json.dumps(event)}\n\n" for event in (chunk, error))
    return answers(200, events, content_type="text/event-stream")


def _in_anthropic_stream(kind: str) -> Server:
    return answers(
        200,
        f"event: error\ndata: {json.dumps(anthropic_says(kind))}\n\n",
        content_type="text/event-stream",
    )


OPENAI = [
    *cases(
        "openai",
        openai,
        {
            "429, Retry-After in seconds": (
                answers(429, _LIMIT, retry_after="20"),
                RATE_LIMITED.after(20),
            ),
            "429, Retry-After is a date": (
                answers(429, _LIMIT, retry_after=http_date(90)),
                RATE_LIMITED.about(90),
            ),
            "429, Retry-After is a past date": (
                answers(429, _LIMIT, retry_after=http_date(-90)),
                RATE_LIMITED,
            ),
            "429, retry-after-ms": (
                answers(429, _LIMIT, retry_after="2", retry_after_ms="1500"),
                RATE_LIMITED.after(1.5),
            ),
            "429, the window that is empty": (
                answers(429, _LIMIT, **_EMPTY_WINDOW),
                RATE_LIMITED.after(90),
            ),
            "429, nothing told": (answers(429, _LIMIT), RATE_LIMITED),
            "429 insufficient_quota": (
                answers(429, openai_says("insufficient_quota")),
                OUT_OF_QUOTA,
            ),
            "429 insufficient_quota, Retry-After": (
                answers(429, openai_says("insufficient_quota"), retry_after="20"),
                OUT_OF_QUOTA.after(20),
            ),
            "429 credit_balance_exhausted": (
                answers(429, openai_says("credit_balance_exhausted")),
                OUT_OF_QUOTA,
            ),
            "429 project_spend_limit_exceeded": (answers(429, _SPENT), OUT_OF_QUOTA),
            "401": (answers(401, openai_says("invalid_api_key")), UNAUTHORIZED),
            "403": (answers(403, openai_says("unsupported_country_region_territory")), REFUSED),
            "400": (answers(400, openai_says("context_length_exceeded")), REFUSED),
            "404": (answers(404, openai_says("model_not_found")), REFUSED),
            "409": (answers(409, openai_says(None)), CONFLICT),
            "422": (answers(422, openai_says(None)), REFUSED),
            "500": (answers(500, _BROKEN), OUTCOME_UNKNOWN),
            "500, not JSON": (answers(500, "<html>Internal Server Error</html>"), OUTCOME_UNKNOWN),
            "503": (answers(503, _BROKEN), OUTCOME_UNKNOWN),
            "503, Retry-After": (answers(503, _BROKEN, retry_after="7"), RATE_LIMITED.after(7)),
            "520": (
                answers(520, "<html>Web server is returning an unknown error</html>"),
                OUTCOME_UNKNOWN,
            ),
            "does not answer": (never_answers, OUTCOME_UNKNOWN),
            "hangs up": (hangs_up, OUTCOME_UNKNOWN),
            "resets": (resets, OUTCOME_UNKNOWN),
            "breaks off": (breaks_off, OUTCOME_UNKNOWN),
            "refuses the connection": (refuses, UNREACHABLE),
            "accepts nobody": (accepts_no_connection, UNREACHABLE),
            "name servers away": (name_servers_away, UNREACHABLE),
            "is not trusted": (is_not_trusted, REFUSED),
        },
    ),
    *cases(
        "openai, async:",
        openai_async,
        {
            "429": (answers(429, _LIMIT, retry_after="20"), RATE_LIMITED.after(20)),
            "does not answer": (never_answers, OUTCOME_UNKNOWN),
            "refuses the connection": (refuses, UNREACHABLE),
        },
    ),
    *cases(
        "openai, stream:",
        openai_stream,
        {
            "a fault inside": (_in_openai_stream("server_error"), OUTCOME_UNKNOWN),
            "a limit inside": (_in_openai_stream("requests", "rate_limit_exceeded"), RATE_LIMITED),
            "no quota inside": (
                _in_openai_stream("insufficient_quota", "insufficient_quota"),
                OUT_OF_QUOTA,
            ),
            "breaks off": (breaks_off, OUTCOME_UNKNOWN),
        },
    ),
]

_BUSY = anthropic_says("rate_limit_error")
_WINDOWS = {
    "anthropic_ratelimit_requests_remaining": "0",
    "anthropic_ratelimit_requests_reset": rfc3339(90),
    "anthropic_ratelimit_tokens_remaining": "4000",
    "anthropic_ratelimit_tokens_reset": rfc3339(5),
}
_SPENT_HERE = anthropic_says("rate_limit_error", "enforced_spend_limit_reached")
_TOO_LARGE = anthropic_says("request_too_large")
_OVERLOADED = anthropic_says("overloaded_error")
_FAULT = anthropic_says("api_error")

ANTHROPIC = [
    *cases(
        "anthropic",
        anthropic,
        {
            "429, windows": (answers(429, _BUSY, **_WINDOWS), RATE_LIMITED.about(90)),
            "429, Retry-After wins": (
                answers(429, _BUSY, retry_after="12", **_WINDOWS),
                RATE_LIMITED.after(12),
            ),
            "429 enforced_spend_limit_reached": (answers(429, _SPENT_HERE), OUT_OF_QUOTA),
            "529": (answers(529, _OVERLOADED), RATE_LIMITED),
            "529, Retry-After": (
                answers(529, _OVERLOADED, retry_after="33"),
                RATE_LIMITED.after(33),
            ),
            "402 billing_error": (answers(402, anthropic_says("billing_error")), OUT_OF_QUOTA),
            "400 billing_error": (answers(400, anthropic_says("billing_error")), OUT_OF_QUOTA),
            "401": (answers(401, anthropic_says("authentication_error")), UNAUTHORIZED),
            "403": (answers(403, anthropic_says("permission_error")), REFUSED),
            "400": (answers(400, anthropic_says("invalid_request_error")), REFUSED),
            "404": (answers(404, anthropic_says("not_found_error")), REFUSED),
            "413": (answers(413, _TOO_LARGE), REFUSED),
            "413, Retry-After": (answers(413, _TOO_LARGE, retry_after="5"), RATE_LIMITED.after(5)),
            "500": (answers(500, _FAULT), OUTCOME_UNKNOWN),
            "500, x-should-retry: false": (
                answers(500, _FAULT, x_should_retry="false"),
                TOLD_TO_STOP,
            ),
            "504": (answers(504, anthropic_says("timeout_error")), OUTCOME_UNKNOWN),
            "does not answer": (never_answers, OUTCOME_UNKNOWN),
            "hangs up": (hangs_up, OUTCOME_UNKNOWN),
            "refuses the connection": (refuses, UNREACHABLE),
            "200, broken JSON": (
                answers(200, "{oops", content_type="application/json"),
                ERROR.of("JSONDecodeError"),
            ),
        },
    ),
    *cases(
        "anthropic, stream:",
        anthropic_stream,
        {
            "overloaded inside": (_in_anthropic_stream("overloaded_error"), RATE_LIMITED),
            "a limit inside": (_in_anthropic_stream("rate_limit_error"), RATE_LIMITED),
            "a fault inside": (_in_anthropic_stream("api_error"), OUTCOME_UNKNOWN),
        },
    ),
]

_RETRY_INFO = {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "13s"}
_NO_KEY = {"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": "API_KEY_INVALID"}

GEMINI = cases(
    "gemini",
    gemini,
    {
        "429, RetryInfo": (
            answers(429, google_says(429, "RESOURCE_EXHAUSTED", _RETRY_INFO)),
            RATE_LIMITED.after(13),
        ),
        "429": (answers(429, google_says(429, "RESOURCE_EXHAUSTED")), RATE_LIMITED),
        "402": (answers(402, google_says(402, "FAILED_PRECONDITION")), OUT_OF_QUOTA),
        "400": (answers(400, google_says(400, "INVALID_ARGUMENT")), REFUSED),
        "400 API_KEY_INVALID": (
            answers(400, google_says(400, "INVALID_ARGUMENT", _NO_KEY)),
            UNAUTHORIZED,
        ),
        "403": (answers(403, google_says(403, "PERMISSION_DENIED")), REFUSED),
        "500": (answers(500, google_says(500, "INTERNAL")), OUTCOME_UNKNOWN),
        "503": (answers(503, google_says(503, "UNAVAILABLE")), OUTCOME_UNKNOWN),
        "does not answer": (never_answers, OUTCOME_UNKNOWN),
        "refuses the connection": (refuses, UNREACHABLE),
    },
)
