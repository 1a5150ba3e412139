"""FastAPI with fastapi-idempotency's middleware and its store for several processes, which is Tortoise ORM's."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from fastapi_idempotency import IdempotencyMiddleware
from fastapi_idempotency.stores.tortoise import TortoiseStore
from tortoise import fields
from tortoise.contrib.fastapi import RegisterTortoise
from tortoise.models import Model
from tortoise.transactions import in_transaction

from .subjects import plain_url


class Charge(Model):
    """The row that the view inserts."""

    id = fields.IntField(primary_key=True)
    amount = fields.IntField()

    class Meta:
        """Its table."""

        table = "charge"


async def charge(request: Request) -> Response:
    """The view of the benchmark."""
    await asyncio.sleep(float(request.headers.get("X-Pause", 0)))
    amount = (await request.json())["amount"]
    async with in_transaction() as connection:
        row = await Charge.create(amount=amount, using_db=connection)
    if "X-Kill" in request.headers:
        os.kill(os.getpid(), signal.SIGKILL)
    return JSONResponse({"id": row.id, "amount": amount}, 201)


def one(guarded: bool) -> FastAPI:
    """One app."""
    app = FastAPI()
    app.add_api_route("/charge", charge, methods=["POST"])
    if guarded:
        lease = float(os.environ.get("BENCH_LEASE", "30"))
        scope = lambda request: request.headers["x-tenant"]  # noqa: E731
        app.add_middleware(
            IdempotencyMiddleware, store=TortoiseStore(), scope=scope, lease_seconds=lease, heartbeat_seconds=lease / 3
        )
    return app


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Connections, and the store's table."""
    modules = {"models": [__name__, "fastapi_idempotency.stores.tortoise"]}
    url = plain_url().replace("postgresql:", "asyncpg:")
    async with RegisterTortoise(app, db_url=url, modules=modules, generate_schemas=True):
        yield


def create(variant: str = "") -> Any:
    """The app with a guard, and below ``/plain`` the one without."""
    app = FastAPI(lifespan=lifespan)
    app.mount("/plain", one(guarded=False))
    app.mount("/", one(guarded=True))
    return app
