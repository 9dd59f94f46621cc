"""Records in Django's admin: the list, the page of one record, and actions with a confirmation."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, ClassVar, Final

from celery import _state
from django.contrib import admin, messages
from django.contrib.admin import helpers
from django.contrib.admin.utils import unquote
from django.contrib.admin.views.main import PAGE_VAR, ChangeList
from django.core.exceptions import PermissionDenied
from django.db.models import Q
from django.http import HttpResponseRedirect
from django.template.response import TemplateResponse
from django.utils import timezone
from django.utils.html import format_html

from celery_leases.client import Write
from celery_leases.django.admin_access import STYLES, ReadOnlyAdmin, client, held, no_worker
from celery_leases.django.models import LeaseRecord
from celery_leases.errors import LeasesError, StoreUnavailable
from celery_leases.ops.actions import ACTIONS, counted, entered_result
from celery_leases.ops.client import LOOK_THROUGH
from celery_leases.ops.formatting import as_json
from celery_leases.ops.reports import facts_of
from celery_leases.record import State
from celery_leases.status import ABANDONED, LeaseStatus
from celery_leases.text.durations import in_words
from celery_leases.worker.app_settings import leased_tasks

MICROSECONDS: Final = 1_000_000
LAST_PAGE: Final = 200
"""The last page that is shown: later ones would make the database sort more and more rows."""
REASONS_SHOWN: Final = 10
"""For how many unchanged keys the reason is shown."""
_LISTED: Final = (
    *("stored_key", "key", "task", "state", "started_at", "finished_at", "retry_at"),
    *("attempt", "crashes", "fence", "reason", "resumes"),
)
_PERIODS: Final = {"hour": 3600, "day": 86_400, "week": 7 * 86_400}


def _filter(
    name: str, choices: Callable[[Any], Iterable[Any]], wanted: Callable[[str], dict[str, Any]]
) -> type[admin.SimpleListFilter]:
    """A filter whose *choices* for a request are not read from the database; *wanted* is the lookup
    for one of them.
    """

    class ChoiceFilter(admin.SimpleListFilter):
        title = parameter_name = name

        def lookups(self, request: Any, model_admin: Any) -> list[tuple[str, str]]:
            return [each if isinstance(each, tuple) else (each, each) for each in choices(request)]

        def queryset(self, request: Any, queryset: Any) -> Any:
            value = self.value()
            return queryset if value is None else queryset.filter(**wanted(value))

    return ChoiceFilter


def _task_names(request: Any) -> list[str]:
    """The leased tasks of the app, and the task that the request names."""
    app = _state.get_current_app() if _state.default_app is not None else None
    asked = filter(None, [request.GET.get("task")])
    return sorted({*(leased_tasks(app) if app is not None else ()), *asked})


FILTERS: Final = (
    _filter(
        "state",  # RecordList separates running and abandoned keys
        lambda _: (*map(str, State), ABANDONED),
        lambda state: {"state": State.RUNNING.value if state == ABANDONED else state},
    ),
    _filter("task", _task_names, lambda task: {"task": task}),
    _filter(
        "started",
        lambda _: [(name, f"past {name}") for name in _PERIODS],
        lambda name: {"started_at__gte": int((time.time() - _PERIODS.get(name, 0)) * MICROSECONDS)},
    ),
    _filter("crashed", lambda _: [("yes", "in the latest attempts")], lambda _: {"crashes__gt": 0}),
)


class RecordList(ChangeList):
    """One page, and whether there is a next one; rows are not counted."""

    page_num: int

    def get_results(self, request: Any) -> None:
        """Read the keys of one page and one more, then the rows: so only keys are sorted."""
        self.page_num = max(1, min(self.page_num, LAST_PAGE))
        first = (self.page_num - 1) * self.list_per_page
        keys: Any = self.queryset.values_list("pk", flat=True)
        try:
            if (state := request.GET.get("state")) in (State.RUNNING, ABANDONED):
                running = [*keys[:LOOK_THROUGH]]
                live = held(running)
                keys = [key for key in running if (key in live) == (state == State.RUNNING)]
        except StoreUnavailable:  # mark_abandoned() says so
            keys = self.queryset.values_list("pk", flat=True)
        found = [*keys[first : first + self.list_per_page + 1]]
        shown = found[: self.list_per_page]
        rows = self.queryset.in_bulk(shown)
        self.model_admin.mark_abandoned(request, rows)
        self.result_list = [rows[key] for key in shown if key in rows]
        self.result_count = len(self.result_list)
        self.full_result_count = None
        self.show_full_result_count = False
        self.show_admin_actions = bool(rows)
        self.can_show_all = self.multi_page = False
        more = len(found) > self.list_per_page and self.page_num < LAST_PAGE
        self.next_page = self.get_query_string({PAGE_VAR: self.page_num + 1}) if more else None
        self.previous_page = (
            self.get_query_string({PAGE_VAR: self.page_num - 1}) if self.page_num > 1 else None
        )
        self.paginator = self.model_admin.get_paginator(
            request, self.result_list, self.list_per_page
        )


class LeaseRecordAdmin(ReadOnlyAdmin):
    """The list of records, the last started first, and the page of one record."""

    list_display = (
        *("key", "state_now", "task", "started"),
        *("retry_in", "runtime", "attempt", "reason"),
    )
    list_filter = FILTERS
    list_per_page = 50
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER  # facets are counts
    search_fields = ("key",)
    search_help_text = "The beginning of a key"
    ordering = ("-started_at",)
    sortable_by = ()
    actions: ClassVar[list[str]] = [*ACTIONS]
    change_form_template = "admin/celery_leases/leaserecord/record.html"

    class Media:
        """The stylesheet: a content security policy may forbid inline styles."""

        css = STYLES

    # -- the list ----------------------------------------------------------------------------------

    def get_changelist(self, request: Any, **_: Any) -> type[ChangeList]:
        """The list that does not count rows."""
        return RecordList

    def get_queryset(self, request: Any) -> Any:
        """The records without those of forgotten keys, and only the columns of the list.

        Other columns may be large.
        """
        forgotten = {"state": State.PENDING.value, "call_id": "", "ended": None, "message": None}
        return super().get_queryset(request).exclude(**forgotten).only(*_LISTED)

    def lookup_allowed(self, lookup: str, value: Any, request: Any = None) -> bool:
        """Allow the filters of the list alone.

        With a lookup such as ``?message__contains=`` a user could find out, guess by guess, what
        the pages hide because it may be secret.
        """
        own = {getattr(choice, "parameter_name", choice) for choice in self.list_filter}
        return lookup.partition("__")[0] in own

    def get_search_results(self, request: Any, queryset: Any, search_term: str) -> tuple[Any, bool]:
        """The keys that start with the search term."""
        if not search_term:
            return queryset, False
        return queryset.filter(Q(key__startswith=search_term) | Q(stored_key=search_term)), False

    def action_checkbox(self, obj: Any) -> Any:
        """The box that selects a key, and what the list shows of it, as it must still be when it is
        acted on.
        """
        box = super().action_checkbox(obj)
        return format_html('{}<input type="hidden" name="seen" value="{}">', box, _seen(obj))

    def mark_abandoned(self, request: Any, rows: dict[str, Any]) -> None:
        """Mark those of the *rows*, by their keys, that are running and whose lease no attempt
        holds.
        """
        running = [key for key, row in rows.items() if row.state == State.RUNNING]
        try:
            free = set(running) - held(running)
        except StoreUnavailable as error:
            text = f"It is not known which running keys are abandoned: {error}"
            self.message_user(request, text, messages.WARNING)
            return
        # A key may have ended between the two reads.
        for key, row in (self.get_queryset(request).in_bulk(free) if free else {}).items():
            rows[key] = row
            row.abandoned = row.state == State.RUNNING

    @admin.display(description="state")
    def state_now(self, row: Any) -> str:
        """The state, as the command line and the board show it."""
        return str(row.shown_state)

    @admin.display(description="started")
    def started(self, row: Any) -> str:
        """How long ago the latest attempt began, or a call was queued that has not begun."""
        ago = f"{_ago(row.started_at)} ago"
        return f"queued {ago}" if row.state == State.PENDING and not row.attempt else ago

    @admin.display(description="retry in")
    def retry_in(self, row: Any) -> str:
        """The time until the key can run again."""
        if row.state not in (State.PENDING, State.COOLING) or row.retry_at is None:
            return "-"
        left = row.retry_at / MICROSECONDS - time.time()
        return in_words(left) if left > 0 else "due"

    @admin.display(description="runtime")
    def runtime(self, row: Any) -> str:
        """How long the latest attempt took, or has taken so far."""
        if row.finished_at is not None:
            return f"{max(0, row.finished_at - row.started_at) / MICROSECONDS:.3f} s"
        return f"{_ago(row.started_at)} so far" if row.shown_state == State.RUNNING else "-"

    # -- one record --------------------------------------------------------------------------------

    def change_view(
        self,
        request: Any,
        object_id: str,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> Any:
        """The page of one record."""
        context = {
            **(extra_context or {}),
            "leases_actions": self._permitted(request),
            "leases_board": self.board_url(),
        }
        row = self.get_object(request, unquote(object_id))
        if row is not None and self.has_view_permission(request, row):
            context |= _shown(row) | {"leases_seen": _seen(row)}
        return super().change_view(request, object_id, form_url, context)

    # -- actions -----------------------------------------------------------------------------------

    def changelist_view(self, request: Any, extra_context: dict[str, Any] | None = None) -> Any:
        """The list; an action without its permission is refused."""
        name: Any = request.POST.get("action") if request.method == "POST" else None
        if name in ACTIONS and not self.is_permitted(request, ACTIONS[name].operation):
            raise PermissionDenied
        context = {**(extra_context or {}), "leases_board": self.board_url()}
        return super().changelist_view(request, context)

    def get_actions(self, request: Any) -> dict[str, Any]:
        """The actions for which the user has the permission."""
        return {
            name: (_action(name), name, action.title)
            for name, action in ACTIONS.items()
            if self.is_permitted(request, action.operation)
        }

    def _permitted(self, request: Any) -> list[tuple[str, str]]:
        return [(name, label) for name, (_, _, label) in self.get_actions(request).items()]

    def act(self, request: Any, queryset: Any, what: Write) -> Any:
        """Ask for confirmation; then do *what* to the selected keys that have not changed since
        the page was shown.
        """
        rows = [*queryset]
        if not rows or request.POST.get("select_across") == "1":
            self.message_user(request, "Select keys on one page.", messages.WARNING)
            return None
        entered = request.POST.get("result", "") if what == "resolve_done" else ""
        problem, result = entered_result(entered)
        shown_versions = dict(
            seen.split(" ", 1)[::-1] for seen in request.POST.getlist("seen") if " " in seen
        )
        if request.POST.get("confirmed") != "yes" or problem:
            return self._confirm_unchanged(request, rows, what, shown_versions, problem)
        self._do(request, rows, what, shown_versions, result)
        return HttpResponseRedirect(request.get_full_path())

    def _confirm_unchanged(
        self,
        request: Any,
        rows: Sequence[Any],
        what: Write,
        shown_versions: dict[str, str],
        problem: str | None,
    ) -> Any:
        """Ask for confirmation for the rows that have not changed since a page showed them."""
        same = [
            row
            for row in rows
            if shown_versions.get(row.stored_key, _version(row)) == _version(row)
        ]
        self.mark_abandoned(request, shown := {row.pk: row for row in same})
        same = [*shown.values()]
        for row in rows:
            if row not in same:
                text = f"Unchanged: {row.key} has changed meanwhile; check it again"
                self.message_user(request, text, messages.WARNING)
        return self._confirm(request, same, what, problem) if same else None

    def _confirm(self, request: Any, rows: Sequence[Any], what: Write, problem: str | None) -> Any:
        action = ACTIONS[what]
        context = {
            **self.admin_site.each_context(request),
            "title": f"{action.title}: {counted(len(rows))}?",
            "opts": self.opts,
            "what": what,
            "label": action.title,
            "means": action.description,
            "count": counted(len(rows)),
            "rows": [(row, _seen(row)) for row in rows],
            "publishable": _with_message(rows) if what == "retry" else 0,
            "checkbox_name": helpers.ACTION_CHECKBOX_NAME,
            "problem": problem,
            "result": request.POST.get("result", ""),
            "media": self.media,
        }
        return TemplateResponse(request, "admin/celery_leases/leaserecord/confirm.html", context)

    def _do(
        self,
        request: Any,
        rows: Sequence[Any],
        what: Write,
        shown_versions: dict[str, str],
        result: Any,
    ) -> None:
        title, changed, unchanged = ACTIONS[what].title, 0, []
        next_steps: Counter[str | None] = Counter()
        seen = [_as_shown(row, shown_versions.get(row.stored_key, "")) for row in rows]
        publish = request.POST.get("publish") == "yes"
        changes = client().change(what, seen, publish=publish, result=result)
        try:
            for row, change in zip(rows, changes, strict=False):
                if not change.done:
                    unchanged.append(change.why_of_key)
                    continue
                changed += 1
                next_steps[change.next_step] += 1
                self.log_change(request, row, f"{title}, at fence {row.fence}; it was {row.state}.")
        except StoreUnavailable as error:
            key = rows[changed + len(unchanged)].key
            self.message_user(request, f"{key}: {error}", messages.ERROR)
        del next_steps[None]
        said = [(messages.SUCCESS, f"{title}: {counted(changed)}.")] if changed else []
        said += [
            (messages.INFO, f"{counted(count)}: {step}")
            for step, count in next_steps.most_common(REASONS_SHOWN)
        ]
        said += [(messages.WARNING, f"Unchanged: {why}") for why in unchanged[:REASONS_SHOWN]]
        if (more := len(unchanged) - REASONS_SHOWN) > 0:
            said.append((messages.WARNING, f"{counted(more)} more are unchanged."))
        for level, text in said:
            self.message_user(request, text, level)


def _as_shown(row: Any, version: str) -> LeaseStatus:
    """The status of a row as the page showed it."""
    fence, _, state = version.partition(":")
    number = int(fence) if fence.isdecimal() else 0
    return LeaseStatus(row.key, row.task, state, fence=number, stored_key=row.stored_key)


def _version(row: Any) -> str:
    """The fence and the state of a row; an action requires that they are still the same."""
    return f"{row.fence}:{row.state}"


def _seen(row: Any) -> str:
    """The version and the key of a row, for a form field."""
    return f"{_version(row)} {row.stored_key}"


def _action(what: Write) -> Callable[[LeaseRecordAdmin, Any, Any], Any]:
    def act(model_admin: LeaseRecordAdmin, request: Any, queryset: Any) -> Any:
        return model_admin.act(request, queryset, what)

    return act


def _with_message(rows: Iterable[Any]) -> int:
    """How many of these rows have a stored message."""
    found = LeaseRecord.objects.filter(pk__in=[row.pk for row in rows], message__isnull=False)
    return int(found.count())


# -- formatting ------------------------------------------------------------------------------------


def _shown(row: Any) -> dict[str, Any]:
    """The context of the page of one record."""
    try:
        status = client().status(row.stored_key, waiting=True)
    except LeasesError as error:
        return {"leases_trouble": str(error)}
    return {
        "status": status,
        "leases_facts": _facts(status),
        "leases_error": _error(status),
        "leases_arguments": _arguments(row.message),
        "leases_progress": as_json(status.progress),
        "leases_result": as_json(status.result),
    }


def _facts(status: LeaseStatus) -> list[tuple[str, str | None]]:
    first = {"Key": status.key, "State": status.state, "What happens next": status.what_next()}
    facts = [*first.items(), *facts_of(status), ("Workers", no_worker())]
    return [(name, _fact(value)) for name, value in facts if value is not None]


def _fact(value: Any) -> str:
    if isinstance(value, datetime):
        return _at(value)
    return f"{value:.1f} s" if isinstance(value, float) else value


def _error(status: LeaseStatus) -> str | None:
    failure = status.error
    if failure is None:
        return None
    unsure = "It may have been executed.\n" if failure.ambiguous else ""
    return f"{unsure}{failure.type}: {failure.message}\n\n{status.traceback or ''}".strip()


def _arguments(message: str | None) -> str | None:
    """The arguments in a stored message, without secrets."""
    if message is None:
        return None
    try:
        stored = json.loads(message)
        return as_json({"args": stored.get("args"), "kwargs": stored.get("kwargs")})
    except (ValueError, AttributeError):
        return "The message cannot be read."


def _at(moment: datetime) -> str:
    shown = timezone.localtime(moment) if timezone.is_aware(moment) else moment
    return shown.strftime("%Y-%m-%d %H:%M:%S %Z")


def _ago(microseconds: int) -> str:
    then = datetime.fromtimestamp(microseconds / MICROSECONDS, UTC)
    return in_words(max(0.0, (datetime.now(UTC) - then).total_seconds()))
