"""The admin, and no icon, which browsers ask for."""

from django.contrib import admin
from django.http import HttpResponse
from django.urls import path

urlpatterns = [
    path("admin/", admin.site.urls),
    path("favicon.ico", lambda _: HttpResponse(status=204)),
]
