"""Ways in which a guard was, or could be, got around: each one found by trying, and kept."""

from __future__ import annotations

import base64
import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
from flask import Flask, Response, copy_current_request_context, current_app, request
from flask.views import MethodView

from flask_idempotency import Idempotency, fingerprint
from flask_idempotency.errors import ConfigurationError
from flask_idempotency.heartbeat import heartbeat
from tests.support.apps import Shop, events, make_shop, new_key, until
from tests.support.barrier import background


def headers(key: str, tenant: str = "acme") -> dict[str, str]:
    return {"X-Tenant": tenant, "Idempotency-Key": key}


def test_a_locked_row_keeps_no_other_claim_from_renewal(postgres_url: str) -> None:
    """While somebody holds a lock on one key's row, the other claims of the process are renewed all the same."""
    shop = make_shop(postgres_url, lock_timeout=1)
    end, running = threading.Event(), threading.Barrier(3)

    @shop.app.post("/slow")
    @shop.idempotency.required
    def slow() -> tuple[str, int]:
        shop.runs.append(request.headers["Idempotency-Key"])
        running.wait(10)
        end.wait(10)
        return "done", 201

    keys = [new_key(), new_key()]
    first = [background(lambda key=key: shop.client.post("/slow", headers=headers(key))) for key in keys]
    running.wait(10)
    with shop.app.app_context():
        engine = shop.db.engine
    with engine.connect() as connection:
        lock = sa.text("SELECT 1 FROM idempotency_keys WHERE key = :key FOR UPDATE")
        connection.execute(lock, {"key": keys[0]})
        locked_at = sa.text("SELECT locked_at FROM idempotency_keys WHERE key = :key")
        with engine.connect() as other:
            before = other.execute(locked_at, {"key": keys[1]}).scalar()
            other.rollback()
            # Two renewals: the second one can only come if the first one did not wait for the lock.
            for _ in range(2):

                def renewed(since: Any = before) -> bool:
                    moment = other.execute(locked_at, {"key": keys[1]}).scalar()
                    other.rollback()
                    return bool(moment > since)

                until(renewed)
                before = other.execute(locked_at, {"key": keys[1]}).scalar()
                other.rollback()
        connection.rollback()
    end.set()
    assert [201, 201] == [one.result(timeout=10).status_code for one in first]
    assert sorted(keys) == sorted(shop.runs)


def test_a_slow_receiver_keeps_no_claim_from_renewal(make_light: Callable[..., Shop]) -> None:
    """A receiver of ``claim_lost`` that takes its time runs on another thread than the one that renews."""
    shop = make_light(lock_timeout=0.6)
    names: list[str] = []
    done = threading.Event()

    @shop.app.post("/lost")
    @shop.idempotency.required
    def lost() -> tuple[str, int]:
        shop.execute(sa.update(shop.table).values(fencing_token="somebody else's"))
        done.wait(10)
        return "done", 201

    from flask_idempotency import signals

    def receive(sender: Any, **fields: Any) -> None:
        names.append(threading.current_thread().name)
        done.set()

    signals.claim_lost.connect(receive, shop.app)
    assert 201 == shop.client.post("/lost", headers=headers(new_key())).status_code
    assert ["flask-idempotency-chores"] == names


def test_a_cookie_does_not_change_the_scope(light: Shop) -> None:
    """A retry that brings a cookie with the account's id, which the first answer set, is the same caller's."""
    account, key = "3f1c2b7e-9a54-4a0e-8f6e-0d5e6a1b2c3d", new_key()
    client = light.client
    client.post("/charges", json={"amount": 1}, headers=headers(key, account))
    client.set_cookie("last_account", account)
    retry = client.post("/charges", json={"amount": 1}, headers=headers(key, account))
    assert "true" == retry.headers["Idempotent-Replay"]


SECRET = "sk_live_51H8secret"


@pytest.mark.parametrize(
    ("loader", "sent", "query"),
    [
        (lambda: request.authorization.username, f"Basic {base64.b64encode(f'{SECRET}:'.encode()).decode()}", ""),
        (lambda: request.authorization.parameters["token"], f'Token token="{SECRET}"', ""),
        (lambda: request.args["api_key"], "Basic eDp5", f"?api_key={SECRET}"),
        (lambda: request.headers["X-Acme-Token"], "Basic eDp5", ""),
    ],
)
def test_a_credential_is_not_stored(light: Shop, loader: Any, sent: str, query: str) -> None:
    """A scope that is the request's credential is kept as its hash, wherever the credential stands."""
    light.idempotency.scope_loader(loader)
    answer = light.client.post(
        f"/charges{query}",
        json={"amount": 1},
        headers={"Idempotency-Key": new_key(), "Authorization": sent, "X-Acme-Token": SECRET},
    )
    assert 201 == answer.status_code
    assert ["~hash:"] == [row["scope"][:6] for row in light.rows()]


class Timeout(BaseException):
    """As gevent's."""


def deadline(view: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(view)
    def limited(*args: Any, **kwargs: Any) -> Any:
        try:
            return view(*args, **kwargs)
        except Timeout:
            return {"error": "slow"}, 504

    return limited


@pytest.mark.scenario(66)
def test_a_crash_that_a_decorator_answers(light: Shop) -> None:
    """A time-out in the view is a crash, also when a decorator above makes an answer of it: nothing is released."""

    @light.app.post("/slow")
    @deadline
    @light.idempotency.required
    def slow() -> Any:
        light.runs.append(1)
        raise Timeout

    key = new_key()
    assert [504, 409, 409] == [light.client.post("/slow", headers=headers(key)).status_code for _ in range(3)]
    assert 1 == len(light.runs)
    assert ["in_progress"] == [row["status"] for row in light.rows()]


def test_an_answer_while_the_view_runs(light: Shop) -> None:
    """Where a decorator answers while the view goes on in a thread, the claim lasts until the view has returned."""
    end = threading.Event()
    threads: list[threading.Thread] = []

    def impatient(view: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(view)
        def limited() -> Any:
            started = threading.Event()

            @copy_current_request_context
            def run() -> None:
                started.set()
                view()

            threads.append(threading.Thread(target=run))
            threads[-1].start()
            started.wait(10)
            until(lambda: light.runs)
            return {"error": "slow"}, 504

        return limited

    @light.app.post("/slow")
    @impatient
    @light.idempotency.required
    def slow() -> Any:
        light.runs.append(1)
        end.wait(10)
        return "done"

    key = new_key()
    assert 504 == light.client.post("/slow", headers=headers(key)).status_code
    assert ["in_progress"] == [row["status"] for row in light.rows()]
    end.set()
    threads[0].join(10)
    assert [] == light.rows()
    assert 1 == len(light.runs)


def test_a_nested_request_on_a_copied_environ(light: Shop) -> None:
    """A request that a view makes on a copy of its own environ has a fingerprint of its own."""

    @light.app.post("/pay/<int:amount>")
    @light.idempotency.optional
    def pay(amount: int) -> Any:
        inner = current_app.test_client().post(
            "/charges", json={"amount": amount}, environ_base=dict(request.environ), headers=headers("sub-key-0001")
        )
        return {"sub": inner.get_json()}, inner.status_code

    statuses = [
        light.client.post(f"/pay/{amount}", json={"note": "x"}, headers=headers(new_key())).status_code
        for amount in (100, 100, 900)
    ]
    assert [201, 201, 422] == statuses
    assert [{"amount": 100}] == light.runs


def test_batches_on_copied_environs(light: Shop) -> None:
    """Sub-requests that are dispatched on copies of a batch's environ hold claims of their own."""

    @light.app.post("/number")
    @light.idempotency.required
    def number() -> Any:
        light.runs.append(1)
        return {"number": len(light.runs)}, 201

    @light.app.post("/batch")
    def batch() -> Any:
        answers = []
        for key in ("sub-key-0001", "sub-key-0002"):
            environ = dict(request.environ, PATH_INFO="/number", HTTP_IDEMPOTENCY_KEY=key)
            with light.app.request_context(environ):
                answers.append(light.app.full_dispatch_request().get_json()["number"])
        return answers

    sent = {"X-Tenant": "acme"}
    assert [[1, 2], [1, 2]] == [light.client.post("/batch", headers=sent).json for _ in range(2)]
    assert 2 == len(light.rows())


def test_another_app_on_the_same_environ(make_light: Callable[..., Shop], tmp_path: Any) -> None:
    """A guarded view that calls another app with the extension, on its own environ, is recorded all the same."""
    outer, inner = make_light(), make_shop(f"sqlite:///{tmp_path / 'inner.sqlite'}")

    @inner.app.post("/outer")
    @inner.idempotency.required
    def within() -> Any:
        return "within", 201

    @outer.app.post("/outer")
    @outer.idempotency.required
    def around() -> Any:
        outer.runs.append(1)
        body = b"".join(inner.app.wsgi_app(request.environ, lambda *_: None))
        return body.decode(), 201

    key = new_key()
    answers = [outer.client.post("/outer", headers=headers(key)) for _ in range(2)]
    assert [b"within", b"within"] == [one.data for one in answers]
    assert 1 == len(outer.runs)


def test_a_stream_that_nobody_closes(make_light: Callable[..., Shop]) -> None:
    """A stream that is let go of without an end completes its key without an answer, and is not renewed for ever."""
    shop = make_light(lock_timeout=0.5)

    @shop.app.post("/stream")
    @shop.idempotency.required
    def stream() -> Response:
        shop.runs.append(1)
        return Response(one for one in (b"a", b"b"))

    inner, seen = shop.app.wsgi_app, []

    def careless(environ: Any, start_response: Any) -> Any:
        answer = inner(environ, start_response)
        if not seen:
            seen.append(1)
            del answer
            raise RuntimeError("metrics are down")
        return answer

    shop.app.wsgi_app = careless  # type: ignore[method-assign]
    key = new_key()
    with events(shop.app) as happened:
        with pytest.raises(RuntimeError):
            shop.client.post("/stream", headers=headers(key))
        until(lambda: [row["status"] for row in shop.rows()] == ["completed"])
        until(lambda: len(happened) == 2)
    assert ["record_failed", "executed"] == [name for name, _ in happened]
    retry = shop.client.post("/stream", headers=headers(key))
    assert (409, "record-unavailable") == (retry.status_code, retry.json["type"].rpartition(":")[2])
    assert 1 == len(shop.runs)
    assert not any(one.claim.key == key for one in heartbeat._live.values())


@pytest.mark.scenario(54)
def test_inert_above_another_decorator(light: Shop) -> None:
    """A guard above a decorator above the route guards nothing, and is said to."""

    def logged(view: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(view)
        def logging() -> Any:
            return view()

        return logging

    @light.idempotency.required
    @logged
    @light.app.post("/inert")
    def inert() -> str:
        return "unguarded"

    light.app.testing = True
    with pytest.raises(ConfigurationError, match="without its guard"):
        light.client.post("/inert")


def test_no_secret_in_the_log(postgres_url: str, caplog: pytest.LogCaptureFixture) -> None:
    """When the database refuses an answer, the log and the signal quote nothing of it."""
    shop = make_shop(postgres_url)

    @shop.app.post("/token")
    @shop.idempotency.required
    def token() -> Any:
        return Response("x", 201, headers={"X-New-Api-Token": SECRET, "X-Bad": "a\0b"})

    with events(shop.app) as seen:
        shop.app.test_client().post("/token", headers=headers(new_key()))
    assert "record_failed" in [name for name, _ in seen]
    assert SECRET not in caplog.text
    assert SECRET not in str(seen)


class Secure(MethodView):
    """Checks credentials in ``dispatch_request``, below a guard in ``decorators``."""

    def dispatch_request(self, **kwargs: Any) -> Any:
        return super().dispatch_request(**kwargs)

    def post(self) -> Any:
        return "secret", 201


class TokenRequired:
    """A decorator that is a class."""

    def __init__(self, view: Callable[..., Any]) -> None:
        self.view = view
        self.__name__ = view.__name__

    def __call__(self) -> Any:
        return self.view()


def secret() -> Any:
    return "secret", 201


@pytest.mark.parametrize("below", ["dispatch_request", "partial", "class"])
def test_last_resort_above_what_may_authenticate(light: Shop, below: str) -> None:
    """Without a loader, a guard above anything that may check credentials turns its callers away."""
    light.idempotency.loader = None
    required = light.idempotency.required
    if below == "dispatch_request":
        view = type("Guarded", (Secure,), {"decorators": [required]}).as_view("secret")
    elif below == "partial":
        view = required(functools.partial(lambda checked: secret(), "checked"))
    else:
        view = required(TokenRequired(secret))
    light.app.add_url_rule("/secret", "secret", view, methods=["POST"])
    sent = {"Authorization": "Bearer abc", "Idempotency-Key": new_key()}
    assert 401 == light.client.post("/secret", headers=sent).status_code


def test_a_hooks_exception_is_never_recorded(light: Shop) -> None:
    """A 500 that Flask makes of a failing hook is released, whatever ``record`` says of answers."""

    @light.app.after_request
    def fails_once(response: Response) -> Response:
        if len(light.runs) == 1 and request.path == "/work":
            raise RuntimeError("once")
        return response

    @light.app.post("/work")
    @light.idempotency.required(record=lambda response: True)
    def work() -> Any:
        light.runs.append(1)
        return "done", 201

    key = new_key()
    assert [500, 201, 201] == [light.client.post("/work", headers=headers(key)).status_code for _ in range(3)]
    assert 2 == len(light.runs)


def test_a_status_that_is_none(shop: Shop) -> None:
    """An answer whose status no row could hold completes the key without it, and poisons nothing."""

    @shop.app.post("/weird")
    @shop.idempotency.required
    def weird() -> Response:
        shop.runs.append(1)
        return Response("x", status="weird")

    key = new_key()
    shop.client.post("/weird", headers=headers(key))
    retry = shop.client.post("/weird", headers=headers(key))
    assert (409, "record-unavailable") == (retry.status_code, retry.json["type"].rpartition(":")[2])
    assert 1 == len(shop.runs)


def test_paths_that_are_no_text(light: Shop) -> None:
    """Two paths that differ in bytes which are no UTF-8 are two requests."""

    @light.app.post("/items/<name>")
    @light.idempotency.required
    def item(name: str) -> Any:
        return "done", 201

    sent = headers(new_key())
    # As a server hands on %FF and %FE; the test client's own paths are texts.
    environs = [{"PATH_INFO": f"/items/{byte}"} for byte in ("\xff", "\xff", "\xfe")]
    statuses = [light.client.post("/items/x", headers=sent, environ_overrides=one).status_code for one in environs]
    assert [201, 201, 422] == statuses


def test_containers_are_no_ids() -> None:
    """A key or a scope that is a list or a dictionary is an error of the app's callable."""
    app = Flask("ids")
    app.testing = True
    app.config["SQLALCHEMY_DATABASE_URI"] = "sqlite://"
    idempotency = Idempotency(app, sa.create_engine("sqlite://"))

    @app.post("/list")
    @idempotency.required(key=lambda: ["a"], scope="tests")
    def listed() -> str:
        return "done"

    with pytest.raises(TypeError, match="not list"):
        app.test_client().post("/list")


@pytest.mark.scenario(30)
def test_takeover_of_an_older_fingerprint(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim that an older release left behind is compared by its own version, and can be taken over."""
    crash = [True]

    @shop.app.post("/work")
    @shop.idempotency.required
    def work() -> Any:
        if crash.pop():
            crash.append(False)
            raise SystemExit
        return "done", 201

    key = new_key()
    with pytest.raises(SystemExit):
        shop.client.post("/work", headers=headers(key))
    monkeypatch.setitem(fingerprint.VERSIONS, 0, lambda message: message.method.encode().hex().rjust(64, "0"))
    older = {"fingerprint_version": 0, "request_fingerprint": b"POST".hex().rjust(64, "0")}
    shop.execute(sa.update(shop.table).values(older))
    shop.shift(40)
    crash[:] = [False]
    assert [201, 201] == [shop.client.post("/work", headers=headers(key)).status_code for _ in range(2)]
    assert [2] == [row["attempts"] for row in shop.rows()]
