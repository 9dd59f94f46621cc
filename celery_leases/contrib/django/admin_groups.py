"""Cooldown groups in Django's admin: those whose gate is not open, wherever the lease store is."""

from __future__ import annotations

from typing import Any, ClassVar, Final

from django.contrib import messages
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.contenttypes.models import ContentType
from django.core.exceptions import PermissionDenied
from django.http import HttpResponseRedirect
from django.template.response import TemplateResponse

from celery_leases.common.durations import in_words
from celery_leases.contrib.django.admin_access import STYLES, Operated, client
from celery_leases.errors import LeasesError

ACTIONS: Final = {"open": "Open", "close": "Close"}
PERMISSION: Final = "operate"
USUAL_SPAN: Final = "5m"


class LeaseGateAdmin(Operated):
    """The page of the cooldown groups. Their gates may be in Redis, so the client is asked and not
    the table.
    """

    actions: ClassVar[list[str]] = []

    class Media:
        """As for the records."""

        css = STYLES

    def changelist_view(self, request: Any, extra_context: dict[str, Any] | None = None) -> Any:
        """The groups; by POST, once it was asked and answered, open those that are selected, or
        close one.
        """
        if not self.has_view_permission(request):
            raise PermissionDenied
        if request.method == "POST":
            return self._act(request)
        return self._listed(request, extra_context)

    def change_view(
        self, request: Any, object_id: str, form_url: str = "", extra_context: Any = None
    ) -> Any:
        """There is no page of one group: the list says all."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        return HttpResponseRedirect("../../")

    def _listed(
        self, request: Any, extra_context: dict[str, Any] | None = None, problem: str | None = None
    ) -> Any:
        try:
            groups = [*client().groups()]
        except LeasesError as error:
            groups, problem = [], problem or str(error)
        context = {
            **self._context(request, "Cooldown groups whose gate is not open"),
            "groups": [
                (group, in_words(group.retry_after) if group.retry_after else "after a probe")
                for group in groups
            ],
            "may_operate": self.may(request, PERMISSION),
            "problem": problem,
            "given": {name: request.POST.get(name, "") for name in ("group", "span", "why")},
            "usual_span": USUAL_SPAN,
            "leases_board": self.board_url(),
            **(extra_context or {}),
        }
        return TemplateResponse(request, "admin/celery_leases/leasegate/groups.html", context)

    def _act(self, request: Any) -> Any:
        if not self.may(request, PERMISSION):
            raise PermissionDenied
        what = request.POST.get("action")
        groups = [group for group in request.POST.getlist("group") if group.strip()]
        if what not in ACTIONS or not groups:
            return self._listed(request, problem="Select a group, or write the name of one.")
        if request.POST.get("confirmed") != "yes":
            return self._asked(request, what, groups)
        try:
            for group in groups:
                self._do(request, what, group)
        except (LeasesError, ValueError, TypeError) as error:
            return self._listed(request, problem=str(error))
        return HttpResponseRedirect(request.get_full_path())

    def _asked(self, request: Any, what: str, groups: list[str]) -> Any:
        count = f"{len(groups)} group{'' if len(groups) == 1 else 's'}"
        context = {
            **self._context(request, f"{ACTIONS[what]}: {count}?"),
            "what": what,
            "label": ACTIONS[what],
            "count": count,
            "groups": groups,
            "span": request.POST.get("span") or USUAL_SPAN,
            "why": request.POST.get("why", ""),
        }
        return TemplateResponse(request, "admin/celery_leases/leasegate/confirm.html", context)

    def _do(self, request: Any, what: str, group: str) -> None:
        leases = client()
        if what == "open":
            was_shut = leases.open_group(group)
            done = "Opened" if was_shut else "Was open already"
        else:
            status = leases.close_group(
                group, request.POST.get("span") or USUAL_SPAN, request.POST.get("why", "")
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
