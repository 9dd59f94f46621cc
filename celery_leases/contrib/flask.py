"""Flask: task classes with an application context, ``flask leases``, a status blueprint, error
handlers.

Needs the extra ``flask``. ``docs/flask.md`` shows all of it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from inspect import isawaitable
from typing import TYPE_CHECKING, Any, Final

import click
from celery import Celery, Task
from flask import Blueprint, Flask, Response, current_app, has_request_context, request, url_for

from celery_leases.client import LeaseClient
from celery_leases.errors import LeaseConfigurationError, LeasesError, UnknownKey
from celery_leases.http import POLL_AFTER, HttpAnswer, answer, forbidden
from celery_leases.stores.urls import rewritten_url
from celery_leases.submitting import submit
from celery_leases.task import LeasedMixin

if TYPE_CHECKING:
    from celery_leases.protocol.status import LeaseStatus

__all__ = ["CeleryLeases", "FlaskTask", "LeasedTask", "leases_blueprint", "response"]

Authoriser = Callable[[str, str | None], object]
"""Given a key and the name of its task, or ``None``: whether the current request may see it."""

EXTENSION: Final = "celery_leases"
_MEMORY: Final = (None, "", ":memory:")
_OF_CELERY: Final = "celery_leases_flask_app"
"""The attribute of a Celery app that is its Flask app."""


class FlaskTask(Task):
    """A task whose body runs in the application context of the Flask app, as Flask's documentation
    has it.

    Raises :class:`~celery_leases.errors.LeaseConfigurationError` where no :class:`CeleryLeases`
    knows the Celery app.
    """

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the body in a fresh application context, which ends with it."""
        flask_app: Flask | None = getattr(self.app, _OF_CELERY, None)
        if flask_app is None:
            raise LeaseConfigurationError(
                f"task {self.name}: no Flask app is known for its Celery app; write CeleryLeases(app) where the Flask "
                "app is made, also in the module that the worker imports"
            )
        with flask_app.app_context():
            return self.run(*args, **kwargs)


class LeasedTask(LeasedMixin, FlaskTask):
    """A leased task whose body runs in the application context of the Flask app, under the
    lease.
    """

    abstract = True


class CeleryLeases:
    """The Flask extension: ``CeleryLeases(app)``, or ``leases = CeleryLeases()`` and
    ``leases.init_app(app)``.

    The Celery app is *celery*, or ``app.extensions["celery"]``, or is made of
    ``app.config["CELERY"]``, with :class:`FlaskTask` as its task class. Where that names no
    ``leases_database_url``, the records are in the database of Flask-SQLAlchemy, if that was set up
    before. The app gets ``flask leases`` and, unless *error_handlers* is off, a handler that
    answers errors of celery_leases as ``docs/http.md`` says.
    """

    def __init__(
        self, app: Flask | None = None, celery: Celery | None = None, *, error_handlers: bool = True
    ) -> None:
        self._error_handlers = error_handlers
        if app is not None:
            self.init_app(app, celery)

    def init_app(self, app: Flask, celery: Celery | None = None) -> None:
        """Set *app* up; raises :class:`~celery_leases.errors.LeaseConfigurationError` without
        settings for Celery.
        """
        celery = celery or app.extensions.get("celery") or _made(app)
        app.extensions["celery"] = celery
        app.extensions[EXTENSION] = self
        setattr(celery, _OF_CELERY, app)
        _share_database(app, celery)
        app.cli.add_command(_leases)
        if self._error_handlers:
            app.register_error_handler(LeasesError, _handle)

    def celery(self) -> Celery:
        """The Celery app of the current Flask app."""
        found: Celery = current_app.extensions["celery"]
        return found

    def client(self) -> LeaseClient:
        """The client of that Celery app; it is the same each time and need not be closed."""
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
        """Ask for the work of a leased *task*, publish its call if need be, and make the response.

        See :func:`celery_leases.submitting.submit`. *location* is by default the URL of the status
        in the app's blueprint, if it has one. With a *session*, such as ``db.session``, commit it
        before you return the response.
        """
        sent = submit(
            *(task, args, kwargs),
            location=location or (lambda status: _location(status.key, task.name)),
            idempotent=idempotent,
            session=session,
            poll_after=poll_after,
            **options,
        )
        return response(sent)


def response(sent: HttpAnswer) -> Response:
    """An answer as a response of Flask's."""
    return Response(sent.content(), sent.status, dict(sent.headers))


def leases_blueprint(
    authorise: Authoriser,
    *,
    task: str | None = None,
    name: str = "leases",
    url_prefix: str = "/leases",
    poll_after: float = POLL_AFTER,
) -> Blueprint:
    """A blueprint with ``GET /leases/<key>``: the status of a key, as ``docs/http.md`` says.

    *authorise* is asked first, with the key and the task's name: what is not true is answered with
    403, whether the key exists or not; it may ``abort()`` too, and be ``async def``, as a view may.
    *task*: the only task whose keys are shown; else ``?task=`` names it, which is needed for keys
    that several tasks have. Raises :class:`~celery_leases.errors.LeaseConfigurationError` without
    an authoriser.
    """
    if not callable(authorise):
        raise LeaseConfigurationError(
            f"leases_blueprint({authorise!r}): give a function of the key and the task's name that says whether the "
            "current request may see it; without one everybody could see every result"
        )
    blueprint = Blueprint(name, __name__, url_prefix=url_prefix)

    @blueprint.record
    def remember(state: Any) -> None:
        state.app.extensions.setdefault(f"{EXTENSION}.status", f"{state.name}.status")

    @blueprint.get("/<path:key>")
    def status(key: str) -> Response:
        """Answer with the status of a key."""
        of_task = task or request.args.get("task") or None
        allowed = authorise(key, of_task)
        if isawaitable(allowed):
            allowed = current_app.async_to_sync(_awaited)(allowed)
        if not allowed:
            return response(forbidden())
        return response(answer(_status(key, of_task), poll_after=poll_after))

    return blueprint


async def _awaited(coming: Awaitable[object]) -> object:
    return await coming


def _status(key: str, task: str | None) -> LeaseStatus:
    celery: Celery = current_app.extensions["celery"]
    if task is None and key.startswith("t:") and "|" in key:
        # A stored key, by which the key that the authoriser has not seen would be found.
        raise UnknownKey(f"{key} is written as it is stored; give the key and its task", key)
    known = celery.tasks.get(task) if task is not None else None
    options = getattr(known, "lease_options", None)
    namespace = options.namespace if options is not None else None
    return LeaseClient.from_app(celery).status(key, task=task, namespace=namespace)


def _location(key: str, task: str) -> str | None:
    endpoint = current_app.extensions.get(f"{EXTENSION}.status")
    if endpoint is None or not has_request_context():
        return None
    url: str = url_for(endpoint, key=key, task=task)
    return url


def _handle(error: LeasesError) -> Response:
    sent = answer(error)
    if sent.status >= 500:
        current_app.logger.error("%s %s: %s", request.method, request.path, error, exc_info=error)
    return response(sent)


def _made(app: Flask) -> Celery:
    conf = app.config.get("CELERY")
    if not isinstance(conf, Mapping):
        raise LeaseConfigurationError(
            'CeleryLeases: there is no Celery app; write app.config["CELERY"] = {"broker_url": ..., ...} before it, or '
            "CeleryLeases(app, celery)"
        )
    celery = Celery(app.import_name, task_cls=FlaskTask)
    celery.config_from_object(dict(conf))
    celery.set_default()
    return celery


def _share_database(app: Flask, celery: Celery) -> None:
    """Take the database of Flask-SQLAlchemy for the records, unless another one is named."""
    if celery.conf.get("leases_database_url") or "sqlalchemy" not in app.extensions:
        return
    with app.app_context():
        url = app.extensions["sqlalchemy"].engine.url
    if url.get_backend_name() != "sqlite" or url.database not in _MEMORY:
        celery.conf.leases_database_url = rewritten_url(url)


@click.command(
    "leases",
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    add_help_option=False,
    help="Leases and records of the app's tasks, as celery leases.",
)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def _leases(args: tuple[str, ...]) -> None:
    """Run ``celery leases`` on the Celery app of the current Flask app, and exit as that does."""
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
