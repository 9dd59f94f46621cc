"""What the worker imports: ``celery -A make_celery worker``."""

from shop import create_app

flask_app = create_app()
celery_app = flask_app.extensions["celery"]
