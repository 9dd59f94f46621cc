"""Settings of the shop; the database and the broker are named by the environment."""

import json
import os
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

BASE_DIR = Path(__file__).resolve().parent.parent


def database(url: str) -> dict[str, object]:
    """An entry of DATABASES for a URL such as ``postgresql://user@host:5432/shop``."""
    parts = urlsplit(url)
    engine = {"postgresql": "postgresql", "mysql": "mysql", "sqlite": "sqlite3"}[
        parts.scheme.partition("+")[0]
    ]
    if engine == "sqlite3":
        return {"ENGINE": "django.db.backends.sqlite3", "NAME": parts.path.removeprefix("/")}
    return {
        "ENGINE": f"django.db.backends.{engine}",
        "NAME": parts.path.removeprefix("/"),
        "USER": unquote(parts.username or ""),
        "PASSWORD": unquote(parts.password or ""),
        "HOST": parts.hostname or "",
        "PORT": parts.port or "",
        "OPTIONS": dict(parse_qsl(parts.query)),
    }


if os.environ.get("SHOP_DATABASE_URL", "").startswith("mysql"):
    import pymysql

    pymysql.version_info = (2, 2, 7, "final", 0)  # what Django wants to see of mysqlclient
    pymysql.install_as_MySQLdb()

DATABASES = {
    "default": database(os.environ.get("SHOP_DATABASE_URL", f"sqlite:///{BASE_DIR}/shop.db"))
}

SECRET_KEY = "only for tests"
DEBUG = False
ALLOWED_HOSTS = ["*"]
USE_TZ = True
ROOT_URLCONF = "shop.urls"
STATIC_URL = "static/"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
PASSWORD_HASHERS = [
    "django.contrib.auth.hashers.MD5PasswordHasher"
]  # logins of tests need no slow one

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "celery_leases.django",
    "orders",
]
MIDDLEWARE = [
    "shop.policy.policy",
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]

CELERY_BROKER_URL = os.environ.get("SHOP_BROKER_URL", "memory://")
CELERY_RESULT_BACKEND = os.environ.get("SHOP_RESULT_BACKEND", "cache+memory://")
CELERY_LEASES = {"database": "default", "url": "database"}
CELERY_BEAT_SCHEDULE = {"relay": {"task": "celery_leases.relay", "schedule": 60}}
CELERY_INCLUDE = ["celery_leases.builtin_tasks"]

# What a test changes of all this.
MORE_APPS: list[str] = []
globals().update(json.loads(os.environ.get("SHOP_SETTINGS", "{}")))
INSTALLED_APPS += MORE_APPS
DATABASES["default"]["ATOMIC_REQUESTS"] = globals().get("ATOMIC_REQUESTS", False)
