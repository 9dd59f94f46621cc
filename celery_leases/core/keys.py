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
from collections.abc import Callable, Mapping, Sequence
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
        plain = json.loads(wire.dumps(value))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
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
    bound = _bound(task, signature, args, kwargs)
    arguments = _by_name(signature, bound)
    key = _filled(task, "key", options.key, arguments, bound)
    fingerprint, digests = (None, None) if options.rerun else _fingerprint(options, signature, arguments, bound)
    return CallKey(key, stored_key(task, key, options.scope), fingerprint, digests)


def call_group(
    task: str, options: LeaseOptions, signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> str | None:
    """The cooldown group of one call of *task*; ``None`` without ``lease_cooldown_group``.

    Raises :class:`KeyUnusable` as :func:`call_key` does.
    """
    if options.cooldown_group is None:
        return None
    bound = _bound(task, signature, args, kwargs)
    return _filled(task, "cooldown_group", options.cooldown_group, _by_name(signature, bound), bound)


def bind(task: str, signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by parameter name, defaults applied, as the wire would deliver them: tuples come as lists."""
    return _by_name(signature, _bound(task, signature, args, kwargs))


def differing(ours: Mapping[str, str] | None, theirs: Mapping[str, str] | None) -> list[str]:
    """The names of the arguments whose digests do not agree."""
    ours, theirs = ours or {}, theirs or {}
    return sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))


def _bound(
    task: str, signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> inspect.BoundArguments:
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise KeyUnusable(f"task {task}: the arguments do not fit its signature, so it has no key: {error}") from None
    bound.apply_defaults()
    for name, value in bound.arguments.items():
        match signature.parameters[name].kind:
            case inspect.Parameter.VAR_POSITIONAL:
                bound.arguments[name] = tuple(_delivered(item) for item in value)
            case inspect.Parameter.VAR_KEYWORD:
                bound.arguments[name] = {keyword: _delivered(item) for keyword, item in value.items()}
            case _:
                bound.arguments[name] = _delivered(value)
    return bound


def _by_name(signature: inspect.Signature, bound: inspect.BoundArguments) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        match signature.parameters[name].kind:
            case inspect.Parameter.VAR_POSITIONAL:
                arguments[name] = list(value)
            case inspect.Parameter.VAR_KEYWORD:
                # A keyword may bear the name of a positional-only parameter; neither may hide the other.
                arguments |= {f"**{keyword}" if keyword in arguments else keyword: value[keyword] for keyword in value}
            case _:
                arguments[name] = value
    return arguments


def _filled(
    task: str,
    option: str,
    maker: str | Callable[..., str],
    arguments: Mapping[str, Any],
    bound: inspect.BoundArguments,
) -> str:
    """The text that a template or a callable makes of the arguments; refused where no store could hold it."""
    name = f"task {task}: lease_{option}"
    if isinstance(maker, str):
        try:
            text = _CanonicalFormatter().vformat(maker, (), arguments)
        except (LookupError, AttributeError, ValueError, TypeError) as error:
            raise KeyUnusable(f"{name}={maker!r} cannot be filled: {error!r}") from None
    else:
        try:
            text = maker(*bound.args, **bound.kwargs)
        except Exception as error:
            raise KeyUnusable(f"{name} raised {type(error).__name__}: {error}") from error
        if not isinstance(text, str):
            raise KeyUnusable(f"{name} returned {type(text).__name__}; return a str")
    if not text.strip():
        raise KeyUnusable(f"{name} came out empty; every call would share it")
    if "\x00" in text:
        raise KeyUnusable(f"{name} came out with a NUL character, which SQL text cannot hold")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise KeyUnusable(f"{name} came out as {text!r}, with half a surrogate pair, which no store can hold")
    return text


def _fingerprint(
    options: LeaseOptions,
    signature: inspect.Signature,
    arguments: Mapping[str, Any],
    bound: inspect.BoundArguments,
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
        made = chosen(*bound.args, **bound.kwargs)
        compared = dict(made) if isinstance(made, Mapping) else {"fingerprint": made}
    digests = {str(name): _digest(canonical(value))[:12] for name, value in compared.items()}
    return f"{VERSION}:{_digest(canonical(compared))}", digests


def _is_default(signature: inspect.Signature, name: str, value: Any) -> bool:
    parameter = signature.parameters.get(name)
    if parameter is None:
        return False
    if parameter.kind is parameter.VAR_POSITIONAL:
        return not value
    if parameter.default is parameter.empty:
        return False
    if value is parameter.default:
        return True
    try:
        return canonical(parameter.default) == canonical(value)
    except KeyUnusable:
        return False


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _delivered(value: Any) -> Any:
    """The value as a worker gets it from kombu's JSON serializer, so that client and worker agree on keys."""
    try:
        return wire.loads(wire.dumps(value))
    except (TypeError, ValueError, OverflowError, RecursionError):
        return _listed(value)


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
