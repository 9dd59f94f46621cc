"""The board: records and cooldown groups as web pages, for operators.

Needs the extra ``web``. ``docs/how-to/board.md`` shows how it is served and mounted.
"""

try:
    import jinja2 as _jinja2
    import starlette as _starlette
except ImportError as error:
    raise ImportError(
        f"celery_leases.ops.board needs {error.name}: pip install 'celery-leases[web]'",
        name=error.name,
    ) from None

from celery_leases.ops.board.access import Operator, Passwords
from celery_leases.ops.board.asgi import leases_board

__all__ = ["Operator", "Passwords", "leases_board"]
del _jinja2, _starlette
