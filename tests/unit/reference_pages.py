"""The pages of docs/reference that are generated from the code: its docstrings, comments and help
texts. ``python -m tests.unit.reference_pages`` writes them.

A part without a description is an error, so nothing can be missing from a page.
"""

import ast
import inspect
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import click
from ruamel.yaml import YAML

from celery_leases import cli, errors, signals, testing
from celery_leases.client import LeaseClient
from celery_leases.events import Dropped
from celery_leases.failures import default_rules
from celery_leases.failures.actions import Reason
from celery_leases.lease import Lease
from celery_leases.ops.client import OperatorClient
from celery_leases.ops.gauges import GAUGES
from celery_leases.ops.metrics import METRICS, PREFIX
from celery_leases.options import APP_ONLY, OPTION_NAMES, Failures, LeaseOptions, TaskOptions
from celery_leases.record import Ended, State
from celery_leases.rules import CooldownPolicy, Rules
from celery_leases.settings import _SETTINGS, Settings, read_settings
from celery_leases.status import GroupStatus, LeaseStatus, MessageCode
from celery_leases.task import LeasedMixin
from celery_leases.testing import contracts, crash_points
from celery_leases.testing.kit import CrashedCall, LeaseKit
from celery_leases.text.base_errors import DescribedError
from celery_leases.text.notices import NOTICES
from celery_leases.web.async_client import AsyncLeaseClient
from celery_leases.web.http import IdempotencyKeyRefused, answer, public
from tests.unit.doc_pages import ROOT, page, rest_rows, with_decisions
from tests.unit.http_cases import a_status, answer_rows

REFERENCE = ROOT / "docs" / "reference"
PACKAGE = ROOT / "celery_leases"
LEVELS = {10: "DEBUG", 20: "INFO", 30: "WARNING"}


# -- from docstrings to Markdown -------------------------------------------------------------------


def linked(text: str) -> str:
    """Markdown, in which the pages that a text of the code names are links."""

    def link(found: re.Match[str]) -> str:
        page, _, anchor = found[1].partition("#")
        name = (anchor or Path(page).stem).replace("-", " ")
        here = page.removeprefix("docs/")
        folder, _, rest = here.partition("/")
        target = rest if folder == "reference" else f"../{here}"
        return f"[{name}]({target}{'#' if anchor else ''}{anchor})"

    text = re.sub(r"`{0,2}(docs/[\w/-]+\.md(?:#[\w-]+)?)`{0,2}", link, text)
    text = re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)`", r"`\1`", text)
    return re.sub(r"(?<!\*)\*(\w+)\*(?!\*)", r"*\1*", text.replace("``", "`"))


def markdown(docstring: str | None) -> str:
    """A docstring as Markdown, one sentence a line; its literal blocks stay as they are."""
    parts = []
    for part in linked(inspect.cleandoc(docstring or "")).split("\n\n"):
        if part.startswith("    "):
            parts.append(part)
            continue
        text = re.sub(r"::$", ":", " ".join(part.split()))
        parts.append(re.sub(r"(?<=\.) (?=[A-Z`*])", "\n", text))
    return "\n\n".join(parts)


def cell(text: str | None) -> str:
    """A text in one cell of a table."""
    return linked(" ".join((text or "").split())).replace("|", "\\|")


def table(head: str, rows: Iterable[Iterable[str]]) -> str:
    """A table; *head* has the titles of its columns, separated by ``|``."""
    titles = head.split("|")
    lines = [f"| {' | '.join(titles)} |".replace("|  |", "| |"), f"|{'---|' * len(titles)}"]
    lines += [f"| {' | '.join(row)} |".replace("|  |", "| |") for row in rows]
    return "\n".join(lines) + "\n"


@cache
def described(kind: Any) -> Mapping[str, str]:
    """What the comments ``#:`` above the attributes of a class, or of a module, say of them."""
    found: dict[str, str] = {}
    said: list[str] = []
    for line in inspect.getsource(kind).splitlines():
        if comment := re.match(r"\s*#: (.*)", line):
            said.append(comment[1])
            continue
        if said and (name := re.match(r"\s*(\w+)\s*[:=]", line)):
            found[name[1]] = " ".join(said)
        said = []
    return found


def said_of(kind: Any, name: str) -> str:
    """What is said of an attribute: an error if nothing is."""
    assert name in described(kind), f"write a comment #: above {kind.__name__}.{name}"
    return described(kind)[name]


def description(kind: Any, name: str) -> str:
    """What is said of an attribute, in one cell of a table."""
    return cell(said_of(kind, name))


def signature(function: Any) -> str:
    """The parameters of a function or method, without types."""
    shown = []
    star = False
    for each in inspect.signature(function).parameters.values():
        if each.name in ("self", "cls"):
            continue
        if each.kind is each.KEYWORD_ONLY and not star:
            shown.append("*")
        star = star or each.kind in (each.KEYWORD_ONLY, each.VAR_POSITIONAL)
        sign = "*" if each.kind is each.VAR_POSITIONAL else "**" * (each.kind is each.VAR_KEYWORD)
        default = each.default
        simple = isinstance(default, str | int | float | bool | tuple | None.__class__)
        given = "" if default is each.empty else f"={default!r}" if simple else "=…"
        shown.append(f"{sign}{each.name}{given}")
    return f"({', '.join(shown)})"


def members(kind: Any, *, but: Iterable[str] = ()) -> Iterator[str]:
    """The public methods and properties that a class itself defines, each in a section."""
    found: dict[str, Any] = {}
    for name, value in vars(kind).items():
        if not name.startswith("_") and name not in but and (callable(value) or _is_member(value)):
            inner = getattr(value, "__func__", value)
            found[name] = inner.fget if isinstance(inner, property) else inner
    # A test may have replaced one for a while, and so changed their order.
    for name, inner in sorted(found.items(), key=lambda one: one[1].__code__.co_firstlineno):
        assert inner.__doc__, f"write a docstring: {kind.__name__}.{name}"
        shown = name if isinstance(vars(kind)[name], property) else f"{name}{signature(inner)}"
        yield f"### {name}\n\n`{shown}`\n\n{markdown(inner.__doc__)}\n"


def _is_member(value: object) -> bool:
    return isinstance(value, property | classmethod | staticmethod)


# -- options and settings --------------------------------------------------------------------------


def spelled(name: str, value: object) -> str:
    """A default, in the unit that people write."""
    if value is None or isinstance(value, Failures):
        return ""
    if isinstance(value, CooldownPolicy):
        return f"{value.base:g} s, doubling to {value.cap / 3600:g} h"
    if name == "retention":
        assert isinstance(value, float)
        return f"{value / 86_400:g} days"
    if isinstance(value, float):
        return f"{value:g} s"
    return f'`"{value}"`' if isinstance(value, str) else f"`{value}`"


def options_page() -> str:
    """docs/reference/options.md."""
    options, settings = LeaseOptions(), read_settings({}, "redis://localhost//")
    names = [name for name in TaskOptions.__annotations__ if name.startswith("lease_")]
    assert {f"lease_{name}" for name in {*OPTION_NAMES} - APP_ONLY} == {*names}
    task = [
        _option_section(name, spelled(bare, getattr(options, bare)), said_of(TaskOptions, name))
        for name in names
        for bare in [name.removeprefix("lease_")]
    ]
    failures = [
        (
            f"`{part.name}`",
            spelled("", getattr(Failures(), part.name)),
            description(Failures, part.name),
        )
        for part in fields(Failures)
    ]
    of_app = [
        _option_section(f"leases_{name}", _setting(settings, name), said_of(Settings, _field(name)))
        for name in _SETTINGS
    ]
    of_app += [
        _option_section(f"leases_{name}", "", said_of(LeaseOptions, name)) for name in APP_ONLY
    ]
    parts = (OPTIONS, *task, TASK_CLASSES, table("part|default|meaning", failures))
    return "\n".join((*parts, "## Settings\n", *of_app))


def _option_section(name: str, default: str, meaning: str) -> str:
    """A section of its own, so that a link leads to an option, and a phone shows it."""
    shown = f"Default: {default}.\n\n" if default else ""
    return f"### {name}\n\n{shown}{markdown(meaning)}\n"


def _field(setting: str) -> str:
    return "leases_url" if setting == "url" else setting


def _setting(settings: Settings, name: str) -> str:
    value = getattr(settings, _field(name))
    return f"`{value}`" if name in ("pool_size", "prefix", "eager_stores") else ""


OPTIONS = """# Options and settings

## Task options

Write options in `@app.task(…)`, in `@leased_task(app, …)`, or as attributes of a task class.
Times are seconds, text such as `"30s"`, `"5m"` or `"1h30m"`, or a `timedelta`.
A wrong value, options that contradict each other, and any other name that begins with `lease` are refused when the task is registered; the message says what to write.
`app.conf.leases_<option>` is the default of the app for every option but `lease_key` and `lease_fingerprint`.
If the settings of the app have a prefix, such as Django's `CELERY_`, these have it too: `CELERY_LEASES_URL`.
"""
TASK_CLASSES = """## Leased tasks

`lease_on_busy` and `lease_on_done` speak of *another* call: a second delivery of the same call is rescheduled, gets the saved result, or is dropped, whatever they say.
`"ignore"` never applies to a call with a chain, chord, group or link, because what follows the call would wait for ever.

A leased task has `acks_late` and `reject_on_worker_lost` switched on; a task that switches one of them off is refused, because a killed process would lose the message.
The lease is renewed until the task's `time_limit`, or for 24 h without one; then the call fails as after a time limit.

To combine the lease with another task class, write `class MyTask(LeasedMixin, OtherTask)`; its `__call__` runs around the body, under the lease.
The other order is refused, because the body would run without a lease.
Your own `Request` class is combined with that of the lease; your own `Strategy`, such as that of celery-batches, is refused.
`lease_*` options in `apply_async()` or in a signature are refused, because they would have no effect.

## Failures

`lease_failures=Failures(rules, cooldown="10m", …)`, with `from celery_leases import Failures`.
`dataclasses.replace(failures, resume="never")` makes a copy with other values.
"""


# -- the client, the lease and the status ----------------------------------------------------------


def client_page() -> str:
    """docs/reference/client.md."""
    return "\n".join(
        (
            "# The lease, the task and the client\n",
            "## The lease\n",
            "In the body: `self.lease`, or `celery_leases.current_lease` in a task that is not bound.\n",
            markdown(Lease.__doc__),
            "",
            *members(Lease),
            "## The task\n",
            "A leased task has the methods of Celery's tasks, and these.\n",
            *members(LeasedMixin, but=("on_bound", "start_strategy")),
            "## The client\n",
            "`celery_leases.LeaseClient`\n",
            markdown(LeaseClient.__doc__),
            "",
            *members(LeaseClient),
            "## The operator's client\n",
            "`celery_leases.ops.client.OperatorClient`\n",
            markdown(OperatorClient.__doc__),
            "",
            *members(OperatorClient),
            "## The client of an event loop\n",
            "`celery_leases.web.async_client.AsyncLeaseClient`\n",
            markdown(AsyncLeaseClient.__doc__),
            "",
            *members(AsyncLeaseClient),
        )
    )


def status_page() -> str:
    """docs/reference/status.md."""
    plain = {"key": "the key", "task": "the name of its task"}
    plain |= dict.fromkeys(("created_at", "started_at", "finished_at"), "a time")
    status = [
        (f"`{part.name}`", plain.get(part.name) or description(LeaseStatus, part.name))
        for part in fields(LeaseStatus)
    ]
    return "\n".join(
        (
            "# The status of a key\n",
            markdown(LeaseStatus.__doc__) + "\n",
            table("field|meaning", status),
            "## Methods\n",
            *members(LeaseStatus),
            "## States\n",
            table("state|meaning", ((f"`{one}`", description(State, one.name)) for one in State)),
            "## Messages\n",
            MESSAGES,
            table("`message_code`|`message()`", ((f"`{one}`", one.text) for one in MessageCode)),
            "## Reasons\n",
            REASONS,
            table("reason|whose fault, and what to do", _values(Reason)),
            OTHER_REASONS,
            "## How attempts end\n",
            "The values of `ended`, in a record, in `lease.previous` and in `attempt_settled`.\n",
            table("ended|meaning", _values(Ended)),
            "## The status of a group\n",
            markdown(GroupStatus.__doc__) + "\n",
        )
    )


def _values(kind: Any) -> Iterator[tuple[str, str]]:
    return ((f"`{one}`", description(kind, one.name)) for one in kind)


MESSAGES = """`message()` is one line for the person who waits, without the text of any exception.
For your own words, or another language, use `message_code` with `retry_after` and `attempt`.
"""
REASONS = """`reason` is a stable code for programs: use it for alerts, or translate it for users.
`rule` is more exact, and may be the name of your own rule.
"""
OTHER_REASONS = """If nothing has failed, the reason in a status is how the latest attempt ended (`snoozed`, `retried`, …), why a result is missing (`result_too_large`, `result_not_json`, `result_refused`), `lease_ended` for an abandoned key, `record_unreadable`, or `lease_store_unavailable`.
"""


# -- events ----------------------------------------------------------------------------------------


def events_page() -> str:
    """docs/reference/events.md."""
    parts = [EVENTS]
    for event, signal in signals.SIGNALS.items():
        own = [f"`{one.name}`" for one in fields(event) if one.name not in _SUBJECT]
        parts += [
            f"### {signal.name}\n",
            markdown(event.__doc__) + "\n",
            f"Fields: {', '.join(own)}.\n",
            f"{LEVELS[event.level]}: `{event.line.replace('{more}', '…')}`\n",
        ]
    dropped = ((f"`{one}`", one.words) for one in Dropped)
    return "\n".join(
        (*parts, "### Why a call is dropped\n", table("reason|`why`", dropped), TASK_EVENTS)
    )


_SUBJECT = ("task", "key", "call_id")
EVENTS = """# Log lines, signals and task events

## Log lines and signals

The logger `celery_leases` writes one line per event: task, call, key, and the text below.
Its record has the signal's name as `lease_event` and the fields as `data`, for structured logs.
Other lines of this logger end with a code: [warnings](warnings.md) says what to do.
After a reschedule Celery itself logs `Task … rescheduled`, and after a drop `Task … ignored`: these mean the end of the old delivery.
Of a long wait the first reschedule is logged, and then one for each change of the cause; the others are at DEBUG (`still`).

A signal works like one of Celery: `from celery_leases.signals import lease_lost`, then `@lease_lost.connect`, or `@lease_lost.connect(sender=charge)` for one task.
`event` is frozen, and has `task`, `key`, `call_id` and the fields below; times are seconds.
An exception of a receiver is logged and does not affect the task.
Receivers of `lease_renewed`, `renewal_failed` and `lease_lost` are called in a thread of their own (under gevent and eventlet in a greenlet), all others in the thread of the task, so they should be quick.
"""
TASK_EVENTS = """## Task events, for Flower and others

If the worker sends task events (`-E`), a call that cannot run now sends an event of its own, and Flower shows it as the state of the task.

| event | state in Flower | the call |
|---|---|---|
| `task-cooldown` | COOLDOWN | has failed and its key cools down, or waits for a cooldown of its key or group |
| `task-backoff` | BACKOFF | has failed and is retried soon, or waits for that time |
| `task-snoozed` | SNOOZED | raised `Snooze` |
| `task-held` | HELD | waits for another call that holds its key, or for its turn in its group |
| `task-rescheduled` | RESCHEDULED | is rescheduled for another reason, except because a copy of the same call runs |

Fields are `uuid`, `key`, `retry_after` (seconds of the whole wait, or for `task-held` and `task-rescheduled` until the next try) and `reason`.
Celery orders STARTED, RECEIVED and REVOKED below such a state, so it stays until the call succeeds, fails or is retried.
An event that cannot be sent within 5 s is dropped.
Celery's result backend has only Celery's states: a call that waits is `PENDING`, or `RETRY` after a failure; `lease_status()` says more.
"""


# -- failure rules ---------------------------------------------------------------------------------


def rules_page() -> str:
    """docs/reference/failure-rules.md: what each rule matches is in the docstring of the rules."""
    matches = rest_rows(default_rules.__doc__ or "")[1:]
    rows = [
        (f"`{rule.name}`", linked(what), action_cell(rule), delay_cell(rule))
        for rule, (name, what) in zip(Rules.default().rows(), matches, strict=True)
        if name == f"`{rule.name}`" or _mismatch(name, rule.name)
    ]
    return "\n".join((RULES, table("rule|matches|action|delay", rows), AFTER_RULES))


def _mismatch(name: str, rule: str) -> bool:
    raise AssertionError(f"the docstring of default_rules has {name} in the place of {rule}")


def span(seconds: float) -> str:
    """A span of time as the rule table writes it."""
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:g} {unit}"
    return f"{seconds:g} s"


def growth(policy: CooldownPolicy) -> str:
    """How a wait grows, as the rule table writes it."""
    assert policy.factor == 2
    return f"{span(policy.base)}, doubling to {span(policy.cap)}"


def kind_cell(action: Any) -> str:
    """What is done, and to whom."""
    return f"`{action.kind}`{' of the group' if action.scope == 'group' else ''}"


def action_cell(rule: Any) -> str:
    """The action of a rule as the table writes it."""
    action = rule.action
    if rule.name.startswith("asked-"):
        return "as requested"
    words = kind_cell(action)
    if action.if_not_idempotent:
        words = f"{words} if `idempotent`, else {kind_cell(action.if_not_idempotent)}"
    if action.then:
        words = f"{words}, then {kind_cell(action.then)}"
    flags = [flag for flag in ("ambiguous", "operator") if getattr(action, flag)]
    return "; ".join([words, *flags])


def delay_cell(rule: Any) -> str:
    """The delay of a rule as the table writes it."""
    action = rule.action
    if action.kind == "permanent":
        return ""
    if rule.name.startswith("asked-"):
        return "as requested"
    words = growth(action.policy) if action.policy else "`Failures.cooldown`"
    if action.server_delay == "instead":
        words = f"from the response, else {words}"
    if action.server_delay == "ignore":
        words = f"{words}, whatever the response says"
    if action.at_least:
        words += f", at least {span(action.at_least)}"
    for word, other in (("else", action.if_not_idempotent), ("then", action.then)):
        words += f"; {word} {growth(other.policy)}" if other else ""
    if action.policy and action.policy.jitter == 1.0:
        words += "; up to all of it is taken off"
    return words


RULES = """# Failure rules

The default rules, in the order in which they are tried; your own come after the first four ([rules of your own](../how-to/rules.md)).
The first seven look at the error and at all errors that it wraps.
The others, but for the last four, are matched against one error after the other, the outermost first.
The last four match wrappers whose cause may say more.
Codes come before statuses, because AWS sends its throttling with status 400.
`Rules.default().rows()` returns this table as values, and `leases explain` says which row a failure would match.

*Ambiguous*: the request may have been executed.
*Operator*: waiting alone does not help, so notify a person.
"""
AFTER_RULES = """A delay doubles with each retry or cooldown in a row, and a random part, up to half, is taken off.
If the response names a time, the longer of the two counts, unless the table says otherwise.

## Where a delay comes from

The first value that is present, above 0 and not in the past counts:

| source | value |
|---|---|
| `exception` | the attribute `retry_after` of the exception: seconds, text such as `"20s"`, or a timedelta |
| `retry-after-ms` | milliseconds |
| `retry-after` | seconds, or an HTTP date |
| `x-amz-retry-after` | milliseconds |
| `google.rpc.RetryInfo` | among the details of a Google error |
| `x-ratelimit-reset-requests`, `x-ratelimit-reset-tokens` | `6m0s` or `12ms`, if the matching `remaining` header is 0; the longer of the two |
| `anthropic-ratelimit-…-reset` | the latest date of the windows whose `remaining` is 0, or of all windows if none is 0 |
| `x-ratelimit-reset` | seconds, or a time since the epoch, unless `x-ratelimit-remaining` is above 0 |
| `ratelimit` | `"default";r=0;t=40` |

The headers from `x-ratelimit-reset-requests` on are read only for the statuses 403, 413, 429, 503, 509 and 529, or without a status, because some servers send them with every response.
A date is compared with the `Date` header of the response, so the two clocks need not agree.
At most 6 hours and at least 1 s of it count, and a random part, a tenth of it and at most 5 s, is added, so that not all calls run exactly then.
"""


# -- metrics, commands, HTTP -----------------------------------------------------------------------


def metrics_page() -> str:
    """docs/reference/metrics.md."""
    labels = {"records": "`task`, `state`", "groups": "`state`"}
    counted = [
        (f"`{one.full_name}`", ", ".join(f"`{name}`" for name in one.labels), _histogram(one))
        for one in METRICS.values()
    ]
    gauges = [(f"`{PREFIX}{name}`", labels.get(name, ""), text) for name, text in GAUGES.items()]
    rules = ROOT / "ops" / "prometheus" / "celery_leases.rules.yml"
    (group,) = YAML(typ="safe").load(rules)["groups"]
    alerts = [
        (f"`{rule['alert']}`", _summary(rule), rule["annotations"]["description"])
        for rule in group["rules"]
    ]
    return "\n".join(
        (
            "# Metrics and alerts\n",
            "[Monitor workers](../how-to/monitor.md) says how they are exported.",
            "A key is never a label, so the number of label values stays small.\n",
            "## What is measured\n",
            table("metric|labels|meaning", [*counted, *gauges]),
            "## Alerts and a dashboard\n",
            "[`ops/prometheus/celery_leases.rules.yml`](../../ops/prometheus/celery_leases.rules.yml) has these alerts.\n",
            table("alert|fires when|what to do", alerts),
        )
    )


def _histogram(metric: Any) -> str:
    return f"{metric.help} A histogram." if metric.buckets else metric.help


def _summary(rule: Any) -> str:
    text = re.sub(r"\{\{ \$labels\.(\w+) \}\}", r"*\1*", rule["annotations"]["summary"])
    return re.sub(r"\{\{ \$value[^}]*\}\}", "*n*", text)


def commands_page() -> str:
    """docs/reference/command-line.md."""
    return "\n".join((COMMANDS, *_commands(cli.leases, "leases")))


def _commands(group: click.Group, name: str) -> Iterator[str]:
    for each in group.list_commands(None):  # type: ignore[arg-type]
        command = group.get_command(None, each)  # type: ignore[arg-type]
        assert command is not None
        assert command.help, f"write a help for leases {each}"
        if isinstance(command, click.Group):
            yield from _commands(command, f"{name} {each}")
            continue
        names = [_argument(one) for one in command.params if isinstance(one, click.Argument)]
        yield f"## {name} {each}\n"
        yield f"`{' '.join([name, each, *names])}`\n"
        yield f"{markdown(command.help)}\n"
        shown = [one for one in command.params if isinstance(one, click.Option) and not one.hidden]
        if shown:
            yield table("option|meaning", (_option(one) for one in shown))


def _argument(argument: click.Argument) -> str:
    name = (argument.name or "").removesuffix("s").upper()
    return (
        f"[{name}…]"
        if argument.nargs == -1 and not argument.required
        else f"{name}…"
        if argument.nargs == -1
        else name
    )


def _option(option: click.Option) -> tuple[str, str]:
    assert option.help, f"write a help for {option.opts}"
    choices = getattr(option.type, "choices", ())
    known = f" One of {', '.join(f'`{one}`' for one in choices)}." if choices else ""
    default = option.default if isinstance(option.default, str | int) else ""
    given = f" Default: `{default}`." if default not in ("", False) else ""
    return f"`{', '.join(option.opts)}`", cell(option.help + known + given)


COMMANDS = """# The command line

`celery -A yourapp leases …` reads the settings of your app; Django has `manage.py leases …`, and Flask `flask leases …`.
With `--json` a command prints one object on each line, for programs.
A time is `30s`, `5m`, `12h`, `30d` or `1h30m`.

Exit codes: 0 if everything was done; 1 if something was not done for at least one key, a finding or a missed goal was reported, or a store did not answer; 2 if the command line was wrong.
After an error a command prints one line that says what is wrong.
Without `-A` a command is refused: the stores of the app that Celery would use are not those of your workers.

[Find out why a task did not run](../how-to/why-not-run.md) and [repair keys](../how-to/repair-keys.md) show them at work.
"""


def http_page() -> str:
    """docs/reference/http.md: the answers are those that the code gives."""
    head = "asked|the key, or the error|code|`Retry-After`|`code` in the problem"
    plain = answer(a_status("cooling", 299.2), asked="work", location="/orders/7").body
    public_fields = ", ".join(f"`{name}`" for name in public(a_status("done")))
    bodies = BODIES.format(public=public_fields, problem=", ".join(f"`{name}`" for name in plain))
    return "\n".join((HTTP, table(head, answer_rows()), bodies))


HTTP = """# HTTP

What `submit()` and the status views answer, in Django, Flask and FastAPI alike; [answer an HTTP request](../how-to/http-requests.md) shows the functions.

## The answers

A request asks for the *status* of a key, or for its *work*.
Of work, the answer is that for the status before the call is published: 202 says that it may be published.
`poll_after` replaces the 2 s.
`Retry-After` is in whole seconds, rounded up, and at least 1; each answer has `Cache-Control: no-store`.
"""
BODIES = """A pending key whose last attempt failed for its caller is accepted, with an `Idempotency-Key` too, because its call does not run again by itself.

With [`lease_runs="latest"`](../how-to/newest-change-wins.md) the URL of the status ends with `?call=` and the id of the call.
Its status is that of this call: `pending` until a run has begun that answers it, and `message_code` is `replaced` if that was the run of a newer call.
`submit()` publishes each such call, also if the key is done, has failed or cools down: the call waits.

## The bodies

200 and 202 have the content type `application/json` and these fields of a [status](status.md): {public}.
`result` and `progress` are the values that your body returned and saved: a client sees them, so authorise the client before you answer.

Every other code has the content type `application/problem+json` (RFC 9457) and the fields {problem}; those without a value may be missing.

Show users `message`, or `detail` of a problem.
Neither contains the text of an exception.
The error itself, the rule, the group's name, the host and the effects are for operators and are never sent.
"""


# -- the packages, and the test kit ----------------------------------------------------------------


def packages_page() -> str:
    """docs/reference/packages.md: the import contracts, and the docstrings of the modules."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = {one["id"]: one for one in project["tool"]["importlinter"]["contracts"]}
    parts = [PACKAGES]
    for title, name in (("The packages", "layers"), ("Inside worker", "worker")):
        (container,) = contracts[name]["containers"]
        rows = [
            (
                ", ".join(f"`{one}`" for one in modules),
                " ".join(_first(container, one) for one in modules),
            )
            for layer in contracts[name]["layers"]
            for modules in [re.findall(r"(?<!\()\b\w+\b(?!\))", layer)]
        ]
        parts += [f"## {title}\n", table("package or module|what it does", rows)]
    return "\n".join(parts)


def _first(container: str, name: str) -> str:
    """The first paragraph of the docstring of a module or package."""
    path = ROOT.joinpath(*container.split("."), name)
    source = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
    text = ast.get_docstring(ast.parse(source.read_text()))
    assert text, f"write a docstring for {container}.{name}"
    return cell(text.split("\n\n")[0])


PACKAGES = """# The packages

For contributors.
Imports only point down these tables; the linter checks it.
The core, from `alembic` downwards, works without the four annexes above it.
[How it works](../explanation/how-it-works.md) explains one delivery step by step.
"""


def testing_page() -> str:
    """docs/reference/testing-kit.md: the functions of the test kit."""
    parts = [
        "# The test kit\n",
        "`from celery_leases import testing`; [test your tasks](../how-to/testing-your-tasks.md) shows it at work.\n",
        "## Functions\n",
    ]
    for name in testing.__all__:
        function = getattr(testing, name)
        parts.append(
            f"### {name}\n\n`{name}{signature(function)}`\n\n{markdown(function.__doc__)}\n"
        )
    points = rest_rows(crash_points.__doc__ or "")[1:]
    parts += ["## Points\n", "The points for `crash()`:\n", table("point|the process dies", points)]
    parts += ["## The kit\n", markdown(LeaseKit.__doc__), "", "## A crashed call\n"]
    parts += [markdown(CrashedCall.__doc__), "", *members(CrashedCall)]
    suites = [
        (name, inspect.cleandoc(getattr(contracts, name).__doc__)) for name in contracts.__all__
    ]
    rows = ((f"`{name}`", cell(text.split("\n\n")[0])) for name, text in suites)
    parts += ["## Contracts\n", markdown(contracts.__doc__), "", table("contract|for", rows)]
    return "\n".join(parts)


# -- errors ----------------------------------------------------------------------------------------


def every_error() -> list[Any]:
    """The error classes of the package, in the order of their source."""
    found = [
        *(kind for kind in vars(errors).values() if isinstance(kind, type)),
        IdempotencyKeyRefused,
    ]
    public = [kind for kind in found if issubclass(kind, DescribedError)]
    return [kind for kind in public if not kind.__name__.startswith(("_", "Described"))]


def error_page() -> str:
    """docs/reference/errors.md: a section for each error class."""
    sections = [
        f"## {kind.code}\n\n`{kind.__module__}.{kind.__name__}`\n\n{markdown(kind.__doc__)}\n\n"
        f"What to do: {kind.advice}.\n"
        for kind in every_error()
    ]
    return "\n".join([ERRORS, *sections])


ERRORS = """# Errors

Each error has a stable `code`, and an `advice` that says what to write; a traceback ends with both.
In a program, read `error.code` and the details of the error, not its text.
All derive from `LeasesError`, except `LeaseLost` and `Snooze`, which are `BaseException`s so that `except Exception` in a body does not catch them.
Wrong use of a lease raises a subclass of `LeaseMisuse`, which is also a `ValueError`: repeating the call does not help.
The codes of log lines and of checks are in [warnings](warnings.md).
"""

# -- warnings --------------------------------------------------------------------------------------


@cache
def modules() -> Mapping[Path, ast.Module]:
    """The syntax trees of the package."""
    return {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def constants() -> Mapping[str, str]:
    """The texts that modules of the package give a name."""
    return {
        ast.unparse(target): node.value.value
        for tree in modules().values()
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    }


def text_of(node: ast.AST | None) -> str:
    """A text as it is written, with … for what is known at run time only."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(text_of(part) for part in parts)
        case ast.Name(id=name):
            return constants().get(name, "…")
        case ast.BinOp(left=left, op=ast.Mod()):
            return text_of(left)
    return "…"


def calls(*names: str) -> Iterator[ast.Call]:
    """The calls of functions with one of these names."""
    for tree in modules().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in names:
                yield node


def codes(node: ast.AST) -> list[str]:
    """The codes that an argument may have."""
    return [str(one.value) for one in ast.walk(node) if isinstance(one, ast.Constant) if one.value]


def findings() -> dict[str, tuple[str, str, str]]:
    """Severity, problem and advice of each finding of the doctor, and of a worker that starts."""
    found: dict[str, tuple[str, str, str]] = {}
    severities = {"_warning": "warning", "_warn": "warning", "_error": "error"}
    made = dict.fromkeys(WARNED, "warning")
    for call in calls(*severities, "Finding"):
        if len(call.args) < 3 or isinstance(call.args[0], ast.Attribute):
            continue
        name = ast.unparse(call.func).rpartition(".")[2]
        severity = severities.get(name) or ast.unparse(call.args[1]).rpartition(".")[2].lower()
        said = text_of(call.args[1 if name in severities else 2]), text_of(call.args[-1])
        for code in codes(call.args[0]):
            found[code] = (made.get(code, severity), *SAID.get(code, said))
    for code, said in SAID.items():
        found.setdefault(code, (made.get(code, "error"), *said))
    return found


WARNED = (
    "consumer-timeout",
    "evicting-lease-store",
    "lease-store-warning",
    "plain-tasks-run-twice",
)
"""The severities of findings that are not written beside their codes."""


SAID: Mapping[str, tuple[str, str]] = {
    "settings": ("a `leases_*` setting or an option of a task is wrong", "what the finding says"),
    "broker-away": ("the broker does not answer", "start it, or correct its URL"),
    "lease-store-away": ("the lease store does not answer", "start it, or correct its URL"),
    "records-away": ("the database of the records does not answer", "start it, or correct its URL"),
    "tables": ("tables are missing or have another version", "run `leases migrate`"),
    "rights": ("the user may not write", "give it the [rights](databases.md#rights)"),
    "lease-store": ("the user of the lease store lacks a right", "add the [ACL rules](stores.md#users-and-acls)"),
    "evicting-lease-store": ("Redis deletes leases when its memory is full", "write maxmemory-policy noeviction in redis.conf"),
    "lease-store-warning": ("a warning of the lease store", "what it says"),
    "plain-tasks-run-twice": ("tasks without a lease acknowledge late, and may run longer than the visibility_timeout that the app has set: they run twice", "leave visibility_timeout out, because leased tasks need no short one; or give these tasks base=LeasedTask, or a shorter time_limit"),
    "consumer-timeout": ("a time limit is longer than RabbitMQ lets a worker keep a delivery", "raise [consumer_timeout](../how-to/rabbitmq.md), or lower the limit"),
    "periodic-once": ("beat calls a task with the same key each time, and `lease_runs=\"once\"`: it runs once", "write lease_runs=\"each\", or put [the date into its key](keys.md#periodic-tasks)"),
}  # fmt: skip
"""What is said of findings whose text is made elsewhere."""
SAID_BY_DJANGO = {
    "E001": ("A wrong setting or task option.", "what the message says"),
    "E002": ("The tables are of a later release.", "install that release"),
}


def checks_of_django() -> Iterator[tuple[str, str, str]]:
    """Id, text and hint of each system check."""
    tree = modules()[PACKAGE / "django" / "checks.py"]
    made = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("Warning", "Error"):
            given = {each.arg: each.value for each in node.keywords}
            name = text_of(given["id"])
            written = text_of(node.args[0]), text_of(given.get("hint"))
            if name != "…":
                made.setdefault(name, (name, *SAID_BY_DJANGO.get(name.rpartition(".")[2], written)))
        elif isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "_IDS":
            assert node.value is not None
            for code, name in ast.literal_eval(node.value).items():
                made[name] = (name, f"As {code}.", "what the advice there says")
    yield from (made[name] for name in sorted(made))


def noted_lines() -> dict[str, list[str]]:
    """The texts of the log lines with each code of the notices."""
    found: dict[str, list[str]] = {}
    for call in calls("warning", "error", "exception", "log", "_log"):
        for code in (each.value for each in call.keywords if each.arg == "code"):
            given = call.args[1] if ast.unparse(call.func).endswith("log") else call.args[0]
            text = re.sub(r"%[rsd]", "…", text_of(given))
            texts = found.setdefault(text_of(code), [])
            if text not in texts:
                texts.append(text)
    return found


def warnings_page() -> str:
    """docs/reference/warnings.md."""
    known = findings()
    lines = {code: texts for code, texts in noted_lines().items() if code not in known}
    assert lines.keys() == {*NOTICES}, lines.keys() ^ {*NOTICES}
    parts = [WARNINGS]
    for code in NOTICES:
        shown = "<br>".join(f"`{text}`" for text in lines[code])
        parts.append(f"### {code}\n\n{shown}\n\nWhat to do: {cell(NOTICES[code])}.\n")
    parts.append(FINDINGS)
    for code, (severity, problem, advice) in sorted(known.items()):
        parts.append(f"### {code}\n\n{severity}: {cell(problem)}.\n\n{_what_to_write(advice)}")
    parts.append(DJANGO)
    for code, problem, advice in checks_of_django():
        parts.append(f"### {code}\n\n{cell(problem)}\n\n{_what_to_write(advice)}")
    return "\n".join(parts).replace("<alias>", "…").replace("<schema>", "…")


def _what_to_write(advice: str) -> str:
    return f"What to write: {cell(advice).removesuffix('.')}.\n"


WARNINGS = """# Warnings

Every log line that asks for attention ends with a code; … stands for what is known at run time only.
The lines of [events](events.md) have the name of their signal instead.

## Log lines
"""
FINDINGS = """## Findings of the doctor, and of a worker that starts

A worker logs the errors and warnings among its settings when it starts; `leases doctor` shows all.
Some servers, such as a managed Redis, do not let a user read their configuration; then the doctor cannot report on it.
"""
DJANGO = """## System checks of Django

`manage.py check` runs them, and a worker of the project logs their findings when it starts.
Those of tables, and of schedules in tables, need `manage.py check --database default`; `migrate` runs them too.
Django's `SILENCED_SYSTEM_CHECKS` switches a check off.
"""

PAGES: Mapping[str, Callable[[], str]] = {
    "client": client_page,
    "command-line": commands_page,
    "errors": error_page,
    "events": events_page,
    "failure-rules": rules_page,
    "http": http_page,
    "metrics": metrics_page,
    "options": options_page,
    "packages": packages_page,
    "status": status_page,
    "testing-kit": testing_page,
    "warnings": warnings_page,
}
"""What generates each page, by its name in docs/reference."""

if __name__ == "__main__":
    for page_name, made in PAGES.items():
        (REFERENCE / f"{page_name}.md").write_text(made())
    (REFERENCE / "decisions.md").write_text(with_decisions(page("decisions")))
