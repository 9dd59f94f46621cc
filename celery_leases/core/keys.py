"""From the arguments of a call to its stable key and its fingerprint.

The canonical form is published with test vectors (``docs/keys.md``) and named ``v1``, because a change would give
running systems new keys: arguments are bound to the body's signature, defaults applied, and written as compact JSON
with sorted keys the way kombu's JSON serializer would put them on the wire, so that ``(1, 2)`` and ``[1, 2]`` agree.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kombu.utils import json as wire

from celery_leases.core.errors import KeyUnusable
from celery_leases.core.options import LeaseOptions

VERSION = "v1"
STORED_KEY_MAX = 255


@dataclass(frozen=True, slots=True)
class CallKey:
    """The key of one call. ``fingerprint`` and ``digests`` are ``None`` and empty where nothing is compared."""

    key: str
    stored: str
    fingerprint: str | None = None
    digests: Mapping[str, str] | None = None


def canonical(value: Any) -> str:
    """Write *value* in the canonical form ``v1``; raises :class:`KeyUnusable` when it has no JSON form."""
    try:
        plain = json.loads(wire.dumps(value))  # type: ignore[no-untyped-call]
    except (TypeError, ValueError, OverflowError) as error:
        raise KeyUnusable(
            f"{type(value).__name__} has no JSON form, so no key or fingerprint can be made of it ({error}); "
            "give lease_key and lease_fingerprint as callables that return plain values"
        ) from None
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def stored_key(task: str, key: str, scope: str) -> str:
    """The key as stores know it: ``t:<task>|<key>`` or ``g:<key>``, its tail hashed above 255 characters."""
    full = f"g:{key}" if scope == "global" else f"t:{task}|{key}"
    if len(full) <= STORED_KEY_MAX:
        return full
    digest = hashlib.sha256(full.encode()).hexdigest()
    return f"{full[: STORED_KEY_MAX - 1 - len(digest)]}#{digest}"


def call_key(
    task: str,
    options: LeaseOptions,
    signature: inspect.Signature,
    call_id: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> CallKey:
    """Make the key of one call of *task*; without ``lease_key`` it is the call's own id.

    Raises :class:`KeyUnusable` when the arguments do not fit the signature, or the key comes out empty.
    """
    if options.key is None:
        return CallKey(call_id, stored_key(task, call_id, "task"))
    arguments = bind(task, signature, args, kwargs)
    key = _make_key(task, options, arguments, args, kwargs)
    fingerprint, digests = (None, None) if options.rerun else _fingerprint(options, signature, arguments, args, kwargs)
    return CallKey(key, stored_key(task, key, options.scope), fingerprint, digests)


def bind(task: str, signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by parameter name, defaults applied, tuples made lists."""
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise KeyUnusable(f"task {task}: the arguments do not fit its signature, so it has no key: {error}") from None
    bound.apply_defaults()
    arguments = dict(bound.arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments |= arguments.pop(name, {})
    return {name: _listed(value) for name, value in arguments.items()}


def differing(ours: Mapping[str, str] | None, theirs: Mapping[str, str] | None) -> list[str]:
    """The names of the arguments whose digests do not agree."""
    ours, theirs = ours or {}, theirs or {}
    return sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))


def _make_key(
    task: str, options: LeaseOptions, arguments: Mapping[str, Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> str:
    if isinstance(options.key, str):
        try:
            key = _CanonicalFormatter().vformat(options.key, (), arguments)
        except (LookupError, AttributeError, ValueError, TypeError) as error:
            raise KeyUnusable(f"task {task}: lease_key={options.key!r} cannot be filled: {error!r}") from None
    else:
        assert options.key is not None
        key = options.key(*args, **kwargs)
        if not isinstance(key, str):
            raise KeyUnusable(f"task {task}: lease_key returned {type(key).__name__}; return a str")
    if not key.strip():
        raise KeyUnusable(f"task {task}: lease_key came out empty; every call would share it")
    if "\x00" in key:
        raise KeyUnusable(f"task {task}: the key has a NUL character, which SQL text cannot hold")
    return key


def _fingerprint(
    options: LeaseOptions,
    signature: inspect.Signature,
    arguments: Mapping[str, Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> tuple[str | None, dict[str, str] | None]:
    chosen = options.fingerprint
    if chosen is False:
        return None, None
    if chosen is None:
        compared: Mapping[str, Any] = {
            name: value for name, value in arguments.items() if not _is_default(signature, name, value)
        }
    elif isinstance(chosen, tuple):
        compared = {name: arguments.get(name) for name in chosen}
    else:
        made = chosen(*args, **kwargs)
        compared = made if isinstance(made, Mapping) else {"fingerprint": made}
    digests = {str(name): _digest(canonical(value))[:12] for name, value in compared.items()}
    whole = "\n".join(f"{name}={canonical(compared[name])}" for name in sorted(compared))
    return f"{VERSION}:{_digest(whole)}", digests


def _is_default(signature: inspect.Signature, name: str, value: Any) -> bool:
    parameter = signature.parameters.get(name)
    if parameter is None or parameter.default is parameter.empty:
        return False
    return canonical(parameter.default) == canonical(value)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _listed(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_listed(item) for item in value]
    if isinstance(value, dict):
        return {name: _listed(item) for name, item in value.items()}
    return value


class _CanonicalFormatter(string.Formatter):
    """Fills a key template: text and numbers as they are, everything else in canonical form."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec or isinstance(value, str):
            return str(super().format_field(value, format_spec))
        if isinstance(value, bool | list | dict) or value is None:
            return canonical(value)
        return str(value)
