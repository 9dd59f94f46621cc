"""Secrets do not survive in stored texts; everything else does."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_leases.core.redaction import REDACTED, redact
from tests.unit.ids import steady

SECRET = "Zx9-secretvalue_1"

HIDDEN = [
    f"Authorization: Bearer {SECRET}",
    f"authorization: {SECRET}",
    f"{{'Authorization': 'Bearer {SECRET}', 'Accept': '*/*'}}",
    f"headers=[(b'authorization', b'Bearer {SECRET}')]",
    f"curl -H 'authorization: Basic {SECRET}=='",
    f"bearer {SECRET}",
    "Bearer onlylettersarestillasecretvalue",
    f"x-api-key: {SECRET}",
    f"ApiError(api_key='{SECRET}', timeout=5)",
    f'{{"api_key": "{SECRET}", "model": "m"}}',
    f'{{\\"api_key\\": \\"{SECRET}\\", \\"model\\": \\"m\\"}}',
    f"client_secret={SECRET}&grant_type=refresh_token",
    f"https://maps.example.com/json?key={SECRET}&q=Bern",
    f"https://files.example.com/f?X-Amz-Signature={SECRET}&X-Amz-Date=1",
    f"https://blob.example.com/f?sv=1&sig={SECRET}",
    f"?access_token={SECRET}",
    f"token: {SECRET}",
    f"password={SECRET}",
    f"password: '{SECRET}'",
    f"PASSWORD = {SECRET}",
    f"passwd={SECRET}",
    f"pwd={SECRET};server=db",
    f"AccountKey={SECRET}",
    f"aws_secret_access_key={SECRET}",
    f"Cookie: session={SECRET}",
    f"postgresql://billing:{SECRET}@db:5432/shop",
    f"redis://:{SECRET}@cache:6379/0",
    f"amqp://user:p@{SECRET}@mq//",
    f'api_key="{SECRET}',
]

SHAPES = [
    "sk-proj-abcDEF123456789",
    "sk-ant-api03-abcDEF_123-456",
    "sk-ab****************1234",
    "sk_live_4eC39HqLyjWDarjtT1zdp7dc",
    "rk_live_4eC39HqLyjWDarjtT1zdp7dc",
    "sk_test_4eC39HqLyjWDarjtT1zdp7dc",
    "whsec_4eC39HqLyjWDarjtT1zdp7dc",
    "AKIAIOSFODNN7EXAMPLE",
    "ASIAIOSFODNN7EXAMPLE",
    "AIzaSyD-abcdefghijklmnopqrstuvwxyz12345",
    "xoxb-123456789012-abcdef",
    "xoxp-123456789012-abcdef",
    "ghp_abcdefghijklmnopqrstuvwxyz0123456789",
    "github_pat_abcdefghijklmnopqrstuvwxyz",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dozjgNryP4J3jVmNHl0w5N",
]

KEPT = [
    "",
    "Error code: 429 - {'error': {'message': 'Rate limit reached for gpt-4o in organization org-abc', 'code': None}}",
    "Limit 30000, Used 29000, Requested 1500. Please try again in 1s.",
    "max_tokens: 4096 is more than the tokens=2048 that are left",
    "Unexpected token < in JSON at position 0",
    "password authentication failed for user billing",
    "Basic authentication is required",
    "https://api.example.com:8443/v1/charges?limit=3",
    "Key (id)=(5) already exists.",
    "KeyError: 'total'",
    "key: invoice:1842",
    '{"key": "invoice:1842"}',
    "monkey=5 turkey=6",
    "task-123456 of the risk-assessment-team",
    "mail to them@example.com bounced",
]


@pytest.mark.parametrize("text", HIDDEN)
def test_a_named_secret_is_taken_out(text: str) -> None:
    """Headers, JSON, query strings, keyword arguments and URLs."""
    shown = redact(text)
    assert SECRET not in shown
    assert "secretvalue" not in shown
    assert REDACTED in shown


@pytest.mark.parametrize("secret", SHAPES)
def test_a_secret_of_a_known_shape_is_taken_out_wherever_it_stands(secret: str) -> None:
    """No name is needed beside it."""
    assert redact(f"Incorrect API key provided: {secret}. Find yours in the console.") == (
        f"Incorrect API key provided: {REDACTED}. Find yours in the console."
    )


@pytest.mark.parametrize("text", KEPT)
def test_what_is_no_secret_stays(text: str) -> None:
    """A message that nobody can read helps nobody."""
    assert redact(text) == text


def test_the_rest_of_a_text_with_a_secret_stays_readable() -> None:
    """Only the value goes; quotes, names and neighbours stay."""
    assert redact(f"POST https://u:{SECRET}@host/v1?key={SECRET}&page=2 failed: 500") == (
        f"POST https://{REDACTED}@host/v1?key={REDACTED}&page=2 failed: 500"
    )
    assert redact(f'{{"api_key": "{SECRET}", "model": "m"}}') == f'{{"api_key": "{REDACTED}", "model": "m"}}'
    for scheme in ("ApiKey", 'Digest username="u", response=', "Negotiate"):
        assert SECRET not in redact(f"Authorization: {scheme} {SECRET}\nnext")
        assert redact(f"Proxy-Authorization: {scheme} {SECRET}\nnext").endswith("\nnext")
    assert SECRET not in redact(f"{{'set-cookie': ['{SECRET}']}}")
    assert redact(f"Authorization: Bearer {SECRET}, retried") == f"Authorization: Bearer {REDACTED}, retried"


@given(st.text(alphabet="abekyst=:'\"\\/@ .-_[]\n0", max_size=200))
def test_redaction_never_fails_and_is_stable(text: str) -> None:
    """A text that went through once has nothing left to hide."""
    once = redact(text)
    assert redact(redact(once)) == redact(once)


ADVERSARIES = [
    "a", "://", "sk-", "token=", 'token="', "token='\\", "eyJ", "eyJa.", "bearer ", "basic aaaaaaa ", "api_key", "key=",
    "authorization: bearer ", "\\", "'", '"', "=", ":", " ", "AKIA", "AIza", "xoxb-", "://a", "password" + " " * 3,
    "secret\\\"'", "e", "@", "://" + "a" * 600,
]  # fmt: skip


@pytest.mark.parametrize("part", ADVERSARIES, ids=steady)
def test_a_long_hostile_text_takes_no_longer_than_its_length(part: str) -> None:
    """100 kB of what a pattern likes best; a quadratic one would take minutes."""
    text = part * (100_000 // len(part)) + "!"
    begun = time.thread_time()
    redact(text)
    assert time.thread_time() - begun < 2
