"""The admin, orders, the status of their charges, and no icon, which browsers ask for."""

from django.contrib import admin
from django.http import HttpResponse
from django.urls import include, path
from orders import views

from celery_leases.django.web import leases_urls

urlpatterns = [
    path("admin/", admin.site.urls),
    path("orders/<int:number>", views.buy),
    path("atomic/<int:number>", views.buy_in_a_transaction),
    path("keyed", views.buy_with_a_key),
    path("leases/", include(leases_urls(views.may_see))),
    path("favicon.ico", lambda _: HttpResponse(status=204)),
]
