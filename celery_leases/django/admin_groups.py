"""The admin page of cooldown groups, for any lease store."""

from __future__ import annotations

from typing import Any, ClassVar, Final

from django.contrib import messages
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.contenttypes.models import ContentType
from django.core.exceptions import PermissionDenied
from django.http import HttpResponseRedirect
from django.template.response import TemplateResponse

from celery_leases.django.admin_access import STYLES, ReadOnlyAdmin, client
from celery_leases.errors import LeasesError
from celery_leases.ops.actions import DEFAULT_DURATION, GROUP_ACTIONS, counted
from celery_leases.text.durations import in_words

PERMISSION: Final = "operate"


class LeaseGroupAdmin(ReadOnlyAdmin):
    """The page of the cooldown groups.

    It asks the client and not the table, because the groups may be in Redis.
    """

    actions: ClassVar[list[str]] = []

    class Media:
        """The stylesheet of all admin pages of this package."""

        css = STYLES

    def changelist_view(self, request: Any, extra_context: dict[str, Any] | None = None) -> Any:
        """Show the groups; a POST asks for confirmation, then opens the selected groups or closes
        one.
        """
        if not self.has_view_permission(request):
            raise PermissionDenied
        if request.method == "POST":
            return self._act(request)
        return self._show_groups(request, extra_context)

    def change_view(
        self, request: Any, object_id: str, form_url: str = "", extra_context: Any = None
    ) -> Any:
        """Redirect to the list: a group has no page of its own."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        return HttpResponseRedirect("../../")

    def _show_groups(
        self, request: Any, extra_context: dict[str, Any] | None = None, problem: str | None = None
    ) -> Any:
        try:
            groups = [*client().groups()]
        except LeasesError as error:
            groups, problem = [], problem or str(error)
        context = {
            **self._context(request, "Cooldown groups that are not open"),
            "groups": [
                (
                    group,
                    in_words(group.retry_after)
                    if group.retry_after
                    else "after a probe"
                    if group.state != "full"
                    else "",
                )
                for group in groups
            ],
            "may_operate": self.is_permitted(request, PERMISSION),
            "problem": problem,
            "given": {name: request.POST.get(name, "") for name in ("group", "span", "why")},
            "default_duration": DEFAULT_DURATION,
            "leases_board": self.board_url(),
            **(extra_context or {}),
        }
        return TemplateResponse(request, "admin/celery_leases/leasegroup/groups.html", context)

    def _act(self, request: Any) -> Any:
        if not self.is_permitted(request, PERMISSION):
            raise PermissionDenied
        what = request.POST.get("action")
        groups = [group for group in request.POST.getlist("group") if group.strip()]
        if what not in GROUP_ACTIONS or not groups:
            return self._show_groups(request, problem="Select a group, or enter the name of one.")
        if request.POST.get("confirmed") != "yes":
            return self._confirm(request, what, groups)
        try:
            for group in groups:
                self._do(request, what, group)
        except (LeasesError, ValueError, TypeError) as error:
            return self._show_groups(request, problem=str(error))
        return HttpResponseRedirect(request.get_full_path())

    def _confirm(self, request: Any, what: str, groups: list[str]) -> Any:
        count = counted(len(groups), "group")
        context = {
            **self._context(request, f"{GROUP_ACTIONS[what]}: {count}?"),
            "what": what,
            "label": GROUP_ACTIONS[what],
            "count": count,
            "groups": groups,
            "span": request.POST.get("span") or DEFAULT_DURATION,
            "why": request.POST.get("why", ""),
        }
        return TemplateResponse(request, "admin/celery_leases/leasegroup/confirm.html", context)

    def _do(self, request: Any, what: str, group: str) -> None:
        leases = client()
        if what == "open":
            was_closed = leases.open_group(group)
            done = "Opened" if was_closed else "Was already open"
        else:
            status = leases.close_group(
                group, request.POST.get("span") or DEFAULT_DURATION, request.POST.get("why", "")
            )
            done = f"Closed for {in_words(status.retry_after or 0.0)}"
        LogEntry.objects.create(
            user_id=request.user.pk,
            content_type_id=ContentType.objects.get_for_model(self.model).pk,
            object_id=group,
            object_repr=group[:200],
            action_flag=CHANGE,
            change_message=f"{done}.",
        )
        self.message_user(request, f"{group}: {done[0].lower()}{done[1:]}.", messages.SUCCESS)

    def _context(self, request: Any, title: str) -> dict[str, Any]:
        return {
            **self.admin_site.each_context(request),
            "title": title,
            "opts": self.opts,
            "media": self.media,
        }
