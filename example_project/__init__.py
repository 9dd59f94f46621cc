"""A small billing application whose invoices are safe to send twice: ``celery -A example_project
worker``.

``settings``, ``celery`` and ``tasks`` are the modules to copy. ``demo`` and ``play`` run them while
processes are killed.
"""
