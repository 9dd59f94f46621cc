"""Secrets do not survive in stored texts; everything else does."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_leases import events, signals
from celery_leases.errors import KeyReused
from celery_leases.events import CallRefused, Event
from celery_leases.record import Failure
from celery_leases.signals import LINE_MAX, Announcer
from celery_leases.text.cleaning import printable
from celery_leases.text.notices import logger
from celery_leases.text.redaction import REDACTED, redact, shortened
from tests.unit.case_ids import stable_id

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

PROMISED = [
    f"xapp-1-A012BCDEFGH-1234567890-{SECRET}",
    f"xoxe.xoxp-1-{SECRET}",
    f"POST https://hooks.slack.com/services/T0001/B0002/{SECRET} answered 404",
    f"https://hooks.slack.com/workflows/T0001/{SECRET}",
    f"https://discord.com/api/webhooks/1234567/{SECRET}",
    f"https://api.telegram.org/bot1234567:{SECRET}/sendMessage",
    f"postgresql://billing:pa/{SECRET}@db:5432/shop",
    f"postgresql://billing:pa#{SECRET}@db:5432/shop",
    f"postgresql://billing:12/{SECRET}@db:5432/shop",
    f"postgresql+psycopg://billing:p@a/{SECRET}@db/shop",
    f"redis://:/{SECRET}@cache:6379/0",
    f"redis://:pa?{SECRET}@cache:6379/0",
    f"redsi://:{SECRET}@cache",
    f"https://billing:pa/{SECRET}@host/v1",
    f"https://billing:pa?{SECRET}@host/v1?q=1",
    f"sentinel://:{SECRET}@one:26379;sentinel://:{SECRET}@two:26379",
    f"amqp://a:{SECRET}@one//,amqp://a:{SECRET}@two//",
    f"[('Authorization', 'Bearer {SECRET}')]",
    f"('Authorization', '{SECRET}')",
    f"(b'X-Api-Key', b'{SECRET}')",
    f'["authorization", "{SECRET}"]',
    f"data=[('password', '{SECRET}')]",
    f"{{b'x-api-key': b'{SECRET}'}}",
    f"{{'x-api-key': ['{SECRET}']}}",
    f"Cookie: theme=dark; session={SECRET}",
    f"cookie: a=1; b=2; csrftoken={SECRET}",
    f"Set-Cookie: id={SECRET}; Path=/; HttpOnly",
    f"{{'Cookie': 'theme=dark; session={SECRET}'}}",
    f"('Cookie', 'theme=dark; session={SECRET}')",
    f"cookies={{'theme': 'dark', 'session': '{SECRET}'}}",
    f"<RequestsCookieJar[<Cookie session={SECRET} for example.com/>]>",
    f"Driver={{ODBC Driver 18}};Server=db;UID=sa;PWD={{pa;ss}}}}{SECRET}}};Encrypt=yes",
    f"Server=db;User Id=sa;Password=correct {SECRET};Encrypt=yes",
    f"Server=db;User Id=sa;Password=correct {SECRET}",
    f"login(token => '{SECRET}')",
    f"token -> '{SECRET}'",
    f"token := '{SECRET}'",
    f"password == '{SECRET}'",
    f"password='correct {SECRET}'",
    f'password: "correct {SECRET}"',
    f"ALTER ROLE billing WITH PASSWORD 'correct {SECRET}'",
    f"CREATE USER shop IDENTIFIED BY '{SECRET}'",
    f"-----BEGIN PRIVATE KEY-----\nMIIE{SECRET}\n-----END PRIVATE KEY-----",
    f"-----BEGIN RSA PRIVATE KEY-----\\nMIIE{SECRET}\\n-----END RSA PRIVATE KEY-----",
    f"-----BEGIN OPENSSH PRIVATE KEY-----\nb3Bl{SECRET}",
    f"-----BEGIN PGP PRIVATE KEY BLOCK-----\n{SECRET}\n-----END PGP PRIVATE KEY BLOCK-----",
    f"DB_PASS={SECRET}",
    f"SMTP_PASS: '{SECRET}'",
    f"{{'smtp_pass': '{SECRET}'}}",
    f"user=billing&pass={SECRET}",
    f"postgresql://db/shop?user=billing&password={SECRET}",
    f"postgresql://db/shop?sslpassword={SECRET}&sslmode=require",
    f"mysql://db/shop?ssl_key_password={SECRET}",
    f"redis://cache/0?password=a,b({SECRET}",
    f"password=pa,{SECRET}",
    f"password=pa'{SECRET}",
    f"password=pa(b){SECRET}",
    f"<password>{SECRET}</password>",
    f"<wsse:Password Type='x'>{SECRET}</wsse:Password>",
    f"mysqldump --password {SECRET} shop",
    f"tool --access-token {SECRET}",
    f"ENCRYPTION_KEY={SECRET}",
    f"ya29.{SECRET}-abcdefghijklmnop",
    f"glpat-{SECRET}-abcdefgh",
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
    "https://host:8443/v1/me@example.com",
    "https://example.com/@somebody/notes?to=a@example.com#b@c",
    "https://registry.example.com/@scope/package",
    "postgresql://db:5432/shop?user=a@b",
    "redis://cache:6379/0",
    "https://[::1]:8443/v1/a@b",
    "see https://hooks.slack.com/services for how to make one",
    "https://api.telegram.org/",
    "the xapp- prefix is missing",
    "missing fields: ['password', 'email', 'name']",
    "choose one of ['token', 'session']",
    "loc=('body', 'user', 'password'), msg='field required'",
    "required: 'password', 'email'",
    "password=None",
    "ApiError(api_key=None, token='', timeout=5)",
    '{"token": null, "secret": false}',
    "password=********",
    "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----",
    "-----BEGIN PUBLIC KEY-----\nMIIB\n-----END PUBLIC KEY-----",
    "passed=12 compass=5 bypass=on",
    "pass: 12, fail: 3",
    "the password is too short",
    "Password must have 12 characters or more",
    "the --password option is required",
    "unknown option --token-type",
    "Passwords do not match",
    "the secret of good tasks",
    'secrets "db-credentials" not found',
    "cookies are off",
    "the cookie has expired",
    "authorization failed",
    "token expired 5 minutes ago",
    "keyword = 7, keys = 9",
    "PWD is not set",
    "Server=db;Database=shop;Encrypt=yes",
    "lambda x -> x, a => b, c := d",
    "<b>password</b>",
    "1 -- 2 --- 3",
    "'it''s', \"quoted\"",
]


@pytest.mark.parametrize("text", HIDDEN + PROMISED)
def test_a_named_secret_is_taken_out(text: str) -> None:
    shown = redact(text)
    assert SECRET not in shown
    assert "secretvalue" not in shown
    assert REDACTED in shown


@pytest.mark.parametrize("secret", SHAPES)
def test_a_secret_of_a_known_shape_is_taken_out_wherever_it_stands(secret: str) -> None:
    assert redact(f"Incorrect API key provided: {secret}. Find yours in the console.") == (
        f"Incorrect API key provided: {REDACTED}. Find yours in the console."
    )


@pytest.mark.parametrize("text", KEPT)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redact(text) == text


def test_the_rest_of_a_text_with_a_secret_stays_readable() -> None:
    assert redact(f"POST https://u:{SECRET}@host/v1?key={SECRET}&page=2 failed: 500") == (
        f"POST https://{REDACTED}@host/v1?key={REDACTED}&page=2 failed: 500"
    )
    assert (
        redact(f'{{"api_key": "{SECRET}", "model": "m"}}')
        == f'{{"api_key": "{REDACTED}", "model": "m"}}'
    )
    for scheme in ("ApiKey", 'Digest username="u", response=', "Negotiate"):
        assert SECRET not in redact(f"Authorization: {scheme} {SECRET}\nnext")
        assert redact(f"Proxy-Authorization: {scheme} {SECRET}\nnext").endswith("\nnext")
    assert SECRET not in redact(f"{{'set-cookie': ['{SECRET}']}}")
    assert (
        redact(f"Authorization: Bearer {SECRET}, retried")
        == f"Authorization: Bearer {REDACTED}, retried"
    )


ADVERSARIES = [
    "a", "://", "sk-", "token=", 'token="', "token='\\", "eyJ", "eyJa.", "bearer ", "basic aaaaaaa ", "api_key",
    "key=", "authorization: bearer ", "\\", "'", '"', "=", ":", " ", "AKIA", "AIza", "xoxb-", "://a",
    "password" + " " * 3, "secret\\\"'", "e", "@", "://" + "a" * 600, "-----BEGIN PRIVATE KEY-----", "-----BEGIN ",
    "://a:b/@", "://a:" + "/" * 600, "http://a:b?", "('cookie', '", "cookie: a=", "set-cookie: [", "pwd={", "pwd={}",
    "}}", "password={" + "}}" * 9, ";pwd=", ";pwd=a ", "?password=", "&a.", "<password>", "<password ", "<a:",
    "--password ", "--a-", "password '", "password '\\", "token=a,", "token=a,b",
    "token=a,aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "token=a(b", "_pass", "pass ", "xapp-",
    "hooks.slack.com/services/", "hooks.slack.com/services/aaa ", "<Cookie a", "a=>", "token=>", "('token',", "-",
    "_", "[", "(b'", "identified by  ",
]  # fmt: skip


@given(
    st.lists(
        st.sampled_from([*"abekyst=:'\"\\/@ .-_[]{}()<>?#,;\n0", *ADVERSARIES]), max_size=60
    ).map("".join)
)
def test_redaction_never_fails_and_is_stable(text: str) -> None:
    once = redact(text)
    assert redact(redact(once)) == redact(once)


@pytest.mark.parametrize("part", ADVERSARIES, ids=stable_id)
def test_a_long_hostile_text_takes_no_longer_than_its_length(part: str) -> None:
    """100 kB of what a pattern likes best; a quadratic one would take minutes."""
    text = part * (100_000 // len(part)) + "!"
    begun = time.thread_time()
    redact(text)
    assert time.thread_time() - begun < 2


@pytest.mark.parametrize("secret", [*HIDDEN, *PROMISED, *SHAPES], ids=stable_id)
def test_no_cut_shows_part_of_a_secret(secret: str) -> None:
    text = f"the request failed: {secret} and what follows {'x ' * 5000}"
    whole = redact(text)
    for limit in range(20, 40 + len(secret), 3):
        shown = shortened(text, limit)
        assert len(shown) <= limit
        assert whole.startswith(shown.removesuffix("…"))


def test_a_short_text_is_not_cut_and_a_long_secret_is_not_shown() -> None:
    assert shortened("failed", 6) == "failed"
    assert shortened("failed!", 6) == "faile…"
    assert shortened(f"token={'x' * 3000}", 100) == f"token={REDACTED}…"
    assert shortened(f"token={'x' * 30_000_000}", 100) == f"token={REDACTED}…"
    assert shortened(f"a{'b ' * 50}token={'x' * 3000}", 20) == f"a{'b ' * 9}…"


class RenewalResult(logging.Handler):
    """A handler that formats records and stores them."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the text and the record."""
        self.texts.append(self.format(record))
        self.records.append(record)


@pytest.fixture
def kept() -> Any:
    """A handler on the library's logger."""
    handler = RenewalResult()
    logger.logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield handler
    logger.setLevel(logging.NOTSET)
    logger.logger.removeHandler(handler)


def test_secrets_are_taken_out_of_tracebacks_and_the_exception_is_still_there(kept) -> None:
    with pytest.raises(RuntimeError) as raised:
        raise RuntimeError("denied for api_key=sk-abcdef0123456789")
    logger.warning("raised, and will run again", exc_info=raised.value)
    (record,), (text,) = kept.records, kept.texts
    assert record.exc_info is not None
    assert record.exc_info[1] is raised.value
    assert "sk-abcdef" not in text
    assert "RuntimeError: denied for api_key=[redacted]" in text
    assert "Traceback" in text


def test_an_error_that_cannot_be_printed_does_not_stop_the_line(kept: RenewalResult) -> None:
    class Unprintable(Exception):
        def __str__(self) -> str:
            raise ValueError("no text")

    logger.warning("raised, and will run again", exc_info=Unprintable())
    assert "raised, and will run again" in kept.texts[0]


def test_lines_without_an_exception_are_left_alone(kept: RenewalResult) -> None:
    logger.warning("a plain line")
    assert kept.records[0].exc_text is None


FORGED = "invoice:1\n[2026-11-22 06:00:00,000: WARNING/MainProcess] forged\x1b[2J\u202e"


def test_a_key_with_a_line_feed_forges_no_line(kept: RenewalResult) -> None:
    subject = {"task": f"shop.work{FORGED}", "key": FORGED, "call_id": FORGED}
    Announcer().observe(CallRefused(**subject, error=f"token=abc {FORGED}"))
    held = events.LeaseHeld(
        **subject, holder=FORGED, holder_call_id=FORGED, remaining=1.0, same_call=False
    )
    Announcer().observe(held)
    logger.warning(
        "%s[%s] could not be rescheduled: %s", "shop.work", FORGED, OSError(f"no way {FORGED}")
    )
    assert len(kept.texts) == 3
    for text in kept.texts:
        assert text.isprintable()
        assert r"invoice:1\n[2026-11-22" in text
    assert "token=[redacted]" in kept.texts[0]
    assert kept.records[0].__dict__["data"]["key"] == FORGED


def an_event(kind: type[Event], text: str) -> Event:
    """One of that kind, *text* in each of its texts."""
    values = {
        "int": 3, "float": 1.25, "bool": True, "Failure": Failure("ValueError", text, "a-rule"),
    }  # fmt: skip
    given: dict[str, Any] = {
        each.name: values.get(str(each.type).partition(" ")[0], text) for each in fields(kind)
    }
    return kind(**given)


@pytest.mark.parametrize("kind", signals.SIGNALS)
@pytest.mark.parametrize("text", ["plain", FORGED, "k" * 1000])
def test_the_line_of_an_event_has_its_fields_and_its_record_all_of_them(kept, kind, text) -> None:
    event = an_event(kind, text)
    signals._log(event)
    (record,) = kept.records
    assert record.__dict__["data"] == asdict(event)
    assert record.__dict__["lease_event"] == signals.SIGNALS[kind].name
    shown = printable(text)
    assert kept.texts[0].startswith(f"{shown}[{shown}] key {shown}: ")
    assert kept.texts[0].isprintable()
    assert len(kept.texts[0]) <= LINE_MAX
    assert "{" not in kept.texts[0]


def test_a_long_key_is_cut_and_a_long_line_too(kept: RenewalResult) -> None:
    Announcer().observe(
        CallRefused(task="shop.work", key="k" * 100_000, call_id="call-1", error="no")
    )
    logger.warning("raised: %s", "x" * 100_000)
    assert kept.texts[0].endswith("…: refused: no")
    assert all(len(text) <= LINE_MAX for text in kept.texts)


def test_a_traceback_has_its_line_breaks_and_no_other_control_characters(kept) -> None:
    logger.warning("raised", exc_info=RuntimeError(f"\x1b[2J {'x' * 30_000_000}"))
    assert "\x1b" not in kept.texts[0]
    assert "RuntimeError: \\x1b[2J x" in kept.texts[0]
    assert len(kept.texts[0]) < 40_000


def test_the_message_of_an_error_shows_a_printable_key(kept: RenewalResult) -> None:
    error = KeyReused(f"{FORGED}: it stands for other arguments", FORGED, ["amount"])
    assert str(error).isprintable()
    assert error.key == FORGED
    assert str(type(error)(*error.args)) == str(error)
    assert len(str(KeyReused(f"{'k' * 9000}: other arguments", "k" * 9000))) < 400
