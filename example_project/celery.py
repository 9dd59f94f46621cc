"""The Celery application."""

from celery import Celery

app = Celery("example_project")
app.config_from_object("example_project.settings")
