"""``manage.py leases …``: the command line of celery_leases, for the Celery app of this Django
project.
"""

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
    """Hands everything on, as ``celery -A <project> leases …`` would have it."""

    help = "Look at leases and records, and repair them: manage.py leases --help says how."
    requires_system_checks: Sequence[str] = []

    def run_from_argv(self, argv: Sequence[str]) -> None:
        """Run the command with the arguments behind ``leases``; exits as that does.

        Django has read its own ``--settings`` and ``--pythonpath`` before.
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
        """The words behind ``leases``."""
        parser.add_argument("words", nargs="*")

    def handle(self, *_: Any, words: Sequence[str], **__: Any) -> None:
        """Run it from Python, as by ``call_command("leases", "show", KEY)``; raises
        ``CommandError``.
        """
        if code := self._run([*words], "manage.py leases"):
            raise CommandError(f"leases {' '.join(words)} has failed", returncode=code)

    def _run(self, words: list[str], name: str) -> int:
        if _state.default_app is None:
            raise CommandError(
                "This project has no Celery app: import it in the package of the settings, as Celery's documentation "
                "says, `from .celery import app as celery_app`."
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
