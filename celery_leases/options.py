"""The options of one leased task: gathered and validated once, and frozen."""

from __future__ import annotations

import difflib
import re
import string
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn, TypedDict, cast, get_args

from celery_leases.errors import LeaseConfigurationError
from celery_leases.failures.cooldown_policies import CooldownPolicy
from celery_leases.text.durations import UNITS, Duration, seconds

if TYPE_CHECKING:  # a process that only publishes needs no rules
    from datetime import datetime

    from celery_leases.failures.classifier import Rules

DATABASE: Final = "database"
"""The value of ``leases_url`` for leases in the records' own database."""
LONGEST_COUNTDOWN: Final = 600.0
"""Seconds of the longest countdown with which a call is rescheduled."""
DEFAULT_TTL: Final = 15.0
"""Seconds of ``lease_ttl`` by default."""
DEBOUNCE_MAX: Final = 10
"""``lease_debounce_max`` by default, in multiples of ``lease_debounce``."""
DAY: Final = 86_400.0
MINIMUM_TTL: Final = 1.0
ADVISED_TTL: Final = 10.0
LONGEST_NAME: Final = 150
"""Characters of the name in a shared key, at most."""

OnLost = Literal["interrupt", "flag", "kill"]
Runs = Literal["once", "latest", "each"]
_Busy = Literal["wait", "raise", "ignore"]
OnBusy = _Busy | None
OnDone = Literal["replay", "raise", "ignore"]
Outbox = Literal["store", "once", False]
Resume = Literal["transient", "always", "never"]
TenantMaker = Callable[[Mapping[str, Any]], Any] | None
KeyMaker = str | Callable[..., str] | None
FingerprintMaker = Callable[..., Any] | tuple[str, ...] | Literal[False] | None

_CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "on_lost": get_args(OnLost),
    "runs": get_args(Runs),
    "on_busy": get_args(_Busy),
    "on_done": get_args(OnDone),
}
APP_ONLY: Final = frozenset({"tenant"})
"""Settings of the whole app that a task cannot set."""
_SECONDS: Final = ("ttl", "retention", "debounce", "debounce_max")
RATE_MARGIN: Final = 0.05
"""By how much the distance between two begins is longer than the rate says: bodies begin a little
late, and one that is late comes closer to the next one.
"""
_RATE: Final = re.compile(r"([1-9][0-9]{0,8})/([smhd])", re.ASCII)
_PREFIX: Final = re.compile("^leases?_?")


@dataclass(frozen=True, init=False)
class Failures:
    """What failures of a task mean: the option ``lease_failures``, or the setting
    ``leases_failures`` for all tasks of an app. ``dataclasses.replace()`` makes a copy with other
    values.

    A value out of range raises :class:`LeaseConfigurationError`.
    """

    #: The rules that classify failures (docs/how-to/rules.md); ``None``: ``Rules.default()``.
    rules: Rules | None
    #: How long a key cools down if neither a rule nor the server names a time. A duration is the
    #: first wait; ``CooldownPolicy(base, factor, cap, jitter)`` sets all values. A random part, up
    #: to half, is taken off.
    cooldown: CooldownPolicy
    #: Quick retries before a failure becomes a cooldown.
    retries: int
    #: Counted failures before the key is ``failed``; failures of its group are not counted.
    failures: int
    #: Crashes in a row before the key is ``failed``. The key waits 5 s after the second crash, and
    #: 30 s after each later one.
    crashes: int
    #: A second request does no harm, so a call whose outcome is unknown is retried soon.
    idempotent: bool
    #: Which failed calls run again by themselves after the cooldown
    #: (docs/explanation/failures.md#the-call-that-failed). ``"transient"``: those whose failure a
    #: rule knows to be transient; all others end with their error now. ``"always"``: all.
    #: ``"never"``: none, for work that a person starts again.
    resume: Resume

    def __init__(
        self,
        rules: Rules | None = None,
        *,
        cooldown: CooldownPolicy | Duration = 300.0,
        retries: int = 5,
        failures: int = 10,
        crashes: int = 3,
        idempotent: bool = False,
        resume: Resume = "transient",
    ) -> None:
        put = object.__setattr__  # the instance is frozen
        put(self, "rules", None if rules is None else _rules("Failures: rules", rules))
        put(self, "cooldown", CooldownPolicy.of(cooldown, "Failures: cooldown"))
        put(self, "retries", _count("Failures: retries", retries, 0))
        put(self, "failures", _count("Failures: failures", failures, 1))
        put(self, "crashes", _count("Failures: crashes", crashes, 1))
        put(self, "idempotent", _flag("Failures: idempotent", idempotent))
        put(self, "resume", _choice("Failures: resume", resume, get_args(Resume)))

    @cached_property
    def classifier(self) -> Rules:
        """The rules that classify failures."""
        from celery_leases.failures.classifier import Rules

        return Rules.default() if self.rules is None else self.rules


@dataclass(frozen=True, init=False)
class Group:
    """The group of a key, and how many of its bodies may run and begin: the option ``lease_group``.

    ``name``: a template or a callable of the arguments, such as ``"openai:{model}"``; a name alone
    is a group that only cools down. ``limit``: at most so many bodies of the group run at a time,
    over all workers. ``rate``: at most so many begin in that time, at even distances, as
    ``"60/m"``, ``"20/s"``, ``"1000/h"`` or ``"5000/d"``. A value out of range raises
    :class:`LeaseConfigurationError`. ``dataclasses.replace()`` makes a copy with other values.
    """

    name: str | Callable[..., str]
    limit: int | None
    rate: str | None

    def __init__(
        self, name: str | Callable[..., str], *, limit: int | None = None, rate: str | None = None
    ) -> None:
        put = object.__setattr__  # the instance is frozen
        put(self, "name", _maker("Group: name of the group", name) or _maker("Group: name", ""))
        put(self, "limit", None if limit is None else _count("Group: limit", limit, 1))
        put(self, "rate", rate)
        _ = self.pause  # raises if the rate is wrong

    @cached_property
    def pause(self) -> float:
        """Seconds between two begins; 0 without a rate."""
        return 0.0 if self.rate is None else _pause("Group: rate", self.rate)

    @property
    def limited(self) -> bool:
        """Whether its calls need a slot, or their turn by the rate."""
        return self.limit is not None or self.rate is not None


@dataclass(frozen=True)
class LeaseOptions:
    """The ``lease_*`` options of one task, with the app's ``leases_*`` settings as defaults. Times
    are seconds, sizes bytes.
    """

    key: KeyMaker = None
    fingerprint: FingerprintMaker = None
    #: A function of the message's headers that returns the tenant, with which every key begins
    #: (docs/how-to/tenants.md).
    tenant: TenantMaker = None
    ttl: float = DEFAULT_TTL
    renew: bool = True
    on_lost: OnLost = "interrupt"
    #: ``"once"``: the work of a key is done once, and other calls get its result; ``"latest"``: of
    #: the calls that wait, only the newest runs, and the others get its result; ``"each"``: each
    #: call runs, one after the other. Read :attr:`latest_runs`, :attr:`each_runs`, :attr:`reruns`.
    runs: Runs = "once"
    #: With ``"latest"``: a run begins once no newer call was published for so many seconds;
    #: ``None``: at once.
    debounce: float | None = None
    #: But at the latest so many seconds after the first call of the burst; ``None``:
    #: :data:`DEBOUNCE_MAX` times :attr:`debounce`.
    debounce_max: float | None = None
    #: If another call holds the key, or its failure lets the key or its group cool down; ``None``:
    #: ``"raise"`` for a key that cools down itself, unless the delivery carries chain, chord, group
    #: or link; otherwise ``"wait"``.
    on_busy: OnBusy = None
    #: If another call has finished the key.
    on_done: OnDone = "replay"
    failures: Failures = field(default_factory=Failures)
    #: The group of the key: it cools down together, and may have a limit and a rate.
    group: Group | None = None
    retention: float = 7 * DAY
    #: ``"store"``: records store the messages of their calls; ``"once"``: publishing a call writes
    #: its record, and a call of a key that is queued, runs, cools down or has ended is not
    #: published. Read :attr:`queues_once`.
    outbox: Outbox = False
    #: Seconds after which renewal stops, so that a body that hangs does not hold its key for ever:
    #: the task's ``time_limit``. Not an option of its own.
    max_hold: float = DAY

    @cached_property
    def compares(self) -> bool:
        """Whether all calls of a key must have the same fingerprint."""
        return self.key is not None and self.fingerprint is not False and not self.reruns

    @cached_property
    def queues_once(self) -> bool:
        """Whether publishing a call writes its record, as ``lease_outbox="once"`` says; never
        without ``lease_key``.
        """
        return self.outbox == "once" and self.key is not None

    @cached_property
    def each_runs(self) -> bool:
        """Whether each call of a key runs, one after the other (``lease_runs="each"``)."""
        return self.runs == "each"

    @cached_property
    def latest_runs(self) -> bool:
        """Whether only the newest of the calls that wait runs (``lease_runs="latest"``)."""
        return self.runs == "latest"

    @cached_property
    def reruns(self) -> bool:
        """Whether a key that is done may run again, for another call: unless ``lease_runs`` is
        ``"once"``.
        """
        return self.runs != "once"


class TaskOptions(TypedDict, total=False):
    """What ``@leased_task(app, …)`` accepts: the options ``lease_*``, and those of Celery's
    ``@app.task``. For editors and type checkers; :func:`gather` checks the values.
    """

    #: Names the business action: ``"invoice:{customer_id}:{month}"``, or a callable of the
    #: arguments that returns a str. Calls with the same key are the same work
    #: (docs/reference/keys.md). Without it, one *call* runs once, however often it is delivered.
    lease_key: KeyMaker
    #: Which arguments must be equal in all calls of a key, or the later call raises ``KeyReused``:
    #: a list of names, a callable, or ``False`` for none. By default all except those equal to
    #: their default (docs/reference/keys.md#fingerprints).
    lease_fingerprint: Callable[..., Any] | list[str] | tuple[str, ...] | Literal[False] | None
    #: Which calls of a key run. ``"once"``: the work is done once, and other calls get its result.
    #: ``"latest"``: of the calls that wait only the newest runs, and the others get its result.
    #: ``"each"``: each call runs, one after the other.
    lease_runs: Runs
    #: With ``"latest"``: a run begins once no newer call was published for that time.
    lease_debounce: Duration | None
    #: But at the latest that time after the first call of the burst; by default 10 times
    #: ``lease_debounce``.
    lease_debounce_max: Duration | None
    #: How long the lease lasts unless it is renewed; below 1 s is refused, below 10 s warns
    #: (docs/how-to/choosing-a-ttl.md).
    lease_ttl: Duration
    #: ``False``: only ``lease.extend()`` and ``lease.save_progress()`` extend the lease.
    lease_renew: bool
    #: When the lease is lost. ``"interrupt"``: raise ``LeaseLost`` in the body, where the pool
    #: allows it (docs/how-to/operating.md#pools). ``"flag"``: only ``lease.lost`` and
    #: ``lease.check()`` say so. ``"kill"`` (prefork on Linux): as ``"interrupt"``, and the kernel
    #: kills a body that still runs when the lease ends.
    lease_on_lost: OnLost
    #: What happens to a call while *another* call holds the key, or while the key or its group
    #: cools down. ``"wait"``: it runs, or gets the result, when the key is free. ``"raise"``:
    #: ``LeaseHeld`` or ``CoolingDown`` at once. ``"ignore"``: it ends without a result. By default
    #: ``"raise"`` for a key that cools down itself, else ``"wait"``; a call with a chain, chord,
    #: group or link always waits, unless the option is ``"raise"``.
    lease_on_busy: OnBusy
    #: What a call gets if *another* call has finished the key. ``"replay"``: the saved result, or
    #: ``ResultMissing`` if it was not JSON or larger than 1 MiB. ``"raise"``: ``AlreadyDone``.
    #: ``"ignore"``: it ends without a result.
    lease_on_done: OnDone
    #: What failures mean: rules, cooldowns and limits; usually one for all tasks, in
    #: ``leases_failures``.
    lease_failures: Failures
    #: What several keys share: ``"openai:{model}"``, a callable, or ``Group("openai:{model}",
    #: limit=5, rate="60/m")``. After a rate limit or an outage all keys of the group wait
    #: (docs/explanation/failures.md#groups); with numbers at most so many bodies run at a time, and
    #: begin in a time, over all workers (docs/how-to/limit-calls.md).
    lease_group: Group | str | Callable[..., str] | None
    #: How long a record counts; afterwards its key is new, and workers delete the record.
    lease_retention: Duration
    #: ``"store"``: the record stores the message of its call, so that ``leases rescue`` can publish
    #: it again (docs/how-to/enqueue.md). ``"once"``: publishing a call also writes its record, and
    #: a call of a key that is queued, runs, cools down or has ended is not published: its caller
    #: gets the ``AsyncResult`` of the call that the key belongs to, or with
    #: ``lease_on_busy="raise"`` the error ``AlreadyQueued``.
    lease_outbox: Outbox

    # Celery's, as of its stubs; acks_late and reject_on_worker_lost are set by the lease.
    abstract: bool
    acks_on_failure_or_timeout: bool
    after_return: Callable[..., Any]
    autoregister: bool
    autoretry_for: Sequence[type[BaseException]]
    default_retry_delay: int
    dont_autoretry_for: Sequence[type[BaseException]]
    expires: float | datetime | None
    ignore_result: bool
    max_retries: int | None
    name: str
    on_retry: Callable[..., Any]
    priority: int | None
    pydantic: bool
    queue: str
    rate_limit: str | None
    resultrepr_maxsize: int
    retry_backoff: bool | int
    retry_backoff_max: int
    retry_jitter: bool
    retry_kwargs: dict[str, Any]
    send_events: bool
    serializer: str
    soft_time_limit: int
    store_errors_even_if_ignored: bool
    throws: tuple[type[Exception], ...]
    time_limit: int
    track_started: bool
    trail: bool
    typing: bool


OPTION_NAMES: Final = tuple(part.name for part in fields(LeaseOptions) if part.name != "max_hold")


def gather(
    task: str,
    given: Mapping[str, Any],
    defaults: Mapping[str, Any],
    parameters: Sequence[str] | None,
) -> LeaseOptions:
    """The options of *task* from its attributes (*given*) and the app's *defaults*.

    An attribute whose name does not begin with ``lease_`` has its whole name in *given*.
    *parameters* are the names of the body's parameters; ``None``: it accepts any keyword. Raises
    :class:`LeaseConfigurationError` for a wrong value, an unknown name, or options that contradict
    each other.
    """
    for name in given:
        if name not in OPTION_NAMES:
            raise LeaseConfigurationError(_unknown(task, name))
        if name in APP_ONLY:
            raise LeaseConfigurationError(
                f"task {task}: lease_{name} is no option of a task; write app.conf.leases_{name}={given[name]!r}"
            )
    chosen = {name: _checked(_default_named(name), name, value) for name, value in defaults.items()}
    chosen |= {name: _checked(_named(task, name), name, value) for name, value in given.items()}
    options = LeaseOptions(**chosen)
    _check_together(task, options, given.keys(), parameters)
    return options


def _unknown(task: str, name: str) -> str:
    known = [option for option in OPTION_NAMES if option not in APP_ONLY]
    written = name if name.startswith("lease") else f"lease_{name}"
    return f"task {task}: unknown option {written}; {hint_of('lease_', written, known)}"


def hint_of(prefix: str, written: str, known: Sequence[str]) -> str:
    """What to write instead of the unknown name *written*: the name among the *known* ones that is
    similar to it, or all of them.
    """
    bare = _PREFIX.sub("", written)
    meant = {part.name: f"failures=Failures({part.name}=…)" for part in fields(Failures)}
    meant |= {name: name for name in known}
    near = difflib.get_close_matches(bare, meant, n=1)
    if near:
        return f"did you mean {prefix}{meant[near[0]]}?"
    return "known are " + ", ".join(f"{prefix}{name}" for name in known)


def _named(task: str, name: str) -> str:
    return f"task {task}: lease_{name}"


def _default_named(name: str) -> str:
    if name == "key" or name not in OPTION_NAMES:
        raise LeaseConfigurationError(
            f"app.conf: leases_{name} is no default of the task options; leave it out"
        )
    return f"app.conf: leases_{name}"


def _wrong(option: str, value: object, write: str) -> LeaseConfigurationError:
    return LeaseConfigurationError(f"{option}={value!r} is not usable; write {write}")


def _checked(option: str, name: str, value: Any) -> Any:
    if name in _CHOICES:
        return _choice(option, value, _CHOICES[name])
    if name in _SECONDS:
        return _seconds(option, name, value)
    return _CHECKS[name](option, value)


def _choice(option: str, value: Any, choices: Sequence[str]) -> Any:
    if value not in choices:
        raise _wrong(option, value, " or ".join(map(repr, choices)))
    return value


def _flag(option: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _wrong(option, value, "True or False")
    return value


def _count(option: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise _wrong(option, value, f"a whole number of at least {least}")
    return value


def _pause(option: str, value: Any) -> float:
    found = _RATE.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise _wrong(option, value, 'a number of calls per second, minute, hour or day: "60/m"')
    return UNITS[found[2]] / int(found[1]) * (1 + RATE_MARGIN)


def _seconds(option: str, name: str, value: Any) -> float | None:
    if value is None and name.startswith("debounce"):
        return None
    span = seconds(value, option)
    if name == "ttl" and span < MINIMUM_TTL:
        raise _wrong(
            option,
            value,
            f"at least {MINIMUM_TTL:.0f} (seconds); {ADVISED_TTL:.0f} or more is advised",
        )
    return span


def _fingerprint(option: str, value: Any) -> FingerprintMaker:
    if value is None or value is False or callable(value):
        return cast(FingerprintMaker, value)
    if isinstance(value, list | tuple) and all(isinstance(name, str) for name in value):
        return tuple(value)
    raise _wrong(option, value, "a list of argument names, a callable of the arguments, or False")


def _maker(option: str, value: Any) -> KeyMaker:
    if value is None or (isinstance(value, str) and value.strip()) or callable(value):
        return cast(KeyMaker, value)
    example = "openai:{model}" if option.endswith("group") else "invoice:{customer_id}"
    raise _wrong(option, value, f'a template such as "{example}", or a callable of the arguments')


def _group(option: str, value: Any) -> Group | None:
    if value is None or isinstance(value, Group):
        return value
    return Group(cast("str | Callable[..., str]", _maker(option, value)))


def _tenant(option: str, value: Any) -> TenantMaker:
    if value is None or callable(value):
        return cast(TenantMaker, value)
    raise _wrong(
        option,
        value,
        'a function of the message headers, such as lambda headers: headers["tenant"]',
    )


def _rules(option: str, value: Any) -> Rules:
    from celery_leases.failures.classifier import Rules

    if isinstance(value, Rules):
        return value
    raise _wrong(option, value, "Rules.default().on(...), or Rules() for your own rules alone")


def _outbox(option: str, value: Any) -> Outbox:
    if value is not False and value not in ("store", "once"):
        raise _wrong(option, value, "False, 'store' or 'once'")
    return cast(Outbox, value)


def _failures(option: str, value: Any) -> Failures:
    if isinstance(value, Failures):
        return value
    raise _wrong(option, value, 'Failures(retries=5, resume="transient") or with other parts of it')


_CHECKS: Final[Mapping[str, Callable[[str, Any], Any]]] = {
    "key": _maker,
    "fingerprint": _fingerprint,
    "tenant": _tenant,
    "group": _group,
    "failures": _failures,
    "renew": _flag,
    "outbox": _outbox,
}


_WITHOUT_KEY: Final = {
    "fingerprint": "only copies of one call share a key",
    "on_busy": "only copies of one call share a key",
    "on_done": "another call cannot have finished the work",
}


def _check_together(
    task: str, options: LeaseOptions, given: AbstractSet[str], parameters: Sequence[str] | None
) -> None:
    def refuse(name: str, why: str) -> NoReturn:
        value = getattr(options, name)
        raise LeaseConfigurationError(f"{_named(task, name)}={value!r} {why}")

    def differs(name: str) -> bool:
        return name in given and getattr(options, name) != getattr(LeaseOptions, name)

    for name, why in _WITHOUT_KEY.items():
        if options.key is None and differs(name):
            refuse(name, f"needs a lease_key: without one, {why}; add lease_key")
    for name in ("fingerprint", "on_done"):
        if options.reruns and differs(name):
            refuse(name, f'does nothing under lease_runs="{options.runs}"; leave one of them out')
    _check_latest(options, refuse, differs)
    if "outbox" in given and options.outbox == "once" and options.key is None:
        refuse("outbox", "needs a lease_key: without one, each call has a key of its own; add it")
    _check_templates(task, options, given, parameters)
    if isinstance(options.fingerprint, tuple) and parameters is not None and "fingerprint" in given:
        for name in sorted(set(options.fingerprint) - set(parameters)):
            refuse(
                "fingerprint",
                f"names {name!r}, which is not a parameter of the task; name its parameters",
            )


def _check_latest(
    options: LeaseOptions, refuse: Callable[[str, str], NoReturn], differs: Callable[[str], bool]
) -> None:
    """Refuse options under which ``lease_runs="latest"`` would lose the last change, and times that
    only it uses.
    """
    if options.latest_runs:
        if options.key is None and differs("runs"):
            refuse("runs", "needs a lease_key: without one, each call has a key of its own; add it")
        if differs("on_busy") and options.on_busy != "wait":
            refuse(
                "on_busy",
                'would lose the last change under lease_runs="latest", whose calls wait; leave one of them out',
            )
        if options.outbox == "once" and options.key is not None:
            refuse(
                "outbox",
                'is not usable with lease_runs="latest": it does not publish a call of a key that is queued, so the '
                "newest arguments would be lost; write lease_outbox=False",
            )
    elif differs("debounce"):
        refuse(
            "debounce", 'needs lease_runs="latest": other calls do not replace each other; add it'
        )
    if options.debounce_max is not None and differs("debounce_max"):
        if options.debounce is None:
            refuse("debounce_max", "does nothing without lease_debounce; add it")
        if options.debounce_max < options.debounce:
            refuse("debounce_max", "is shorter than lease_debounce; write a longer time")


def _check_templates(
    task: str, options: LeaseOptions, given: AbstractSet[str], parameters: Sequence[str] | None
) -> None:
    group = options.group.name if options.group is not None else None
    for name, template in (("key", options.key), ("group", group)):
        if isinstance(template, str):
            option = (
                _named(task, name) if name in given else f"{_default_named(name)} (for task {task})"
            )
            _check_template(option, template, parameters)
            if name in given and parameters and "{" not in template:
                _check_constant(option, template, parameters)


def _check_constant(option: str, template: str, parameters: Sequence[str]) -> None:
    """Refuse a text without braces that has the name of a parameter: it would be the same for all
    arguments.
    """
    words = re.compile(rf"\b({'|'.join(map(re.escape, parameters))})\b")
    braced = words.sub(r"{\1}", template)
    if braced != template:
        raise _wrong(
            option,
            template,
            f'"{braced}", because without braces it is the same for all arguments',
        )


def _check_template(option: str, template: str, parameters: Sequence[str] | None) -> None:
    if template.startswith("/") and option.endswith("key"):
        begin, _, rest = template[1:].partition("/")
        usable = begin.strip() and begin.isprintable() and not set("{}|") & set(begin)
        if not (usable and rest and len(begin) <= LONGEST_NAME):
            raise _wrong(
                option,
                template,
                '"/name/key" for a key that tasks share, such as "/billing/{customer_id}"; the name has at most '
                f'{LONGEST_NAME} characters, without braces and "|"',
            )
    try:
        fields_found = [part for part in string.Formatter().parse(template) if part[1] is not None]
    except ValueError as error:
        raise _wrong(option, template, f"a template with balanced braces ({error})") from None
    for _, name, _, conversion in fields_found:
        if conversion not in (None, "r", "s", "a"):
            raise _wrong(
                option,
                template,
                f"no conversion, or one of !r, !s, !a; not {conversion!r}",
            )
        root = (name or "").split(".")[0].split("[")[0]
        if not root or root.isdigit():
            raise _wrong(option, template, "the names of parameters in the braces, not positions")
        if parameters is not None and root not in parameters:
            known = ", ".join(parameters) or "none"
            raise _wrong(
                option,
                template,
                f"names of the task's parameters ({known}), not {root!r}",
            )
