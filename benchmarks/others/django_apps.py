"""Django with the middleware of drf-idempotency or of django-idempotency-key."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any

import django
import sqlalchemy as sa
from django.conf import settings
from django.core.handlers.wsgi import WSGIHandler
from django.core.management import call_command
from django.db import connection, transaction
from django.http import HttpRequest, HttpResponse
from django.urls import path
from werkzeug.middleware.dispatcher import DispatcherMiddleware

MIDDLEWARE = {
    "": [],
    "drf": ["drf_idempotency.middleware.IdempotencyMiddleware"],
    "key": ["idempotency_key.middleware.IdempotencyKeyMiddleware"],
}


def charge(request: HttpRequest) -> HttpResponse:
    """The view of the benchmark."""
    time.sleep(float(request.headers.get("X-Pause", 0)))
    amount = json.loads(request.body)["amount"]
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("INSERT INTO charge (amount) VALUES (%s) RETURNING id", [amount])
        content = json.dumps({"id": cursor.fetchone()[0], "amount": amount})
    if "X-Kill" in request.headers:
        os.kill(os.getpid(), signal.SIGKILL)
    return HttpResponse(content, status=201, content_type="application/json")


urlpatterns = [path("charge", charge)]


def configure() -> None:
    """Settings, once in a process."""
    if settings.configured:
        return
    url = sa.make_url(os.environ["BENCH_DATABASE"])
    redis = os.environ["BENCH_REDIS"]
    database = {"NAME": url.database, "USER": url.username, "PASSWORD": url.password}
    database |= {"HOST": url.host, "PORT": url.port}
    lease = int(os.environ.get("BENCH_LEASE", "30"))
    settings.configure(
        SECRET_KEY="benchmark",
        ALLOWED_HOSTS=["*"],
        ROOT_URLCONF=__name__,
        USE_TZ=True,
        INSTALLED_APPS=["drf_idempotency"],
        DATABASES={"default": {"ENGINE": "django.db.backends.postgresql", "CONN_MAX_AGE": None, **database}},
        CACHES={"default": {"BACKEND": "django.core.cache.backends.redis.RedisCache", "LOCATION": redis}},
        IDEMPOTENCY={"LOCK_TTL_SECONDS": lease},
        IDEMPOTENCY_KEY={
            "CONFLICT_STATUS_CODE": None,  # a replay has the status of the first answer
            "STORAGE": {"CLASS": "idempotency_key.storage.CacheKeyStorage"},
            "LOCK": {"CLASS": "idempotency_key.locks.redis.MultiProcessRedisLock", "LOCATION": redis},
        },
    )
    django.setup()


def migrate() -> None:
    """Create the tables."""
    configure()
    call_command("migrate", verbosity=0)
    connection.close()


def handler(variant: str) -> Any:
    """Django's app with the middleware of one variant."""
    configure()
    settings.MIDDLEWARE = MIDDLEWARE[variant]
    return WSGIHandler()


def create(variant: str) -> DispatcherMiddleware:
    """The app with a guard, and below ``/plain`` the one without."""
    return DispatcherMiddleware(handler(variant), {"/plain": handler("")})
