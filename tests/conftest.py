"""Fixtures for all tests come from the published plugin, as they would in a user's project."""

pytest_plugins = ["celery_leases.testing.plugin", "pytester"]
