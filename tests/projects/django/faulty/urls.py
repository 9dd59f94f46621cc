"""Views that publish too early."""

from django.urls import path

from faulty import views

urlpatterns = [path("a", views.early), path("b", views.in_time), path("c", views.alone)]
