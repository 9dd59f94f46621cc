"""Records and cooldown groups in Django's admin."""

from __future__ import annotations

from django.contrib import admin

from celery_leases.django.admin_groups import LeaseGroupAdmin
from celery_leases.django.admin_records import LeaseRecordAdmin
from celery_leases.django.models import LeaseGroup, LeaseRecord

admin.site.register(LeaseRecord, LeaseRecordAdmin)
admin.site.register(LeaseGroup, LeaseGroupAdmin)
