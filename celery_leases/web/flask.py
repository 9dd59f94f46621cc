"""Flask: tasks with an application context, ``flask leases``, a status blueprint, error handlers.

Needs the extra ``flask``. ``docs/how-to/flask.md`` explains how to use it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import isawaitable
from typing import TYPE_CHECKING, Any, Final

import click
from celery import Celery, Task
from flask import Blueprint, Flask, Response, current_app, has_request_context, request, url_for

from celery_leases.client import LeaseClient
from celery_leases.errors import LeaseConfigurationError, LeasesError
from celery_leases.stores.urls import escaped_url
from celery_leases.task import LeasedMixin
from celery_leases.text.notices import NoticeLogger
from celery_leases.web.http import POLL_AFTER, HttpAnswer, answer, forbidden
from celery_leases.web.submitting import (
    answer_of_error,
    checked_authoriser,
    decided,
    query_of,
    requested_status,
    submit,
)

if TYPE_CHECKING:
    from celery_leases.status import LeaseStatus

__all__ = ["CeleryLeases", "FlaskTask", "LeasedTask", "leases_blueprint", "response"]

Authoriser = Callable[[str, str | None], object]
"""Gets a key and the name of its task or ``None``; returns whether the request may see the key."""

EXTENSION: Final = "celery_leases"
_MEMORY: Final = (None, "", ":memory:")
_FLASK_APP: Final = "celery_leases_flask_app"
"""The attribute of a Celery app that holds its Flask app."""


class FlaskTask(Task):
    """A task that runs in the application context of the Flask app, as in Flask's documentation.

    Raises :class:`~celery_leases.errors.LeaseConfigurationError` if no :class:`CeleryLeases` was
    set up with its Celery app.
    """

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the task in a new application context."""
        flask_app: Flask | None = getattr(self.app, _FLASK_APP, None)
        if flask_app is None:
            raise LeaseConfigurationError(
                f"task {self.name}: its Celery app has no Flask app; write CeleryLeases(app) where the Flask app "
                "is created, also in the module that the worker imports"
            )
        with flask_app.app_context():
            return self.run(*args, **kwargs)


class LeasedTask(LeasedMixin, FlaskTask):
    """A leased task; its body runs under the lease, in the application context of the Flask app."""

    abstract = True


class CeleryLeases:
    """The Flask extension: ``CeleryLeases(app)``, or ``leases = CeleryLeases()`` and
    ``leases.init_app(app)``.

    The Celery app is *celery*, or ``app.extensions["celery"]``, or a new one with the settings of
    ``app.config["CELERY"]`` and :class:`FlaskTask` as its task class. If its settings have no
    ``leases_database_url``, the records are in the database of Flask-SQLAlchemy, provided that
    Flask-SQLAlchemy was set up before. The Flask app gets the command ``flask leases``. Unless
    *error_handlers* is false, it also gets a handler that answers errors of celery_leases as
    described in ``docs/reference/http.md``.
    """

    def __init__(
        self, app: Flask | None = None, celery: Celery | None = None, *, error_handlers: bool = True
    ) -> None:
        self._error_handlers = error_handlers
        if app is not None:
            self.init_app(app, celery)

    def init_app(self, app: Flask, celery: Celery | None = None) -> None:
        """Set *app* up.

        Raises :class:`~celery_leases.errors.LeaseConfigurationError` without settings for Celery.
        """
        celery = celery or app.extensions.get("celery") or _celery_from_config(app)
        app.extensions["celery"] = celery
        app.extensions[EXTENSION] = self
        setattr(celery, _FLASK_APP, app)
        _share_database(app, celery)
        app.cli.add_command(_leases)
        if self._error_handlers:
            app.register_error_handler(LeasesError, _handle)

    def celery(self) -> Celery:
        """The Celery app of the current Flask app."""
        found: Celery = current_app.extensions["celery"]
        return found

    def client(self) -> LeaseClient:
        """The client of that Celery app; it is always the same and need not be closed."""
        return LeaseClient.from_app(self.celery())

    def submit(
        self,
        task: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        location: Callable[[LeaseStatus], str | None] | str | None = None,
        idempotent: bool = False,
        session: Any = None,
        poll_after: float = POLL_AFTER,
        **options: Any,
    ) -> Response:
        """Request the work of a leased *task*, publish its call if needed, and build the response.

        See :func:`celery_leases.web.submitting.submit`. *location* is by default the URL of the
        status in the app's blueprint, if the app has one. If you give a *session*, such as
        ``db.session``, commit it before you return the response.
        """
        sent = submit(
            *(task, args, kwargs),
            location=location or (lambda status: _location(status, task)),
            idempotent=idempotent,
            session=session,
            poll_after=poll_after,
            **options,
        )
        return response(sent)


def response(sent: HttpAnswer) -> Response:
    """An :class:`~celery_leases.web.http.HttpAnswer` as a Flask response."""
    return Response(sent.content(), sent.status, dict(sent.headers))


def leases_blueprint(
    authorise: Authoriser,
    *,
    task: str | None = None,
    name: str = "leases",
    url_prefix: str = "/leases",
    poll_after: float = POLL_AFTER,
) -> Blueprint:
    """A blueprint with ``GET /leases/<key>``: the status of a key; ``docs/reference/http.md``
    describes it.

    *authorise* is called first, with the key and the task's name. If it returns a false value, the
    response is 403, whether or not the key exists; it may also call ``abort()``, and may be ``async
    def``. *task* is the only task whose keys are shown. Without it, ``?task=`` names the task; that
    is needed for keys that several tasks have. Raises
    :class:`~celery_leases.errors.LeaseConfigurationError` without an authoriser.
    """
    needed = "a function of the key and the task's name that returns whether the current request may see it"
    checked_authoriser("leases_blueprint", authorise, needed)
    blueprint = Blueprint(name, __name__, url_prefix=url_prefix)

    @blueprint.record
    def register_endpoint(state: Any) -> None:
        state.app.extensions.setdefault(f"{EXTENSION}.status", f"{state.name}.status")

    @blueprint.get("/<path:key>")
    def status(key: str) -> Response:
        """The status of a key."""
        of_task = task or request.args.get("task") or None
        allowed = authorise(key, of_task)
        if isawaitable(allowed):
            allowed = current_app.async_to_sync(decided)(allowed)
        if not allowed:
            return response(forbidden())
        celery: Celery = current_app.extensions["celery"]
        found = requested_status(celery, key, of_task, request.args.get("call"))
        return response(answer(found, poll_after=poll_after))

    return blueprint


def _location(status: LeaseStatus, task: Any) -> str | None:
    endpoint = current_app.extensions.get(f"{EXTENSION}.status")
    if endpoint is None or not has_request_context():
        return None
    url: str = url_for(endpoint, key=status.key, **query_of(status, task))
    return url


def _handle(error: LeasesError) -> Response:
    where, log = f"{request.method} {request.path}", NoticeLogger(current_app.logger)
    return response(answer_of_error(error, where, log))


def _celery_from_config(app: Flask) -> Celery:
    conf = app.config.get("CELERY")
    if not isinstance(conf, Mapping):
        raise LeaseConfigurationError(
            'CeleryLeases: there is no Celery app; set app.config["CELERY"] = {"broker_url": ..., ...} before, or '
            "write CeleryLeases(app, celery)"
        )
    celery = Celery(app.import_name, task_cls=FlaskTask)
    celery.config_from_object(dict(conf))
    celery.set_default()
    return celery


def _share_database(app: Flask, celery: Celery) -> None:
    """Use the database of Flask-SQLAlchemy for the records, unless a setting names another one."""
    if celery.conf.get("leases_database_url") or "sqlalchemy" not in app.extensions:
        return
    with app.app_context():
        url = app.extensions["sqlalchemy"].engine.url
    if url.get_backend_name() != "sqlite" or url.database not in _MEMORY:
        celery.conf.leases_database_url = escaped_url(url)


@click.command(
    "leases",
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    add_help_option=False,
    help="Show and change leases and records of tasks, as celery leases does.",
)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def _leases(args: tuple[str, ...]) -> None:
    """Run ``celery leases`` for the Celery app of the current Flask app, with its exit code."""
    from celery.bin.base import CLIContext
    from flask.cli import ScriptInfo

    from celery_leases.cli import leases

    flask_app = click.get_current_context().ensure_object(ScriptInfo).load_app()
    with flask_app.app_context():
        celery: Celery = flask_app.extensions["celery"]
        context = CLIContext(app=celery, no_color=True, workdir=None)
        code = leases.main(
            args=list(args), prog_name="flask leases", obj=context, standalone_mode=False
        )
    if isinstance(code, int):
        click.get_current_context().exit(code)
