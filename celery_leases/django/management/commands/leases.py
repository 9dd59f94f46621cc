"""``manage.py leases …``: the commands of ``celery leases`` for the project's Celery app."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import click
from celery import _state
from celery.bin.base import CLIContext
from django.core.management.base import BaseCommand, CommandError, CommandParser

from celery_leases.cli import leases


class Command(BaseCommand):
    """Passes its arguments to ``celery -A <project> leases``."""

    help = "Show and change leases and records; see manage.py leases --help."
    requires_system_checks: Sequence[str] = []

    def run_from_argv(self, argv: Sequence[str]) -> None:
        """Run the command with the arguments after ``leases``, and exit with its exit code.

        Django has already read its own ``--settings`` and ``--pythonpath``.
        """
        parser = CommandParser(add_help=False, allow_abbrev=False)
        parser.add_argument("--settings")
        parser.add_argument("--pythonpath")
        _, words = parser.parse_known_args(argv[2:])
        try:
            code = self._run(words, f"{argv[0]} {argv[1]}")
        except CommandError as error:
            self.stderr.write(f"Error: {error}")
            code = 1
        sys.exit(code)

    def add_arguments(self, parser: CommandParser) -> None:
        """The arguments after ``leases``."""
        parser.add_argument("words", nargs="*")

    def handle(self, *_: Any, words: Sequence[str], **__: Any) -> None:
        """Run the command from ``call_command("leases", "show", KEY)``.

        Raises ``CommandError`` if its exit code is not 0.
        """
        if code := self._run([*words], "manage.py leases"):
            raise CommandError(f"leases {' '.join(words)} has failed", returncode=code)

    def _run(self, words: list[str], name: str) -> int:
        if _state.default_app is None:
            raise CommandError(
                "This project has no Celery app: import it in the project's __init__.py, as Celery's documentation "
                "shows: `from .celery import app as celery_app`."
            )
        context = CLIContext(app=_state.get_current_app(), no_color=True, workdir=None)
        try:
            found = leases.main(args=words, prog_name=name, obj=context, standalone_mode=False)
        except click.exceptions.Exit as end:
            return end.exit_code
        except click.ClickException as error:
            error.show()
            return error.exit_code
        except click.Abort:
            click.echo("Aborted!", err=True)
            return 1
        return found if isinstance(found, int) else 0
