"""Celery Leases as a Django app: ``INSTALLED_APPS += ["celery_leases.contrib.django"]``.

Records live in a database of Django's ``DATABASES``, ``manage.py migrate`` makes the tables, and
the admin shows them.
"""
