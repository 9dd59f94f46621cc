"""Taking secrets out of texts that are stored and shown: keys, tokens, passwords, signatures."""

from __future__ import annotations

import re
from typing import Final

REDACTED: Final = "[redacted]"

# Every pattern starts at something fixed and repeats only what cannot be read in two ways: linear in any text.
_USER_OF_URL: Final = re.compile(r"(?<=://)[^/\s?#\"'<>]{1,500}@")
_SCHEME: Final = re.compile(r"\b(bearer|basic)(\s{1,5})([a-z0-9._~+/=-]{8,})", re.IGNORECASE)
_KEY_SHAPES: Final = re.compile(
    r"\b(?:"
    r"sk-[\w*-]{6,}"  # OpenAI, Anthropic
    r"|[spr]k_(?:live|test)_\w{4,}|whsec_\w{8,}"  # Stripe
    r"|(?:AKIA|ASIA)[0-9A-Z]{12,}"  # AWS
    r"|AIza[\w-]{20,}"  # Google
    r"|xox[abeoprs]-[\w-]{6,}"  # Slack
    r"|gh[oprsu]_\w{16,}|github_pat_\w{16,}"  # GitHub
    r"|eyJ[\w-]{8,}(?:\.[\w-]*){0,2}"  # a JSON Web Token
    r")",
    re.ASCII,
)
_VALUE: Final = (
    r"(?:"
    r"\\\"[^\"\\\n]*"
    r"|\"(?:[^\"\\\n]|\\.)*\"?"
    r"|'(?:[^'\\\n]|\\.)*'?"
    r"|(?:(?:bearer|basic|token)\s{1,5})?[^\s\"'&,;<>(){}\[\]\\]+"
    r")"
)
_PAIR: Final = re.compile(
    r"(?=[ackpst])"  # the first letters: three times as fast
    r"((?:(?:api|access|secret|private|account|shared|auth)[_-]?key|token|secret|passw(?:or)?d|passphrase|pwd"
    r"|authorization|credentials?|signature|cookie)(?![a-z])"
    r"[\\\"']{0,3}\s{0,3}[=:]\s{0,3}"
    # A key that is called just that is one in a query or a call; "key: x" and "key": "x" name anything.
    rf"|(?<![a-z])(?:key|sig)\s{{0,3}}=\s{{0,3}})({_VALUE})",
    re.IGNORECASE,
)


# What follows the name of this header is a scheme and parameters of any form; cookies come as lists.
_HEADER: Final = re.compile(
    r"\b((?:proxy-)?authorization\s{0,3}[:=]\s{0,3})(?!bearer\b|basic\b|token\b|[\"'\s\\[{])[^\n\r]{1,2000}|"
    r"((?:set-)?cookie[\"']?\s{0,3}:\s{0,3}\[)[^\]\n]{1,2000}",
    re.IGNORECASE,
)


def redact(text: str) -> str:
    """*text* with ``[redacted]`` where a secret stood; the rest stays readable. Linear in the length of *text*."""
    if "://" in text:
        text = _USER_OF_URL.sub(f"{REDACTED}@", text)
    text = _HEADER.sub(_after_header, text)
    text = _SCHEME.sub(_after_scheme, text)
    text = _KEY_SHAPES.sub(REDACTED, text)
    if "=" in text or ":" in text:
        text = _PAIR.sub(_after_name, text)
    return text


def _after_header(found: re.Match[str]) -> str:
    return f"{found[1] or found[2]}{REDACTED}"


def _after_scheme(found: re.Match[str]) -> str:
    # "Basic authentication" is a word, no credential.
    if found[3].isalpha() and len(found[3]) < 20:
        return found[0]
    return f"{found[1]}{found[2]}{REDACTED}"


def _after_name(found: re.Match[str]) -> str:
    value = found[2]
    if found.string.startswith(REDACTED, found.end() + 1) and value.lower() in ("bearer", "basic"):
        return found[0]
    opening = '\\"' if value.startswith('\\"') else value[0] if value[0] in "\"'" else ""
    closing = opening if len(opening) == 1 and len(value) > 1 and value.endswith(opening) else ""
    return f"{found[1]}{opening}{REDACTED}{closing}"
