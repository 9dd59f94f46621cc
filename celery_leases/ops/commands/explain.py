"""``celery leases explain``: which rule matches a failure, and what a task then does."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any

import click

from celery_leases.call import Call
from celery_leases.cli.output import as_json, echo_fields, echo_json, echo_line
from celery_leases.cli.parameters import option
from celery_leases.cli.root import app_of, command, unknown_task
from celery_leases.decide.after_failure import after_failure
from celery_leases.decide.endings import Raised
from celery_leases.decide.repairs import settled
from celery_leases.failures.actions import RuleMatch
from celery_leases.failures.cooldown_policies import MANY
from celery_leases.failures.error_facts import ErrorFacts, facts_of
from celery_leases.keys import CallKey
from celery_leases.options import LeaseOptions
from celery_leases.record import Failure, Outcome, Record, State
from celery_leases.worker.app_settings import leased_tasks

_A_RECORD = Record("", "", "", State.RUNNING, 0, 0, 0, 0, attempt=1)
SHOWN = 3
"""For how many failures in a row the outcome is shown."""


@command()
@option("--task", help="Use the rules and options of this task; by default the built-in ones.")
@option("--status", type=click.IntRange(100, 599), help="The HTTP status of the response.")
@option(
    "--header",
    "headers",
    multiple=True,
    metavar="NAME=VALUE",
    help="A header of the response; may be repeated.",
)
@option(
    "--code",
    "codes",
    multiple=True,
    help="An error code in the body of the response, such as insufficient_quota.",
)
@option("--exc", help="The dotted name of an exception, such as httpx.ReadTimeout.")
@option("--sqlstate", help="A SQLSTATE, such as 40001.")
@option("--grpc", help="A gRPC status, such as RESOURCE_EXHAUSTED.")
@option("--message", default="", help="The message of the error.")
@as_json
def explain(ctx: click.Context, task: str | None, as_json: bool, **given: Any) -> None:
    """Print which rule matches a failure, why, and what the task does then."""
    facts = _facts(given)
    options = _options(ctx, task)
    matched = options.failures.classifier.classify_facts(facts, time.time())
    values = explained(matched, options)
    if as_json:
        echo_json(values)
        return
    echo_line(f"{matched.rule}: {matched.why}" if matched.why else matched.rule)
    echo_fields(
        {name: value for name, value in values.items() if name not in ("rule", "why", "failures")}
    )
    for number, line in enumerate(values["failures"], 1):
        click.echo(f"  {f'failure {number}':16} {line}")


def explained(matched: RuleMatch, options: LeaseOptions) -> dict[str, Any]:
    """What *matched* means for a task with *options*, as plain values.

    ``failures`` has the outcome of the first, second and third failure in a row.
    """
    action = matched.action
    named = options.group.name if options.group is not None else None
    group = named if isinstance(named, str) else "its lease_group"
    in_group = action.scope == "group" and options.group is not None
    return {
        "rule": matched.rule,
        "why": matched.why,
        "reason": matched.reason.value,
        "action": action.kind,
        "scope": action.scope,
        "whose_wait": f"all keys of {group}" if in_group else "the key alone",
        "server_delay": f"{matched.delay:g} s by {matched.source}"
        if matched.delay is not None
        else None,
        "clamped": "to 6 hours" if matched.clamped else None,
        "ambiguous": "the call may have been executed" if action.ambiguous else None,
        "operator": "a person must act: waiting does not help" if action.operator else None,
        "after_a_cooldown": _after_a_cooldown(matched, options),
        "failures": _consecutive(matched, options, "a group" if in_group else None),
    }


def _after_a_cooldown(matched: RuleMatch, options: LeaseOptions) -> str | None:
    """What happens to the call after its last quick retry; ``None``: it fails for good."""
    raised = Raised(Exception(), Failure("", ""), matched)
    outcome = after_failure(_a_call(options), replace(_A_RECORD, quick_retries=MANY), raised, 0.0)
    if outcome.state is not State.COOLING:
        return None
    return "the call runs again by itself" if outcome.resumes else "the call ends with the error"


def _a_call(options: LeaseOptions, group: str | None = None) -> Call:
    return Call("", "", CallKey("", ""), options, group=group)


def _consecutive(matched: RuleMatch, options: LeaseOptions, group: str | None) -> list[str]:
    call, record = _a_call(options, group), _A_RECORD
    lines: list[str] = []
    for in_a_row in range(1, SHOWN + 1):
        raised = Raised(Exception(), Failure("", ""), matched)
        shortest, longest = (after_failure(call, record, raised, rand) for rand in (0.0, 1.0))
        lines.append(_in_words(shortest, longest, in_a_row))
        if longest.state is State.FAILED:
            break
        record = settled(record, longest, 0)
    return lines


def _in_words(shortest: Outcome, longest: Outcome, in_a_row: int) -> str:
    if State.FAILED in (shortest.state, longest.state):
        return f"failed for good ({longest.reason})"
    waits = [shortest.retry_after or 0.0, longest.retry_after or 0.0]
    if shortest.closing and longest.closing:
        waits = [shortest.closing.wait(in_a_row), longest.closing.wait(in_a_row)]
    least, most = (f"{wait:.3g}" if wait < 1 else f"{wait:.0f}" for wait in waits)
    span = f"{most} s" if least == most else f"{least} to {most} s"
    what = "quick retry after" if longest.state is State.PENDING else "cooldown of"
    return f"{what} {span}"


def _options(ctx: click.Context, task: str | None) -> LeaseOptions:
    if task is None:
        return LeaseOptions()
    known = leased_tasks(app_of(ctx))
    if task not in known:
        raise unknown_task(task, known)
    options: LeaseOptions = known[task].lease_options
    return options


def _facts(given: Mapping[str, Any]) -> ErrorFacts:
    if not any(
        given[name] for name in ("status", "headers", "codes", "exc", "sqlstate", "grpc", "message")
    ):
        raise click.UsageError(
            "describe the failure: --status, --header, --code, --exc, --sqlstate, --grpc or --message"
        )
    class_facts = _facts_of_class(given["exc"]) if given["exc"] else ErrorFacts()
    known = {
        "status": given["status"],
        "codes": given["codes"],
        "sqlstate": given["sqlstate"],
        "grpc": given["grpc"].upper() if given["grpc"] else None,
        "headers": dict(map(_header, given["headers"])),
        "message": given["message"],
    }
    return replace(class_facts, chain=(), **{name: value for name, value in known.items() if value})


def _header(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name.strip():
        raise click.BadParameter(
            f"{text!r} is not NAME=VALUE, such as retry-after=37", param_hint="--header"
        )
    return name.strip().lower(), value.strip()


def _facts_of_class(dotted: str) -> ErrorFacts:
    """The facts that the exception's class has, if it can be imported.

    These are its names and what all its instances carry.
    """
    module, _, name = dotted.rpartition(".")
    try:
        found = getattr(import_module(module or "builtins"), name)
    except (ImportError, AttributeError, ValueError):
        click.echo(
            f"{dotted} cannot be imported, so rules for its superclasses do not match", err=True
        )
        return ErrorFacts(names=(dotted,))
    if not isinstance(found, type) or not issubclass(found, BaseException):
        raise click.BadParameter(f"{dotted} is not an exception class", param_hint="--exc")
    return replace(facts_of(found.__new__(found)), message="")
