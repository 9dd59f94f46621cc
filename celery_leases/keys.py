"""Computes the stable key and the fingerprint of a call from its arguments.

Arguments are bound to the signature of the body, and defaults are applied. They are written as
compact JSON with sorted keys, in the form that kombu's JSON serializer gives them, so that ``(1,
2)`` and ``[1, 2]`` are equal. This canonical form is named ``v1`` and published with test vectors
(``docs/reference/keys.md``), because a change of it would give running systems new keys.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import re
import string
from _string import formatter_field_name_split  # type: ignore[import-not-found]
from binascii import b2a_base64
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime, time
from decimal import Decimal
from functools import cached_property, lru_cache
from types import NoneType
from typing import Any, Final
from uuid import UUID

from kombu.utils import json as wire

from celery_leases.errors import KeyReused, KeyUnusable
from celery_leases.options import LeaseOptions
from celery_leases.text.cleaning import printable
from celery_leases.value_class import value_class

VERSION = "v1"
STORED_KEY_MAX = 255
_UNCHANGED: Final = frozenset((str, int, bool, NoneType))
"""The types whose values do not change in a round trip through JSON."""
_PLAIN: Final = frozenset((str, int, bool, float))
"""The types whose values have the same canonical form only if they have the same ``repr``."""
_WRITTEN_BY_STR: Final = (int, float, Decimal, UUID, date, time)
_CONSTANTS: Final = {None: "null", True: "true", False: "false"}
_quoted: Final = json.encoder.encode_basestring
_surrogate: Final = re.compile("[\ud800-\udfff]").search
_unfit: Final = re.compile("[\x00\ud800-\udfff]").search
_HASHED: Final = re.compile(r".*#[0-9a-f]{64}", re.DOTALL)
_SHARED: Final = re.compile(r"/([^/]+)/(.+)", re.DOTALL)
KEY_MAX = 1_000_000
OF_ERRBACK: Final = "celery_leases_errback"
"""The name in the mappings that an errback gets for ``request``, ``exc`` and ``traceback``. By
default these are not compared, because two failures of the same work never have the same.
"""
DIGEST_LENGTH: Final = 16
"""Characters of a digest behind the letter of its kind: 12 bytes in Base64."""
_KINDS: Final = {
    "": "a text in the key", "t": "a text", "i": "an integer", "f": "a float", "b": "a boolean",
    "n": "a null", "l": "a list", "m": "a mapping", "c": "a decimal", "d": "a date", "h": "a time",
    "s": "a datetime", "u": "a UUID", "y": "a bytes value",
}  # fmt: skip
"""What the letter before a digest means. Without one, it is of a text that the key contains."""
_FIRST: Final = {'"': "t", "t": "b", "f": "b", "n": "n", "[": "l", "{": "m"}
_ENVELOPES: Final = {
    "decimal": "c", "date": "d", "time": "h", "datetime": "s", "uuid": "u", "bytes": "y",
}  # fmt: skip
FINGERPRINT_LENGTH: Final = 25
"""Characters of a fingerprint: its version, a colon, and 16 bytes in Base64 without padding."""


@value_class(frozen=True, slots=True)
class CallKey:
    """The key of one call. ``fingerprint`` and ``digests`` (of each argument) are ``None`` if the
    arguments are not compared.
    """

    key: str
    stored: str
    fingerprint: str | None = None
    digests: Mapping[str, str] | None = None

    @property
    def shown(self) -> str:
        """The key for logs, events and messages, in at most 255 characters."""
        return bounded(self.key)


class Parameters(inspect.Signature):
    """The signature of a task's body, which computes once what binding a plain call needs."""

    #: The signature of the body's decorator, if the decorated function has another one.
    called: inspect.Signature | None = None

    @cached_property
    def plain(self) -> tuple[tuple[str, ...], Mapping[str, Any]] | None:
        """Names and defaults of the parameters if each of them can be given by position and by
        name; otherwise ``None``.
        """
        parameters = self.parameters.values()
        if any(parameter.kind is not parameter.POSITIONAL_OR_KEYWORD for parameter in parameters):
            return None
        defaults = {
            each.name: each.default for each in parameters if each.default is not each.empty
        }
        return tuple(self.parameters), defaults


def canonical(value: Any) -> str:
    """*value* in the canonical form ``v1``; raises :class:`KeyUnusable` if it has no JSON form."""
    kind = type(value)
    if kind is str:
        return _quoted(value)
    if kind is bool or value is None:
        return _CONSTANTS[value]
    try:
        if kind is int or (kind is float and math.isfinite(value)):
            return repr(value)
        plain = json.loads(wire.dumps(value))
    except Exception as error:  # noqa: BLE001 - whatever a type of the user or an envelope of kombu raises
        raise KeyUnusable(
            f"{type(value).__name__} has no JSON form, so a key or fingerprint cannot be made of it ({error}); "
            "give lease_key and lease_fingerprint as callables that return plain values"
        ) from None
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def stored_key(task: str, key: str) -> str:
    """The stored key: ``t:<task>|<key>``, or ``t:<name>|<key>`` for the shared key
    ``/<name>/<key>``, in at most 255 characters (see :func:`bounded`).

    Two keys of a task, or two shared keys, never have one stored key: ``%`` and ``|`` in the name
    are escaped.
    """
    if key.startswith("/") and (shared := _SHARED.fullmatch(key)) is not None:
        return bounded(_prefix(shared[1]) + shared[2])
    return bounded(_prefix(task) + key)


def is_shared(key: str) -> bool:
    """Whether *key* belongs to all tasks that make it: it has the form ``/<name>/<key>``."""
    return key.startswith("/") and _SHARED.fullmatch(key) is not None


def may_be_stored(stored: str, task: str, options: LeaseOptions) -> bool:
    """Whether *stored* has the form of the stored key of a call of *task*."""
    if callable(options.key):
        return stored.startswith("t:")
    shared = _SHARED.match(options.key or "")
    return stored.startswith(_prefix(task if shared is None else shared[1]))


def is_short_form(text: str) -> bool:
    """Whether *text* has the form of a text with a hashed tail."""
    return len(text) == STORED_KEY_MAX and bool(_HASHED.fullmatch(text))


def bounded(text: str) -> str:
    """*text* in at most 255 characters; the tail of a longer text is replaced by its hash.

    A text of 255 characters that already has the hashed form is hashed too, so no text is the short
    form of another.
    """
    if len(text) < STORED_KEY_MAX or (len(text) == STORED_KEY_MAX and not is_short_form(text)):
        return text
    digest = _sha256(text).hexdigest()
    return f"{text[: STORED_KEY_MAX - 1 - len(digest)]}#{digest}"


def unfit(text: str) -> str | None:
    """Why stores cannot save *text*; ``None`` if they can."""
    found = _unfit(text)
    if found is None:
        return None
    if "\x00" in text:
        return "it has a NUL character, which SQL text cannot store"
    return "it has half a surrogate pair, which no store can save"


@lru_cache
def _prefix(name: str) -> str:
    return f"t:{name.replace('%', '%25').replace('|', '%7C')}|"


def call_key(
    task: str,
    options: LeaseOptions,
    signature: inspect.Signature,
    call_id: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    headers: Mapping[str, Any] | None = None,
) -> CallKey:
    """The key of one call of *task*; without ``lease_key`` it is the id of the call. *headers* are
    those of its message, for ``leases_tenant``.

    Raises :class:`KeyUnusable` if the arguments do not fit the signature, or make no usable key.
    """
    if options.key is None:
        return CallKey(call_id, bounded(_prefix(task) + call_id))
    try:
        given = _given(task, signature, args, kwargs)
        key, written = _filled(task, "key", options.key, given)
        if isinstance(options.key, str) and (_SHARED.fullmatch(key) is not None) != (
            options.key.startswith("/")
        ):
            raise KeyUnusable(
                f"task {task}: lease_key={options.key!r} gave {bounded(key)!r}; only a template that begins with "
                '"/name/" makes a key like that, which other tasks may share; write "file:{path}" instead of "{path}"'
            )
        if options.tenant is not None:
            key = _of_tenant(task, options.tenant, headers or {}, key)
        digests = None if options.reruns else _digests(task, options, given, written)
    except RecursionError:
        raise _too_deep(task) from None
    fingerprint = fingerprint_of(digests) if digests is not None else None
    return CallKey(key, stored_key(task, key), fingerprint, digests)


def call_group(
    task: str,
    options: LeaseOptions,
    signature: inspect.Signature,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> str | None:
    """The cooldown group of one call of *task*; ``None`` without ``lease_group``.

    Raises :class:`KeyUnusable` as :func:`call_key` does.
    """
    if options.group is None:
        return None
    try:
        given = _given(task, signature, args, kwargs)
        group, _ = _filled(task, "group", options.group.name, given)
    except RecursionError:
        raise _too_deep(task) from None
    if is_short_form(group):
        raise KeyUnusable(
            f"task {task}: lease_group gave {group!r}, which is the short form of another group"
        )
    return group


def fingerprint_of(digests: Mapping[str, str]) -> str:
    """The fingerprint of arguments with these digests. A record stores only the digests."""
    text = ",".join([f'{_quoted(name)}:"{digests[name]}"' for name in sorted(digests)])
    # This equals canonical(digests), except that canonical() joins two adjacent surrogates.
    text = canonical(digests) if _surrogate(text) else f"{{{text}}}"
    return f"{VERSION}:{_hashed(text, 16)}"[:FINGERPRINT_LENGTH]


def same_arguments(one: str | None, other: str | None) -> bool:
    """Whether two fingerprints are of the same arguments, or one of them compares none."""
    return one is None or other is None or one == other


def key_reused(
    key: str, ours: Mapping[str, str] | None, theirs: Mapping[str, str] | None
) -> KeyReused:
    """The error of a call with the digests *ours*, whose *key* belongs to a call with *theirs*.

    The message names the kinds of the values that differ, and no value.
    """
    ours, theirs = ours or {}, theirs or {}
    names = sorted(
        name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)
    )
    listed = ", ".join(
        f"{printable(name)} ({_contrast(ours.get(name), theirs.get(name))})" for name in names
    )
    text = f"{printable(key)} stands for an earlier call with other arguments; they differ in "
    return KeyReused(f"{text}{listed or 'their fingerprint'}", key, names)


def _contrast(ours: str | None, theirs: str | None) -> str:
    """What kinds of values the digests of one argument in two calls are of."""
    here, there = (
        "not given, or its default"
        if digest is None
        else _KINDS.get(digest[:-DIGEST_LENGTH], "a value")
        for digest in (ours, theirs)
    )
    if here == there:
        return f"another {here.partition(' ')[2]}"
    return f"{here}; in the earlier call {there}"


def _too_deep(task: str) -> KeyUnusable:
    return KeyUnusable(
        f"task {task}: its arguments are nested too deeply for a key or a fingerprint; "
        "pass the nested value as JSON text"
    )


_DECORATED: Final = (
    "; a decorator of the body adds or removes arguments: name its own parameters, as in "
    "def wrapper(customer_id), give the arguments by keyword, or write a callable"
)


@value_class(frozen=True, slots=True)
class _Given:
    """The arguments of one call with defaults applied, as a worker receives them."""

    signature: inspect.Signature
    #: The arguments by the names of the parameters.
    by_name: dict[str, Any]
    bound: inspect.BoundArguments | None = None
    #: What to write if a template cannot be filled.
    advice: str = ""

    def differing_from_defaults(self) -> dict[str, Any]:
        """The arguments that are not equal to the defaults of their parameters."""
        signature, by_name = self.signature, self.by_name
        if type(signature) is not Parameters or signature.plain is None:
            parameters = signature.parameters
            return {
                name: value
                for name, value in by_name.items()
                if name not in parameters or not _is_default(parameters[name], value)
            }
        differing, defaults = by_name, signature.plain[1]
        for name, default in defaults.items():
            if _equals(by_name[name], default):
                differing = by_name.copy() if differing is by_name else differing
                del differing[name]
        return differing

    def to(self, maker: Callable[..., Any], name: str) -> Any:
        """The value that *maker*, the option *name*, returns for the arguments; raises
        :class:`KeyUnusable` if it raises.
        """
        bound = self.bound or self.signature.bind(**self.by_name)
        try:
            return maker(*bound.args, **bound.kwargs)
        except Exception as error:
            raise KeyUnusable(f"{name} raised {type(error).__name__}: {error}") from error


def _given(
    task: str, signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> _Given:
    """Bind the arguments of one call; raises :class:`KeyUnusable` if they do not fit."""
    if (
        type(signature) is Parameters
        and (plain := _plainly_bound(signature, args, kwargs)) is not None
    ):
        return _Given(signature, plain)
    called = signature.called if isinstance(signature, Parameters) else None
    try:
        bound = _bound(task, signature, args, kwargs)
    except KeyUnusable:
        if called is None:
            raise
        signature = _with_other_keywords(signature, args, kwargs) or called
        bound = _bound(task, signature, args, kwargs)
    advice = _DECORATED if called is not None else ""
    return _Given(signature, _by_name(signature, bound), bound, advice)


def _with_other_keywords(
    signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> inspect.Signature | None:
    """The signature that a decorator has, if it adds keyword-only arguments to those of the call,
    or removes some that were given by keyword; ``None`` if it does something else.

    What it adds could otherwise be given by position, so nobody knows what the positions mean.
    """
    parameters = [
        each
        for each in signature.parameters.values()
        if each.kind is not each.KEYWORD_ONLY
        or each.default is not each.empty
        or each.name in kwargs
    ]
    if not any(each.kind is each.VAR_KEYWORD for each in parameters):
        parameters.append(inspect.Parameter("more", inspect.Parameter.VAR_KEYWORD))
    found = inspect.Signature(parameters)
    try:
        found.bind(*args, **kwargs)
    except TypeError:
        return None
    return found


def _plainly_bound(
    signature: Parameters, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The arguments by the names of the parameters; ``None`` if only ``signature.bind`` can bind
    them, or can explain why they do not fit.
    """
    if signature.plain is None:
        return None
    names, defaults = signature.plain
    found = dict(zip(names, args, strict=False))
    if kwargs or len(args) != len(names):
        if len(args) > len(names) or not found.keys().isdisjoint(kwargs):
            return None
        found = {**defaults, **found, **kwargs}
        if len(found) != len(names):
            return None
        try:
            found = {name: found[name] for name in names}
        except KeyError:
            return None
    for name, value in found.items():
        if type(value) not in _UNCHANGED:
            found[name] = _delivered(value)
    return found


def _bound(
    task: str, signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> inspect.BoundArguments:
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise KeyUnusable(
            f"task {task}: the arguments do not fit its signature, so it has no key: {error}"
        ) from None
    bound.apply_defaults()
    for name, value in bound.arguments.items():
        match signature.parameters[name].kind:
            case inspect.Parameter.VAR_POSITIONAL:
                bound.arguments[name] = tuple(_delivered(item) for item in value)
            case inspect.Parameter.VAR_KEYWORD:
                bound.arguments[name] = {
                    keyword: _delivered(item) for keyword, item in value.items()
                }
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
                # A keyword may have the name of a positional-only parameter, and must not replace
                # it.
                arguments |= {
                    f"**{keyword}"
                    if keyword in arguments or keyword.startswith("**")
                    else keyword: value[keyword]
                    for keyword in value
                }
            case _:
                arguments[name] = value
    return arguments


def _filled(
    task: str, option: str, maker: str | Callable[..., str], given: _Given
) -> tuple[str, Mapping[str, str]]:
    """The text that a template or a callable makes of the arguments, and the texts in it of the
    arguments that a template writes as a whole; raises :class:`KeyUnusable` if it cannot be a key.
    """
    name = f"task {task}: lease_{option}"
    written: Mapping[str, str] = {}
    if isinstance(maker, str):
        try:
            text, written = _formatted(maker, given.by_name)
        except KeyUnusable as error:
            raise KeyUnusable(f"{name}={maker!r}: {error}") from None
        except (LookupError, AttributeError, ValueError, TypeError) as error:
            unfilled = f"{name}={maker!r} cannot be filled: {error!r}"
            raise KeyUnusable(f"{unfilled}{given.advice}") from None
    else:
        text = given.to(maker, name)
        if not isinstance(text, str):
            raise KeyUnusable(f"{name} returned {type(text).__name__}; return a str")
    if not text.strip():
        raise KeyUnusable(f"{name} gave an empty key; every call would share it")
    if len(text) > KEY_MAX:
        raise KeyUnusable(
            f"{name} gave {len(text)} characters; a key has at most {KEY_MAX}: "
            "let a callable return a hash of them"
        )
    if _unfit(text):
        raise KeyUnusable(f"{name} gave {bounded(text)!r}: {unfit(text)}")
    return text, written


def _of_tenant(
    task: str,
    maker: Callable[[Mapping[str, Any]], Any],
    headers: Mapping[str, Any],
    key: str,
) -> str:
    """*key* with its tenant before it. No two tenants have a key in common."""
    name = f"task {task}: leases_tenant"
    try:
        tenant = maker(headers)
    except Exception as error:
        raise KeyUnusable(f"{name} raised {type(error).__name__}: {error}") from error
    if not isinstance(tenant, str) or not tenant.strip():
        raise KeyUnusable(f"{name} returned {tenant!r}; return the name of a tenant")
    named = tenant.replace("%", "%25").replace(":", "%3A").replace("/", "%2F")
    shared = _SHARED.fullmatch(key)
    text = f"{named}:{key}" if shared is None else f"/{shared[1]}/{named}:{shared[2]}"
    if reason := unfit(text):
        raise KeyUnusable(f"{name} gave {bounded(text)!r}: {reason}")
    if len(text) > KEY_MAX:
        raise KeyUnusable(f"{name} and lease_key gave {len(text)} characters; {KEY_MAX} at most")
    return text


def _digests(
    task: str, options: LeaseOptions, given: _Given, written: Mapping[str, str]
) -> dict[str, str] | None:
    """The digests of the compared arguments: of its text in the key for each that is *written*
    there, of the content for each other.
    """
    chosen = options.fingerprint
    if chosen is False:
        return None
    compared: Mapping[Any, Any]
    if chosen is None:
        compared = given.differing_from_defaults()
        if not compared.keys() >= written.keys():
            compared = {**compared, **written}
    elif isinstance(chosen, tuple):
        compared = {name: given.by_name.get(name) for name in chosen}
    else:
        made = given.to(chosen, f"task {task}: lease_fingerprint")
        compared, written = made if isinstance(made, Mapping) else {"fingerprint": made}, {}
    digests = {}
    for name, value in compared.items():
        if name in written:
            digests[name] = _hashed(written[name], 12)
        elif not (chosen is None and type(value) is dict and OF_ERRBACK in value):
            text = canonical(value)
            digests[str(name)] = _kind(text) + _hashed(text, 12)
    return digests


def _kind(text: str) -> str:
    """The letter in :data:`_KINDS` for a value in canonical form; empty for a type of the user."""
    kind = _FIRST.get(text[0])
    if kind is None:
        return "i" if text.lstrip("-").isdigit() else "f"
    if kind == "m" and text.startswith('{"__type__":"'):
        return _ENVELOPES.get(text.split('"', 4)[3], "o")
    return kind


def _is_default(parameter: inspect.Parameter, value: Any) -> bool:
    if parameter.kind is parameter.VAR_POSITIONAL:
        return not value
    return parameter.default is not parameter.empty and _equals(value, parameter.default)


def _equals(value: Any, default: Any) -> bool:
    """Whether both have the same canonical form."""
    if value is default:
        return True
    try:
        if type(value) is type(default) and type(value) in _PLAIN:
            return repr(value) == repr(default)
        return canonical(default) == canonical(value)
    except (KeyUnusable, ValueError):  # a number may have too many digits
        return False


def _sha256(text: str) -> hashlib._Hash:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass"))


def _hashed(text: str, length: int) -> str:
    """The first *length* bytes of a hash of *text*, in Base64."""
    whole = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return str(b2a_base64(whole[:length], newline=False), "ascii")


def _delivered(value: Any) -> Any:
    """*value* as a worker receives it from kombu's JSON serializer, so that client and worker
    compute the same key.
    """
    if type(value) in _UNCHANGED or (type(value) is float and math.isfinite(value)):
        return value
    try:
        return wire.loads(wire.dumps(value))
    except Exception:  # noqa: BLE001 - whatever a type of the user or an envelope of kombu raises
        return _listed(value)


def _listed(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_listed(item) for item in value]
    if isinstance(value, dict):
        return {name: _listed(item) for name, item in value.items()}
    return value


def _formatted(template: str, arguments: Mapping[str, Any]) -> tuple[str, Mapping[str, str]]:
    """*template* filled with *arguments*, and the texts of those that it writes as a whole; raises
    the errors of ``str.format``.
    """
    parts, whole = _parts(template)
    key = ""
    written: dict[str, str] = {}
    for literal, name, field in parts:
        if field:
            text = _FORMATTER.vformat(field, (), arguments)
        elif name:
            value = arguments[name]
            text = value if type(value) is str else _shown(value)
        else:
            text = ""
        key = f"{key}{literal}{text}"
        if name in whole:
            written[name] = f"{written[name]}\0{text}" if name in written else text
    return key, written


@lru_cache
def _parts(template: str) -> tuple[list[tuple[str, str, str]], frozenset[str]]:
    """The texts of a template, each with the argument that follows it, and with the field if that
    is more than a name; and the arguments that no field takes a part of.
    """
    parts, partial = [], set()
    for text, path, specification, conversion in string.Formatter().parse(template):
        name = field = ""
        if path is not None:
            name = formatter_field_name_split(path)[0]
            if name != path:
                partial.add(name)
            if specification or conversion or not path.isidentifier():
                field = f"{{{path}{f'!{conversion}' if conversion else ''}:{specification}}}"
        parts.append((text, name, field))
    return parts, frozenset(name for _, name, _ in parts if name) - partial


def names_in(template: str) -> frozenset[str]:
    """The names of the arguments that *template* writes, as a whole or in part."""
    return frozenset(name for _, name, _ in _parts(template)[0] if name)


def _shown(value: Any) -> str:
    """*value* in a key: text, numbers and UUIDs as by ``str()``, dates and times as by
    ``isoformat()``, others in canonical form.

    Raises :class:`KeyUnusable` for a value without one: the text of a set, or of an object, differs
    from process to process.
    """
    if isinstance(value, str):
        return format(value)
    if isinstance(value, _WRITTEN_BY_STR) and not isinstance(value, bool):
        return value.isoformat() if isinstance(value, datetime) else str(value)
    return canonical(value)


class _CanonicalFormatter(string.Formatter):
    """Fills a key template as :func:`_shown` writes values."""

    def get_field(
        self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Any, str]:
        """As ``str.format`` does, but ``{model.field}`` also reads an item of a mapping, because a
        worker receives a pydantic model as a mapping.
        """
        first, rest = formatter_field_name_split(field_name)
        found = self.get_value(first, args, kwargs)
        for is_attribute, name in rest:
            found = (
                found[name]
                if not is_attribute or isinstance(found, Mapping)
                else getattr(found, name)
            )
        canonical(found)  # its text may be made by a conversion or a format, and must be stable
        return found, str(first)

    def format_field(self, value: Any, format_spec: str) -> str:
        return str(super().format_field(value, format_spec)) if format_spec else _shown(value)


_FORMATTER: Final = _CanonicalFormatter()
