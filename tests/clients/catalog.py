"""Every real error the failure rules are tested with, by name."""

from tests.clients.cloud_calls import BOTOCORE, GOOGLE, GRPC
from tests.clients.database_calls import MYSQL, POSTGRES, SQLITE
from tests.clients.expectations import Case
from tests.clients.http_calls import AIOHTTP, HTTPX, REQUESTS, URLLIB
from tests.clients.mail_calls import SMTPLIB
from tests.clients.model_calls import ANTHROPIC, GEMINI, OPENAI
from tests.clients.payment_calls import STRIPE
from tests.clients.python_calls import PYTHON, WRAPPED
from tests.clients.redis_calls import REDIS

_MODELS_AND_MONEY = [*OPENAI, *ANTHROPIC, *GEMINI, *STRIPE]
_HTTP = [*REQUESTS, *HTTPX, *AIOHTTP, *URLLIB]
_CLOUDS = [*BOTOCORE, *GOOGLE, *GRPC]
_OUR_OWN = [*SMTPLIB, *POSTGRES, *MYSQL, *SQLITE, *REDIS]

ALL = [*_MODELS_AND_MONEY, *_HTTP, *_CLOUDS, *_OUR_OWN, *PYTHON, *WRAPPED]

CASES: dict[str, Case] = {case.name: case for case in ALL}

if len(CASES) != len(ALL):
    raise ValueError("two cases have one name")

_OF_TEN_LIBRARIES = (
    OPENAI,
    ANTHROPIC,
    GEMINI,
    STRIPE,
    REQUESTS,
    HTTPX,
    AIOHTTP,
    BOTOCORE,
    GOOGLE,
    GRPC,
)
IN_A_WORKER: dict[str, Case] = {cases[0].name: cases[0] for cases in _OF_TEN_LIBRARIES}
"""An error of each library, for what is different in the child of a worker: threads, sockets, and
pickling.
"""

OPEN: dict[str, str] = {}
"""Cases that expect another result than the rule table gives, each with the reason."""

if missing := OPEN.keys() - CASES.keys():
    raise ValueError(f"no such cases: {missing}")
