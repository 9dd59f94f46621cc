"""Celery Leases as a Django app: ``INSTALLED_APPS += ["celery_leases.django"]``.

The records are in one of Django's ``DATABASES``, ``manage.py migrate`` creates the tables, and the
admin shows them.
"""
