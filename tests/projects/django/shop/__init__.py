"""A small shop; its Celery app is imported with Django, as Celery's documentation shows."""

from shop.celery import app as celery_app

__all__ = ("celery_app",)
