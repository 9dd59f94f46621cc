"""Removes secrets (keys, tokens, passwords, signatures) from texts that are stored, logged and
shown.
"""

from __future__ import annotations

import re
from typing import Final

from celery_leases.text.cleaning import text_of

REDACTED: Final = "[redacted]"
MARGIN: Final = 2_000
"""More characters than any pattern reads after the place where a secret begins."""

# No pattern can match one text in two ways, so the time is linear in the length of the text.
_PRIVATE_KEY: Final = re.compile(r"-----BEGIN ([A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?)-----")
_URL_ENDS: Final = re.compile(r"[\s\"'<>]")
_URL_MAX: Final = 1_000
_SCHEME_OF_URL: Final = re.compile(r"[a-z0-9+.-]{1,30}\Z", re.IGNORECASE)
_WITH_PATHS: Final = frozenset(
    {"http", "https", "ws", "wss", "ftp", "sftp", "git", "ssh", "s3", "gs", "file"}
)
"""Schemes of URLs whose path may contain ``@``. In URLs of databases and brokers, ``@`` ends the
password.
"""

_WEBHOOK: Final = re.compile(
    r"(?:(hooks\.slack(?:-gov)?\.com/(?:services|workflows|triggers)/)"
    r"|(discord(?:app)?\.com/api/webhooks/)"
    r"|(api\.telegram\.org/(?:file/)?bot))[\w/:%-]{4,}",
    re.ASCII | re.IGNORECASE,
)
_KEY_SHAPES: Final = re.compile(
    r"\b(?:"
    r"sk-[\w*-]{6,}"  # OpenAI, Anthropic
    r"|[spr]k_(?:live|test)_\w{4,}|whsec_\w{8,}"  # Stripe
    r"|(?:AKIA|ASIA)[0-9A-Z]{12,}"  # AWS
    r"|AIza[\w-]{20,}|ya29\.[\w-]{20,}|GOCSPX-[\w-]{20,}"  # Google
    r"|xox[a-z]-[\w-]{6,}|xoxe\.xox[a-z]-[\w-]{6,}|xapp-[\w-]{6,}"  # Slack
    r"|gh[oprsu]_\w{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"  # GitHub, GitLab
    r"|eyJ[\w-]{8,}(?:\.[\w-]*){0,2}"  # a JSON Web Token
    r")",
    re.ASCII,
)
_SCHEME: Final = re.compile(r"\b(bearer|basic)(\s{1,5})([a-z0-9._~+/=-]{8,})", re.IGNORECASE)
# An Authorization header has a scheme and parameters of any form; cookies may be written as lists.
_HEADER: Final = re.compile(
    r"\b((?:proxy-)?authorization\s{0,3}[:=]\s{0,3})(?!bearer\b|basic\b|token\b|[bru]?[\"'\s\\[{(])[^\n\r]{1,2000}"
    r"|((?:set-)?cookie2?[\"']?\s{0,3}:\s{0,3}\[)(?!\[?redacted\])[^\]\n]{1,2000}"
    r"|\b((?:set-)?cookie2?\s{0,3}:\s{0,3})(?=[\w!#$%&*+.^`|~-]{1,200}=)[^\n\r\"']{1,4000}"
    r"|(<Cookie [^\s=<>]{1,200}=)[^\s<>]{1,4000}",
    re.IGNORECASE,
)
_NAMED: Final = r"(?:passw(?:or)?d|passphrase|passcode|pwd|secret|token|api[_-]?key)"
_NO_VALUE: Final = (
    "(?:and|argument|flag|for|from|has|in|instead|is|must|not|on|option|or|parameter|to|was|with)"
)
_ELEMENT: Final = re.compile(
    rf"(<(?:[\w.-]{{1,40}}:)?[\w-]{{0,40}}{_NAMED}(?:\s[^<>]{{0,200}})?>)[^<>]{{1,1000}}(?=<)",
    re.IGNORECASE,
)
_FLAG: Final = re.compile(
    rf"(--(?:[a-z0-9]{{1,20}}-){{0,3}}(?:{_NAMED}|pass)\s{{1,3}})(?![-\"'\[\s]|{_NO_VALUE}\b)[^\s\"']+",
    re.IGNORECASE,
)
_QUOTED_PASSWORD: Final = re.compile(
    r"(\b(?:password|passwd|passphrase|identified\s{1,3}by)\s{1,3}[bruen]?)([\"'])(?:[^\"'\\\n]|\\.)*[\"']?",
    re.IGNORECASE,
)
_IN_CONNECTION_STRING: Final = re.compile(
    r"(;\s{0,3}(?:pwd|password)\s{0,3}=\s{0,3})(?!\[redacted\])[^;\"'{\n\r]{1,200}(?=[;\"']|\Z)",
    re.IGNORECASE,
)
_IN_QUERY: Final = re.compile(
    rf"([?&][\w.%-]{{0,40}}(?:{_NAMED}|pass|credential|signature|(?<![a-z])sig)=)(?!\[redacted\])[^\s&\"'<>#]+",
    re.IGNORECASE,
)
_NAME: Final = re.compile(
    r"(?=[acefmpst])"  # the first letters: three times as fast
    r"(?:(?:api|access|auth|account|encryption|function|master|private|secret|service|shared|signing|subscription)"
    r"[_-]?key|token|secret|passw(?:or)?d|passphrase|passcode|pwd|authorization|credentials?|signature|cookies?)"
    r"(?![a-z])"
    # Words with another meaning too: only before "=", after an underscore, or in quotes.
    r"|(?<![a-z])(?:key|sig)(?=\s{0,3}=)"
    r"|(?<![a-z])pass(?=\s{0,3}=)|(?<=_)pass(?=[\\\"']{0,3}\s{0,3}[=:])",
    re.IGNORECASE,
)
_SEPARATOR: Final = re.compile(
    r"[\\\"'\])]{0,4}\s{0,3}(=>|->|:=|==?|:)\s{0,3}(?:[\[(]\s{0,3}(?=[bru]{0,2}\\?[\"']))?"
)
_COMMA: Final = re.compile(r"\\?[\"']\s{0,3},\s{0,3}(?=[bru]{0,2}\\?[\"'])")
_BEFORE_MEMBER: Final = re.compile(r"([(\[])\s{0,3}[bru]{0,2}\\?[\"'][\w-]{0,40}\Z")
_VALUE: Final = re.compile(
    r"(?P<quoted>[bru]{0,2}\\\"[^\"\\\n]*"
    r"|[bru]{0,2}\"(?:[^\"\\\n]|\\.)*\"?"
    r"|[bru]{0,2}'(?:[^'\\\n]|\\.)*'?)"
    r"|(?P<plain>(?:(?:bearer|basic|token|digest|apikey)\s{1,5})?"
    r"[^\s\"'&,;<>(){}\[\]\\](?:[^\s\"'&,;<>(){}\[\]\\]|[\"'(){}\[\]](?=\w)|,(?!\s|[\w.-]{1,40}\s?[=:]|\Z))*)",
    re.IGNORECASE,
)
_BRACED: Final = re.compile(r"\{(?:[^}\n]|\}\})*\}?")
_NO_SECRET: Final = frozenset({"none", "null", "nil", "true", "false", "undefined", ""})


def redact(text: str) -> str:
    """*text* with each secret replaced by ``[redacted]``. The time is linear in its length."""
    if "-----BEGIN " in text:
        text = _without_private_keys(text)
    if "://" in text:
        text = _without_userinfo(text)
    if "/" in text:
        text = _WEBHOOK.sub(_after_prefix, text)
    text = _HEADER.sub(_after_prefix, text)
    text = _SCHEME.sub(_after_scheme, text)
    text = _KEY_SHAPES.sub(REDACTED, text)
    if "<" in text:
        text = _ELEMENT.sub(_after_prefix, text)
    if "--" in text:
        text = _FLAG.sub(_after_prefix, text)
    if "'" in text or '"' in text:
        text = _QUOTED_PASSWORD.sub(_in_quotes, text)
    if "=" in text:
        text = _IN_CONNECTION_STRING.sub(_after_prefix, text)
        text = _IN_QUERY.sub(_after_prefix, text)
    return _without_named_values(text)


def shortened(text: str, limit: int) -> str:
    """*text* without secrets, cut to *limit* characters; a longer text takes no more time.

    The text is cut first, and redacted with and without :data:`MARGIN` more characters. The result
    is the beginning that both have in common, so the cut shows no part of a secret.
    """
    if len(text) <= limit:
        redacted = redact(text)
        return redacted if len(redacted) <= limit else f"{redacted[: limit - 1]}…"
    cut, longer = redact(text[:limit]), redact(text[: limit + MARGIN])
    if not longer.startswith(cut):
        cut = cut[
            : next(
                place
                for place, (one, other) in enumerate(zip(cut, longer, strict=False))
                if one != other
            )
        ]
    return f"{cut[: limit - 1]}…"


def message_of(error: BaseException, limit: int) -> str:
    """The text of *error* without secrets, cut to *limit* characters."""
    return shortened(text_of(error), limit)


def _without_private_keys(text: str) -> str:
    parts, at = [], 0
    while (found := _PRIVATE_KEY.search(text, at)) is not None:
        parts.append(text[at : found.start()])
        end = f"-----END {found[1]}-----"
        closing = text.find(end, found.end())
        parts.append(f"-----BEGIN {found[1]}-----{REDACTED}")
        if closing < 0:
            return "".join(parts)
        parts.append(end)
        at = closing + len(end)
    return "".join([*parts, text[at:]])


def _without_userinfo(text: str) -> str:
    parts, at = [], 0
    while (found := text.find("://", at)) >= 0:
        start = found + 3
        scheme = _SCHEME_OF_URL.search(text[max(at, found - 30) : found])
        next_one = text.find("://", start, start + _URL_MAX)
        address = _URL_ENDS.split(
            text[start : next_one if next_one >= 0 else start + _URL_MAX], maxsplit=1
        )[0]
        length = _userinfo(address, paths=scheme is not None and scheme[0].lower() in _WITH_PATHS)
        parts.append(text[at:start])
        if length:
            parts.append(REDACTED)
        at = start + length
    return "".join([*parts, text[at:]])


def _userinfo(address: str, *, paths: bool) -> int:
    """How many characters after ``://`` are user and password, which may contain ``/``, ``?`` and
    ``#``.
    """
    authority = re.split(r"[/?#]", address, maxsplit=1)[0]
    if "@" in authority:
        return (authority if paths else address.partition("?")[0]).rindex("@")
    host, colon, port = authority.partition(":")
    if not colon or host.startswith("["):
        return 0
    if paths:
        return 0 if not port or (port.isdigit() and len(port) <= 5) else max(address.find("@"), 0)
    before = address if host == "" or not port.isdigit() else address.partition("?")[0]
    return max(before.rfind("@"), 0)


def _without_named_values(text: str) -> str:
    parts: list[str] = []
    at = look = 0
    while (name := _NAME.search(text, look)) is not None:
        look = name.end()
        joint = _SEPARATOR.match(text, look)
        if joint is None:
            joint = _member(text, name)
        if joint is None:
            continue
        start = joint.end()
        braced = text.startswith("{", start) and (
            "=" in joint[0] or name[0][0] in "cC"
        )  # cookies, credentials
        value = (_BRACED if braced else _VALUE).match(text, start)
        if value is None:
            continue
        shown = f"{{{REDACTED}}}" if braced else _shown(text, value)
        parts += (text[at:start], shown)
        at = look = value.end()
    return "".join([*parts, text[at:]]) if parts else text


def _member(text: str, name: re.Match[str]) -> re.Match[str] | None:
    """The separator between name and value in a pair such as ``("Authorization", "…")``; ``None``
    in a list of names.
    """
    joint = _COMMA.match(text, name.end())
    before = (
        _BEFORE_MEMBER.search(text[max(0, name.start() - 50) : name.start()]) if joint else None
    )
    is_header = name[0].lower().startswith(("auth", "cookie")) or "-" in name[0]
    return joint if before is not None and (is_header or before[1] == "(") else None


def _shown(text: str, value: re.Match[str]) -> str:
    """The replacement for the value of a secret name. Quotes stay, and so do values that are no
    secret, such as ``None``.
    """
    found = value[0]
    if value["plain"] is not None:
        no_secret = found.lower() in _NO_SECRET or not found.strip("*.…-")
        scheme = found.lower() in ("bearer", "basic") and text.startswith(REDACTED, value.end() + 1)
        return found if no_secret or scheme else REDACTED
    opening = found[: found.index('"') + 1] if '"' in found[:4] and "'" not in found[:3] else ""
    opening = opening or found[: found.index("'") + 1]
    content = found[len(opening) :]
    quote = opening[-1]
    closing = quote if content.endswith(quote) and not opening.endswith('\\"') else ""
    inner = content[: len(content) - len(closing)]
    if inner.lower() in _NO_SECRET or inner == REDACTED:
        return found
    return f"{opening}{REDACTED}{closing}"


def _after_prefix(found: re.Match[str]) -> str:
    return f"{next(group for group in found.groups() if group is not None)}{REDACTED}"


def _after_scheme(found: re.Match[str]) -> str:
    # In "Basic authentication" no credential follows the scheme.
    if found[3].isalpha() and len(found[3]) < 20:
        return found[0]
    return f"{found[1]}{found[2]}{REDACTED}"


def _in_quotes(found: re.Match[str]) -> str:
    return f"{found[1]}{found[2]}{REDACTED}{found[2]}"
