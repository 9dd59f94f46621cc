"""The seam to Celery, behind :mod:`celery_leases.task`: deliveries, messages, the worker's main process."""
