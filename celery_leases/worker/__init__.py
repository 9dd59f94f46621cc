"""All modules that use Celery behind :mod:`celery_leases.task`: deliveries, messages, the worker's
processes and pools.
"""
