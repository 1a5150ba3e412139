"""``flask_idempotency.contrib.console``: pages for operators, and who may see and do what there."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import sqlalchemy as sa
from flask import Blueprint, Flask, Response, abort, g, redirect, request
from flask.testing import FlaskClient
from itsdangerous import URLSafeTimedSerializer
from werkzeug.test import TestResponse

from flask_idempotency import Idempotency
from flask_idempotency.claim import Asking
from flask_idempotency.contrib.console import addresses, console_blueprint, plots, tokens, views
from flask_idempotency.errors import ConfigurationError
from flask_idempotency.keyring import Keyring
from flask_idempotency.state import get_state
from tests.support.apps import Shop, guard, new_key, send

Make = Callable[..., Shop]

#: What would be active in a page that does not escape it, of characters that a header may hold.
HOSTILE = "</pre><script>alert(1)</script>\"'><img src=x onerror=alert(2)>&amp;"

VOID = {"area", "base", "br", "col", "hr", "img", "input", "link", "meta", "rect"}


class Document(HTMLParser):
    """A page, read strictly.

    :ivar tags: each tag with its attributes.
    :ivar wrong: what is wrong with the page: tags that do not match, ids that come twice, labels of nothing.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.wrong: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        ids = [one["id"] for _, one in self.tags if "id" in one]
        self.wrong += [f"id {one} twice" for one in ids if ids.count(one) > 1]
        for _, one in self.tags:
            named = " ".join(one.get(name) or "" for name in ("for", "aria-labelledby", "aria-describedby")).split()
            self.wrong += [f"nothing has the id {name}" for name in named if name not in ids]
        labels = [one["for"] for tag, one in self.tags if tag == "label"]
        for tag, one in self.tags:
            field = tag == "select" or (tag == "input" and one.get("type") != "hidden")
            self.wrong += [f"no label for {one}"] if field and one.get("id") not in labels else []
            self.wrong += [f"no scope: {one}"] if tag == "th" and not one.get("scope") else []
            # The policy forbids them, and a page that has one would lose it.
            self.wrong += [f"{tag} has {name}" for name in one if name == "style" or name.startswith("on")]
            self.wrong += [f"a {tag}"] if tag in ("script", "style", "iframe", "base") else []
        self.wrong += [f"{self._open} are not closed"] if self._open else []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self._open.pop() != tag:
            self.wrong.append(f"</{tag}> closes nothing")

    def every(self, tag: str) -> list[dict[str, str | None]]:
        """The attributes of each such tag."""
        return [one for name, one in self.tags if name == tag]


@pytest.fixture
def console(make_light: Make) -> Callable[..., Shop]:
    """A function that makes a shop with a console at ``/ops``, which everybody may see; takes the console's options."""

    def build(config: dict[str, Any] | None = None, **options: Any) -> Shop:
        shop = make_light(**(config or {}))
        shop.app.register_blueprint(console_blueprint(**{"authorize": lambda: True, "url_prefix": "/ops", **options}))
        return shop

    return build


def get(shop: Shop, path: str, status: int = 200, client: FlaskClient | None = None, **options: Any) -> str:
    """A page of the console, which has to be well made."""
    answer = (client or shop.client).get(f"/ops{path}", **options)
    assert status == answer.status_code, answer.text
    assert [] == Document(answer.text).wrong
    return answer.text


def at(key: str, scope: str = "acme") -> str:
    """The path of a key's page."""
    return f"/keys/{addresses.packed(scope)}/{addresses.packed(key)}"


def listed(text: str) -> list[str]:
    """The keys of a list, in its order."""
    return re.findall(r'<th scope="row"[^>]*>\s*<a href="[^"]+"><bdi>([^<]*)</bdi>', text)


def put(shop: Shop, key: str, scope: str = "acme", **options: Any) -> None:
    """A claim that nobody renews or ends."""
    values = {"lock_timeout": 30.0, "stale_policy": "reexecute", "path": "/charges", **options}
    asking = Asking(
        scope=scope, key=key, method="POST", fingerprint="f" * 64, fingerprint_version=1, token=new_key(),
        retention=86_400.0, **values,
    )  # fmt: skip
    get_state(shop.app).store.claim(asking)


PAGES = ("/", "/endpoints", "/keys", "/live", "/stale", "/held", at("k"))


def narrow(shop: Shop, *lacking: str) -> FlaskClient:
    """A client of an app with a console, over a shop's store without some of its methods."""

    class Narrow:
        def __getattr__(self, name: str) -> Any:
            if name in lacking:
                raise AttributeError(name)
            return getattr(get_state(shop.app).store, name)

    app = Flask("narrow")
    app.config["IDEMPOTENCY_STORE"] = Narrow()
    Idempotency(app)
    app.register_blueprint(console_blueprint(authorize=lambda: True))
    return app.test_client()


def hold(shop: Shop) -> str:
    """A key that is held."""
    guard(shop, lambda: ("failed", 500), "/held", on_error="hold")
    key = new_key()
    assert 500 == send(shop, key, "/held").status_code
    return key


def form_of(text: str) -> dict[str, str]:
    """The hidden fields of a page's form."""
    fields = [one for one in Document(text).every("input") if one.get("type") == "hidden"]
    return {str(one["name"]): str(one["value"]) for one in fields}


def statuses(shop: Shop) -> list[str]:
    return [row["status"] for row in shop.rows()]


class TestAuthorize:
    """Who may see it."""

    @pytest.mark.parametrize("options", [{}, {"authorize": None}, {"authorize": True}])
    def test_no_console_without_a_function(self, options: dict[str, Any]) -> None:
        """A console can't be made without a function that says who may see it."""
        with pytest.raises(ConfigurationError, match="authorize"):
            console_blueprint(**options)

    @pytest.mark.parametrize("option", ["writable", "bodies"])
    def test_switches_are_booleans(self, option: str) -> None:
        """A text, which may come from an environment variable and say "false", switches nothing on."""
        with pytest.raises(ConfigurationError, match=option):
            console_blueprint(authorize=lambda: True, **{option: "false"})

    def test_asked_at_every_address(self, console: Callable[..., Shop]) -> None:
        """The function is asked for every address and method of the blueprint, and what it refuses is not served."""
        asked: list[str | None] = []

        def nobody() -> bool:
            asked.append(request.endpoint)
            return False

        shop = console(authorize=nobody, writable=True, bodies=True)
        shop.charge(new_key())
        rules = [one for one in shop.app.url_map.iter_rules() if one.endpoint.startswith("idempotency_console.")]
        assert 10 <= len(rules)
        key, texts = shop.rows()[0]["key"], {"filename": "console.css"}
        texts |= {"scope": addresses.packed("acme"), "key": addresses.packed(key)}
        for rule in rules:
            with shop.app.test_request_context():
                path = shop.app.url_map.bind("localhost").build(rule.endpoint, {n: texts[n] for n in rule.arguments})
            for method in rule.methods or ():
                answer = shop.client.open(path, method=method)
                assert (403, 1) == (answer.status_code, len(asked)), (method, path)
                asked.clear()
                assert key not in answer.text
        assert ["completed"] == statuses(shop)

    @pytest.mark.parametrize(
        ("answer", "status"),
        [
            (lambda: True, 200),
            (lambda: False, 403),
            (lambda: None, 403),
            (lambda: "", 403),
            (lambda: redirect("/login"), 302),
            (lambda: ("who are you?", 401, {"WWW-Authenticate": "Basic"}), 401),
            (lambda: abort(404), 404),
            # Neither yes nor no: an object that is true in Python, among them an answer of nobody's.
            (lambda: "false", 500),
            (lambda: 1, 500),
        ],
    )
    def test_what_it_answers(self, console: Callable[..., Shop], answer: Callable[[], Any], status: int) -> None:
        """Only True opens the console; a response is the answer, and anything else that is true is a mistake."""
        shop = console(authorize=answer)
        for path in ("/ops", "/ops/keys", "/ops/static/console.css"):
            with shop.client.get(path) as got:
                assert status == got.status_code

    def test_coroutine_function(self, console: Callable[..., Shop]) -> None:
        """A coroutine function is awaited: its object would be true."""

        async def authorize() -> bool:
            return request.args.get("who") == "me"

        shop = console(authorize=authorize)
        assert [403, 200] == [shop.client.get(f"/ops/keys?who={who}").status_code for who in ("you", "me")]

    def test_runs_after_the_apps_own_hooks(self, console: Callable[..., Shop]) -> None:
        """What a hook of the app has found out about the caller is there."""
        shop = console(authorize=lambda: g.get("user") == "root")

        @shop.app.before_request
        def load() -> None:
            g.user = request.headers.get("X-User")

        assert [403, 200] == [
            shop.client.get("/ops/", headers={"X-User": user}).status_code for user in ("guest", "root")
        ]


class TestHeaders:
    """What all answers carry."""

    @pytest.mark.parametrize(
        ("path", "status"),
        [("/ops", 200), ("/ops/held", 200), ("/ops/static/console.css", 200), ("/ops/keys/x/y", 404)],
    )
    def test_strict_headers(self, console: Callable[..., Shop], path: str, status: int) -> None:
        """Nothing may run or be framed, nothing be stored or guessed, on pages, files and refusals."""
        shop = console()
        with shop.client.get(path) as answer:
            pass
        policy = "default-src 'none'; style-src 'self'; img-src 'self'; form-action 'self'; frame-ancestors 'none'; "
        assert (status, policy + "base-uri 'none'") == (answer.status_code, answer.headers["Content-Security-Policy"])
        assert ("no-store", "nosniff", "same-origin") == tuple(
            answer.headers[name] for name in ("Cache-Control", "X-Content-Type-Options", "Referrer-Policy")
        )

    def test_on_refusals(self, console: Callable[..., Shop]) -> None:
        """A 403 carries them too, and the app's other pages do not."""
        shop = console(authorize=lambda: False)
        assert "no-store" == shop.client.get("/ops/").headers["Cache-Control"]
        assert "Content-Security-Policy" not in shop.charge(new_key()).headers

    def test_session_is_left_alone(self, console: Callable[..., Shop]) -> None:
        """Reading sets no cookie, and is not answered by one."""
        shop = console(writable=True)
        shop.charge(new_key())
        for path in ("/", "/keys", at(shop.rows()[0]["key"])):
            answer = shop.client.get(f"/ops{path}")
            assert (None, None) == (answer.headers.get("Set-Cookie"), answer.headers.get("Vary"))


class TestKeys:
    """The lists."""

    @pytest.fixture
    def shop(self, console: Callable[..., Shop]) -> Shop:
        """Two recorded answers of two tenants, a claim past its lease, a live one, and a held one."""
        shop = console()
        guard(shop, lambda: ("failed", 500), "/held", on_error="hold")
        put(shop, "gone-1", path="/orders/1")
        shop.shift(60)
        put(shop, "live-1", scope="other/50%é", path="/orders/2")
        shop.charge("paid-1234")
        shop.charge("paid-5678", tenant="other/50%é")
        assert 500 == send(shop, "held-1234", "/held").status_code
        return shop

    def test_filters(self, shop: Shop) -> None:
        """Each filter leaves what it says, and the form shows it again."""
        cases = {
            "": ["held-1234", "paid-5678", "paid-1234", "live-1", "gone-1"],
            "?scope=acme": ["held-1234", "paid-1234", "gone-1"],
            "?scope=other%2F50%25%C3%A9": ["paid-5678", "live-1"],
            "?scope=acm": [],
            "?status=completed": ["paid-5678", "paid-1234"],
            "?status=in_progress": ["live-1", "gone-1"],
            "?key=paid-": ["paid-5678", "paid-1234"],
            "?key=%25": [],
            "?path=%2Forders": ["live-1", "gone-1"],
            "?stale=1": ["gone-1"],
            "?status=completed&scope=acme&key=paid": ["paid-1234"],
        }
        for query, found in cases.items():
            text = get(shop, f"/keys{query}")
            assert found == listed(text), query
            inputs = Document(text).every("input")
            shown = {one.get("name"): one.get("value") for one in inputs}
            asked = dict(part.split("=") for part in query[1:].split("&")) if query else {}
            for name in ("scope", "key", "path"):
                assert unquote(asked.get(name, "")) == shown[name]
            assert (["stale"] if "stale" in asked else []) == [one["name"] for one in inputs if "checked" in one]
            chosen = [one["value"] for one in Document(text).every("option") if "selected" in one]
            assert ([asked["status"]] if "status" in asked else []) == chosen

    def test_wrong_filters(self, shop: Shop) -> None:
        """What can't be is said, as the client's error, and nothing is listed."""
        for query in ("?status=lost", *(f"?before={one}" for one in ("x", "²", "0", "-1", 2**63, "9" * 5_000))):
            text = get(shop, f"/keys{query}", 400)
            assert 'role="alert"' in text
            assert [] == listed(text)

    def test_live_stale_and_held(self, shop: Shop) -> None:
        """Claims alive, those past their lease, and keys that wait for a person have lists of their own."""
        assert ["live-1"] == listed(get(shop, "/live"))
        assert ["gone-1"] == listed(get(shop, "/stale"))
        assert ["held-1234"] == listed(get(shop, "/held"))

    def test_paging(self, console: Callable[..., Shop], monkeypatch: pytest.MonkeyPatch) -> None:
        """Pages go on where the last one ended, with the same filters, and leave out and repeat nothing."""
        monkeypatch.setattr(views, "PAGE", 3)
        shop = console()
        for number in range(7):
            put(shop, f"key-{number}", scope="a&b")
            put(shop, f"other-{number}")
        found, path, pages = list[str](), "/keys?scope=a%26b", 0
        while path:
            pages += 1
            text = get(shop, path)
            found += listed(text)
            following = re.search(r'href="/ops([^"]+)" rel="next"', text)
            path = following[1].replace("&amp;", "&") if following else ""
        assert (3, [f"key-{number}" for number in range(6, -1, -1)]) == (pages, found)
        assert ">Latest</a>" in text

    def test_paging_of_live_claims(self, console: Callable[..., Shop], monkeypatch: pytest.MonkeyPatch) -> None:
        """Live claims are found behind more than a page of claims past their lease, and go on on a next page."""
        monkeypatch.setattr(views, "PAGE", 3)
        shop = console()
        for number in range(5):
            put(shop, f"live-{number}")
        for number in range(8):
            put(shop, f"gone-{number}", lock_timeout=1.0)
        shop.shift(5)
        text = get(shop, "/live")
        assert ["live-4", "live-3", "live-2"] == listed(text)
        following = re.search(r'href="/ops(/live\?before=\d+)" rel="next"', text)
        assert following is not None
        assert ["live-1", "live-0"] == listed(get(shop, following[1]))


class TestKey:
    """One key."""

    def test_addresses(self, console: Callable[..., Shop]) -> None:
        """Whatever a scope holds, the list leads to its key's page, and that to the scope's list."""
        shop = console()
        for number, scope in enumerate(["acme", "a/b", "..", "%2e", "é ü", "a\nb", "~x", "?&#", "x" * 255, "日本/%"]):
            put(shop, f"k/%2F?#{number}", scope=scope)
            links = [str(one["href"]) for one in Document(get(shop, "/keys")).every("a")]
            text = get(shop, next(one for one in links if "/ops/keys/" in one).removeprefix("/ops"))
            back = next(str(one["href"]) for one in Document(text).every("a") if "?scope=" in str(one["href"]))
            assert [f"k/%2F?#{number}"] == listed(get(shop, back.removeprefix("/ops")))

    def test_no_other_addresses(self, console: Callable[..., Shop]) -> None:
        """Each key has one address; what is no such address is a 404, and no error."""
        shop = console()
        put(shop, "a", scope="a")
        get(shop, at("a", "a"))
        for segment in ("YQ==", "YQ=", "YR", "Y", "%C3%A9", "a+b_", "_w", "AA", "YQ%20", "Y.Q", " "):
            get(shop, f"/keys/{segment}/YQ", 404)
            get(shop, f"/keys/YQ/{segment}", 404)

    def test_timeline(self, console: Callable[..., Shop]) -> None:
        """Claim, takeovers, signs of life, recording and retention are there, with their times in order."""
        shop = console()

        def view() -> str:
            shop.idempotency.step("pay", lambda: {"id": 7})
            shop.runs.append(1)
            if len(shop.runs) == 1:
                raise SystemExit
            return "done"

        guard(shop, view)
        key = new_key()
        with pytest.raises(SystemExit):
            send(shop, key)
        shop.shift(60)
        text = get(shop, at(key))
        assert "The next retry takes it over." in text
        assert 200 == send(shop, key).status_code
        text = get(shop, at(key))
        happened = re.findall(r'<span class="what">([^<]+)</span>', text)
        assert ["Claimed for the first time", "Last sign of life", "Completed", "Retention ends"] == happened
        times = re.findall(r'<li><span class="when"><time datetime="([^"]+)"', text)
        assert sorted(times) == times
        assert 4 == len(times)
        assert "2: the first, and 1 by takeover" in text
        assert "<bdi>pay</bdi>" in text
        assert "Recorded with status 200." in text
        # The result of a step is the app's data, as a body is.
        assert "7" not in re.findall(r"<ul class=\"steps\">.*?</ul>", text, re.S)[0]

    @pytest.mark.parametrize(("policy", "says"), [("reexecute", "takes it over"), ("reject", "until a person settles")])
    def test_what_happens_next(self, console: Callable[..., Shop], policy: str, says: str) -> None:
        """A live claim, and what a retry gets once its lease is over."""
        shop = console()
        put(shop, "claimed-1", stale_policy=policy)
        text = get(shop, at("claimed-1"))
        assert "The claim is alive" in text
        assert "nothing ends it" in text
        assert "new again" not in text
        shop.shift(60)
        text = get(shop, at("claimed-1"))
        assert says in text
        assert ("Retention ends" in text) is (policy == "reexecute")

    def test_everything_is_text(self, console: Callable[..., Shop]) -> None:
        """Scope, path, headers, steps and body that are markup are shown as text on every page."""
        shop = console(bodies=True, writable=True)
        scope, key = f"{HOSTILE}\u202e\x1b[2J", HOSTILE.replace(",", "")[:60]

        def view(rest: str) -> Response:
            shop.idempotency.step(HOSTILE, lambda: HOSTILE)
            return Response(HOSTILE, headers={"X-Note": HOSTILE}, mimetype="text/html")

        guarded = shop.idempotency.required(scope=lambda: scope)(view)
        shop.app.add_url_rule("/x/<path:rest>", "x", guarded, methods=["POST"])
        sent = shop.client.post(f"/x/{HOSTILE}", headers={"Idempotency-Key": json.dumps(key)})
        assert 200 == sent.status_code, sent.text
        for path in ("/keys", f"/keys?key=&path={HOSTILE[:3]}%22", at(key, scope), f"{at(key, scope)}/release"):
            text = get(shop, path)  # which has no script, no handler, and no tag that does not match
            assert "<img" not in text
            assert not {"\u202e", "\x1b"} & set(text)
        assert "\\u202e\\x1b[2J" in text

    def test_apps_environment_has_no_part(self, console: Callable[..., Shop]) -> None:
        """An app whose templates have other delimiters, and are not escaped, changes nothing."""
        shop = console()
        shop.app.jinja_options = {"variable_start_string": "[[", "variable_end_string": "]]"}
        shop.app.select_jinja_autoescape = lambda filename: False  # type: ignore[method-assign]
        put(shop, "<b>key</b>")
        assert ["&lt;b&gt;key&lt;/b&gt;"] == listed(get(shop, "/keys"))


class TestBodies:
    """Recorded bodies: seen where that is allowed, and never rendered."""

    def record(self, shop: Shop, body: Any, kind: str, **headers: str) -> str:
        """A key with that body recorded."""
        guard(shop, lambda: Response(body, headers=headers, content_type=kind))
        key = new_key()
        assert 200 == send(shop, key).status_code
        return key

    def test_not_shown(self, console: Callable[..., Shop]) -> None:
        """Without the option there is neither the body nor an address for it; its size is said."""
        shop = console()
        key = self.record(shop, "a secret thing", "text/plain")
        text = get(shop, at(key))
        assert "secret" not in text
        assert "14 bytes" in text
        assert 404 == shop.client.get(f"/ops{at(key)}/body").status_code

    def test_download(self, console: Callable[..., Shop]) -> None:
        """A download is the bytes as they are, an attachment of no type that a browser would show."""
        shop = console(bodies=True)
        key = self.record(shop, b"<html>\xff\x00", "text/html")
        assert "<pre" not in get(shop, at(key))  # no UTF-8
        answer = shop.client.get(f"/ops{at(key)}/body")
        assert b"<html>\xff\x00" == answer.data
        assert ("application/octet-stream", "attachment; filename=body.bin", "nosniff") == tuple(
            answer.headers[name] for name in ("Content-Type", "Content-Disposition", "X-Content-Type-Options")
        )

    def test_text(self, console: Callable[..., Shop]) -> None:
        """Text is shown in its own charset, up to a limit."""
        shop = console(bodies=True)
        key = self.record(shop, "schön\n\x07".encode("latin-1") + b"x" * 70_000, "text/plain; charset=latin-1")
        text = get(shop, at(key))
        assert "schön\n\\x07xx" in text
        assert "The first 65536 characters" in text
        assert text.count("x") < 66_000

    @pytest.mark.parametrize(("body", "shown"), [(b'{"a": 1}', True), (b"", False)])
    def test_coded(self, console: Callable[..., Shop], body: bytes, shown: bool) -> None:
        """What is stored in a content coding is shown without it; what is not in its coding is a download alone."""
        import gzip

        shop = console(bodies=True)
        data = gzip.compress(body or b"{}")[: None if shown else 12]
        key = self.record(shop, data, "application/json", **{"Content-Encoding": "gzip"})
        assert ("{&#34;a&#34;: 1}" in get(shop, at(key))) is shown
        assert data == shop.client.get(f"/ops{at(key)}/body").data

    def test_in_the_body_store(self, console: Callable[..., Shop], tmp_path: Path) -> None:
        """A body elsewhere can be downloaded, and one that is lost there is said to be."""
        shop = console({"body_store": f"file:{tmp_path}", "max_body": 10}, bodies=True)
        key = self.record(shop, b"y" * 3_000_000, "text/plain")
        assert "3000000 bytes in the body store" in get(shop, at(key))
        assert b"y" * 3_000_000 == shop.client.get(f"/ops{at(key)}/body").data
        for path in tmp_path.iterdir():
            path.unlink()
        assert "is not in the body store" in get(shop, f"{at(key)}/body", 503)

    def test_not_kept(self, console: Callable[..., Shop]) -> None:
        """Where the answer could not be kept, that is said, and there is nothing to download."""
        shop = console({"max_body": 10}, bodies=True)
        key = self.record(shop, b"y" * 100, "text/plain")
        assert "could not be kept" in get(shop, at(key))
        assert 404 == shop.client.get(f"/ops{at(key)}/body").status_code


class TestPlots:
    """The figures."""

    def test_overview(self, console: Callable[..., Shop]) -> None:
        """Numbers by status, outcome and age are drawn, and said in words and in tables beside it."""
        shop = console()
        for _ in range(3):
            shop.charge(new_key())
        counts = {"replays": 10, "conflicts": 2, "mismatches": 1, "early_replays": 6, "late_replays": 3}
        shop.execute(sa.update(shop.table).where(shop.table.c.id == 1).values(counts))
        text = get(shop, "/")
        assert "run the migration" not in text
        assert "replays: 10, conflicts: 2, mismatches: 1." in text
        assert "under 5 s: 6, 5 to 30 s: 1, over 30 s: 3." in text
        assert "in_progress: 0, completed: 3, held: 0, released: 0." in text
        assert '<th scope="row">conflicts</th><td class="number">2</td>' in text
        widths = [int(str(one["width"])) for one in Document(text).every("rect")]
        assert plots.WIDEST == max(widths)
        drawn = plots.plot("x", "x", "x", [("a", 1_000), ("b", 500), ("c", 1), ("d", 0)])
        assert [plots.WIDEST, plots.WIDEST / 2, 2, 0] == [bar.width for bar in drawn.bars]

    def test_endpoints(self, console: Callable[..., Shop]) -> None:
        """Keys and what retries came to are added up by endpoint, the most retried first, all that are shown."""
        shop = console()
        shop.app.add_url_rule("/a", "<b>", shop.idempotency.required(lambda: "x"), methods=["POST"])
        shop.app.add_url_rule("/orders/<int:id>", "order", shop.idempotency.required(lambda id: "x"), methods=["POST"])
        shop.charge(new_key())
        send(shop, new_key(), "/a")
        for number in range(3):
            send(shop, new_key(), f"/orders/{number}")
        orders = shop.table.c.request_path.like("/orders/%")
        shop.execute(sa.update(shop.table).where(orders).values(replays=2, early_replays=1, conflicts=1))
        text = get(shop, "/endpoints")
        names = re.findall(r'<th scope="row" role="rowheader"><bdi>([^<]+)</bdi>', text)
        assert ["order", "&lt;b&gt;", "create_charge"] == names
        row = text.partition("<bdi>order</bdi>")[2].partition("</tr>")[0]
        assert ["3", "3", "6", "3", "0", "3", "0"] == re.findall(r'class="number">(\d+)<', row)
        assert "order: 9, &lt;b&gt;: 0, create_charge: 0." in text

    def test_older_table(self, console: Callable[..., Shop]) -> None:
        """A table without the columns of counts has its figures, counts of zero, and a word on the migration."""
        shop = console()
        shop.charge(new_key())
        for name in ("replays", "conflicts", "mismatches", "early_replays", "late_replays"):
            shop.execute(sa.text(f"ALTER TABLE idempotency_keys DROP COLUMN {name}"))
        for path in ("/", "/endpoints"):
            assert "run the migration" in get(shop, path)
        assert "completed: 1" in get(shop, "/")

    def test_empty(self, console: Callable[..., Shop]) -> None:
        """A table without a row is shown as such on every page."""
        shop = console()
        for path in ("/", "/endpoints", "/keys", "/live", "/stale", "/held"):
            get(shop, path)


class TestRelease:
    """Releasing keys."""

    @pytest.fixture
    def shop(self, console: Callable[..., Shop]) -> Shop:
        """A shop whose console may release."""
        return console(writable=True)

    def post(self, shop: Shop, key: str, client: FlaskClient | None = None, **fields: str) -> TestResponse:
        """Open the form, and send it."""
        client = client or shop.client
        form = form_of(get(shop, f"{at(key)}/release", client=client))
        return client.post(f"/ops{at(key)}/release", data={**form, **fields})

    def test_held(self, shop: Shop) -> None:
        """A held key is released after a page that asks, and its next retry runs."""
        key = hold(shop)
        assert f"{at(key)}/release" in get(shop, at(key))
        assert ["held"] == statuses(shop)
        answer = self.post(shop, key)
        assert (200, []) == (answer.status_code, Document(answer.text).wrong)
        assert "is released" in answer.text
        assert [] == statuses(shop)

    def test_past_its_lease(self, shop: Shop) -> None:
        """So is a claim past its lease, with no box to tick."""
        put(shop, "gone-1", stale_policy="reject")
        shop.shift(60)
        assert "force" not in get(shop, f"{at('gone-1')}/release")
        assert 200 == self.post(shop, "gone-1").status_code
        assert [] == statuses(shop)

    @pytest.mark.scenario(77)
    @pytest.mark.parametrize("alive", [True, False])
    def test_force(self, shop: Shop, alive: bool) -> None:
        """A live claim, and a key with an answer, are only released with the box ticked that says what it means."""
        if alive:
            put(shop, "some-key1")
        else:
            shop.charge("some-key1")
        assert '<label for="force">' in get(shop, f"{at('some-key1')}/release")
        refused = self.post(shop, "some-key1")
        assert (409, 1) == (refused.status_code, len(shop.rows()))
        assert 'role="alert"' in refused.text
        assert "token" in form_of(refused.text)
        assert 200 == self.post(shop, "some-key1", force="yes").status_code
        assert [] == shop.rows()

    def test_changed_meanwhile(self, shop: Shop) -> None:
        """What became another claim since the form was shown is not released by it, force or not."""
        put(shop, "some-key1", lock_timeout=1.0)
        client = shop.client
        form = form_of(get(shop, f"{at('some-key1')}/release", client=client))
        shop.execute(sa.update(shop.table).values(attempts=2))
        answer = client.post(f"/ops{at('some-key1')}/release", data={**form, "force": "yes"})
        assert 409 == answer.status_code
        assert "has changed" in answer.text
        assert ["in_progress"] == statuses(shop)

    def test_signs_of_life_change_nothing(self, shop: Shop) -> None:
        """The form for a live claim can be sent, though its holder goes on giving signs of life."""
        put(shop, "some-key1")
        client = shop.client
        form = form_of(get(shop, f"{at('some-key1')}/release", client=client))
        shop.execute(sa.text("UPDATE idempotency_keys SET locked_at = strftime('%Y-%m-%d %H:%M:%f', 'now') || '000'"))
        assert 200 == client.post(f"/ops{at('some-key1')}/release", data={**form, "force": "yes"}).status_code

    def test_sent_twice(self, shop: Shop) -> None:
        """A form that is sent again releases nothing more."""
        key, client = hold(shop), shop.client
        form = form_of(get(shop, f"{at(key)}/release", client=client))
        answers = [client.post(f"/ops{at(key)}/release", data=form).status_code for _ in range(2)]
        assert [200, 404] == answers
        assert 500 == send(shop, key, "/held").status_code  # held again
        assert 409 == client.post(f"/ops{at(key)}/release", data=form).status_code
        assert ["held"] == statuses(shop)

    def test_kept_for_its_steps(self, shop: Shop) -> None:
        """A key with steps stays, as released, and its page offers no release any more."""

        def view() -> Any:
            shop.idempotency.step("pay", lambda: 1)
            return "failed", 500

        guard(shop, view, on_error="hold")
        key = new_key()
        send(shop, key)
        assert 200 == self.post(shop, key).status_code
        assert ["released"] == statuses(shop)
        assert f"{at(key)}/release" not in get(shop, at(key))
        assert "<form" not in get(shop, f"{at(key)}/release")

    def test_past_its_retention(self, shop: Shop) -> None:
        """A key that is new again is not there to be released."""
        shop.charge("some-key1")
        shop.shift(100_000)
        assert f"{at('some-key1')}/release" not in get(shop, at("some-key1"))
        assert 404 == self.post(shop, "some-key1", force="yes").status_code

    @pytest.mark.parametrize("case", ["none", "made up", "another session", "another key", "too old", "another site"])
    def test_forged(self, shop: Shop, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """A form that this session was not shown for this key, lately, by the console itself, releases nothing."""
        key, client = hold(shop), shop.client
        form, headers = form_of(get(shop, f"{at(key)}/release", client=client)), {}
        if case == "none":
            form = {}
        elif case == "made up":
            signer = URLSafeTimedSerializer("guessed", salt=tokens._SALT)
            form = {"token": signer.dumps(["n", ["acme", key, "held", 1]])}
        elif case == "another session":
            client = shop.client
            get(shop, f"{at(key)}/release", client=client)
        elif case == "another key":
            shop.charge("some-key1")
            form = form_of(get(shop, f"{at('some-key1')}/release", client=client))
        elif case == "too old":
            monkeypatch.setattr(tokens, "MAX_AGE", -1)
        else:
            headers = {"Sec-Fetch-Site": "cross-site"}
        answer = client.post(f"/ops{at(key)}/release", data={**form, "force": "yes"}, headers=headers)
        assert (403, []) == (answer.status_code, Document(answer.text).wrong)
        assert "held" in statuses(shop)

    def test_secret_rotated(self, shop: Shop) -> None:
        """A form that was signed with a secret that is a fallback by now is taken."""
        key, client = hold(shop), shop.client
        form = form_of(get(shop, f"{at(key)}/release", client=client))
        old = shop.app.config["SECRET_KEY"]
        with client.session_transaction() as kept:
            values = dict(kept)
        shop.app.config.update(SECRET_KEY="a new one", SECRET_KEY_FALLBACKS=[old])
        with client.session_transaction() as kept:  # an old Flask does not read what a fallback signed
            kept.update(values)
        assert 200 == client.post(f"/ops{at(key)}/release", data=form).status_code

    def test_no_secret(self, shop: Shop) -> None:
        """An app without a secret key says that it can't sign a form."""
        key = hold(shop)
        shop.app.config["SECRET_KEY"] = None
        assert "SECRET_KEY" in get(shop, f"{at(key)}/release", 501)
        assert 501 == shop.client.post(f"/ops{at(key)}/release", data={"token": "x"}).status_code
        get(shop, at(key))

    def test_read_only(self, console: Callable[..., Shop]) -> None:
        """Where it may only read, there is no address to write to, and nothing that leads to one."""
        shop = console()
        key = hold(shop)
        assert "release" not in get(shop, at(key)).lower().replace("released", "")
        paths = ["/", "/keys", "/live", at(key), f"{at(key)}/release"]
        assert [405, 405, 405, 405, 404] == [shop.client.post(f"/ops{path}").status_code for path in paths]
        assert 404 == shop.client.get(f"/ops{at(key)}/release").status_code
        assert ["held"] == statuses(shop)

    @pytest.mark.parametrize("whole", [True, False])
    def test_under_protect(self, make_light: Make, whole: bool) -> None:
        """A protected app's console needs no key, and is no finding: its form is exempt."""
        shop = make_light()
        blueprint = console_blueprint(authorize=lambda: True, writable=True, url_prefix="/ops")
        shop.app.register_blueprint(blueprint)
        if whole:
            shop.idempotency.protect(shop.app)
        key = hold(shop)
        assert 200 == self.post(shop, key).status_code
        done = shop.app.test_cli_runner().invoke(args=["idempotency", "routes", "--check"])
        assert (0, "") == (done.exit_code, "" if "ops" not in done.output else done.output)

    def test_beside_flask_wtf(self, shop: Shop) -> None:
        """Where Flask-WTF protects all forms of the app, the console's has its token, too."""
        from flask_wtf import CSRFProtect

        CSRFProtect(shop.app)
        key = "gone-1"
        put(shop, key, lock_timeout=1.0)
        shop.shift(60)
        assert 400 == shop.client.post(f"/ops{at(key)}/release").status_code
        assert 200 == self.post(shop, key).status_code
        assert [] == statuses(shop)


class TestTrouble:
    """Stores that can't answer, and rows that can't be read."""

    def test_unreadable_row(self, console: Callable[..., Shop]) -> None:
        """A corrupt row is shown as such, in lists and on its own pages, and hides no other."""
        shop = console(bodies=True, writable=True)
        shop.charge("good-key1")
        shop.charge("lost-key1")
        shop.execute(sa.update(shop.table).where(shop.table.c.key == "lost-key1").values(status="lost"))
        text = get(shop, "/keys")
        assert ["lost-key1", "good-key1"] == listed(text)
        assert 1 == text.count("can't be read")
        for path in ("", "/release", "/body"):
            assert "unknown status" in get(shop, f"{at('lost-key1')}{path}")
        assert "unknown: 1." in get(shop, "/")

    def test_path_that_is_no_text(self, console: Callable[..., Shop]) -> None:
        """A path of bytes, which SQLite's columns hold as well, hides no endpoint."""
        shop = console()
        shop.charge("good-key1")
        shop.charge("lost-key1")
        shop.execute(sa.text("UPDATE idempotency_keys SET request_path = x'ff' WHERE key = 'lost-key1'"))
        assert "create_charge" in get(shop, "/endpoints")

    def test_encrypted(self, console: Callable[..., Shop]) -> None:
        """What is stored encrypted is shown in the clear; without its encryption key the rest of the row is shown."""
        pytest.importorskip("cryptography")
        keys = [base64.urlsafe_b64encode(bytes([number] * 32)).decode() for number in (1, 2)]
        shop = console({"encryption_keys": keys[:1]}, bodies=True, writable=True)

        def view() -> dict[str, int]:
            return {"charge": shop.idempotency.step("pay", lambda: 1234)}

        guard(shop, view)
        key = new_key()
        assert 200 == send(shop, key).status_code
        assert b"1234" not in shop.rows()[0]["response_body"]
        text = get(shop, at(key))
        assert "{&#34;charge&#34;:1234}" in text
        assert "<bdi>pay</bdi> <code>1234</code>" in text
        assert b'{"charge":1234}\n' == shop.client.get(f"/ops{at(key)}/body").data
        state = get_state(shop.app)
        state.settings = replace(state.settings, encryption_keys=Keyring(keys[1:]))
        text = get(shop, at(key))
        assert "1234" not in text.replace(key, "")
        assert 'class="problem"' in text
        assert "Claimed for the first time" in text
        assert "encryption key" in get(shop, f"{at(key)}/body")
        client = shop.client
        form = form_of(get(shop, f"{at(key)}/release", client=client))
        assert 200 == client.post(f"/ops{at(key)}/release", data={**form, "force": "yes"}).status_code

    def test_no_table(self, console: Callable[..., Shop]) -> None:
        """A table that is missing is a 503 that says to run the migration, on every page."""
        shop = console(bodies=True, writable=True)
        shop.execute(sa.text("DROP TABLE idempotency_keys"))
        key = at("some-key1")
        for path in ("/", "/endpoints", "/keys", "/live", "/stale", "/held", key, f"{key}/release", f"{key}/body"):
            text = get(shop, path, 503)
            assert "migration" in text
            assert "Traceback" not in text

    def test_no_overviews(self, light: Shop) -> None:
        """A store without overviews is a 501 that says so."""
        client = narrow(light, "stats", "tally", "listed", "detail", "erase", "count", "kept", "check")
        for path in PAGES:
            answer = client.get(f"/idempotency{path}")
            assert (501, []) == (answer.status_code, Document(answer.text).wrong)
            assert "Narrow" in answer.text

    def test_a_store_that_only_reads(self, light: Shop) -> None:
        """What no page asks of a store, to erase a scope's keys or to count, it need not be able to do."""
        put(light, "k")
        client = narrow(light, "erase", "count", "kept", "check")
        for path in PAGES:
            assert 200 == client.get(f"/idempotency{path}").status_code


def test_unguarded_app(console: Callable[..., Shop]) -> None:
    """Keys can be looked at while the app guards nothing."""
    shop = console({"enabled": False})
    put(shop, "some-key1")
    assert ["some-key1"] == listed(get(shop, "/live"))


def test_in_another_blueprint(make_light: Make) -> None:
    """It can be nested in a blueprint, under another name and prefix, and its links stay there."""
    shop = make_light()
    outer = Blueprint("outer", __name__, url_prefix="/admin")
    outer.register_blueprint(console_blueprint(authorize=lambda: True), name="inner", url_prefix="/keys-of-ours")
    shop.app.register_blueprint(outer)
    shop.charge("some-key1")
    client = shop.client
    text = client.get("/admin/keys-of-ours/keys").text
    links = [str(one["href"]) for one in Document(text).every("a") if one["href"] != "#content"]
    assert {200} == {client.get(link).status_code for link in links}
    assert all(link.startswith("/admin/keys-of-ours/") for link in links)


@pytest.mark.one_database
def test_on_each_database(make: Make) -> None:
    """Lists, a key's page and a release work on what the app's database is."""
    shop = make()
    shop.app.register_blueprint(console_blueprint(authorize=lambda: True, writable=True, url_prefix="/ops"))
    shop.charge("some-key1", tenant="a/é")
    put(shop, "gone-1", lock_timeout=1.0)
    shop.shift(60)
    client = shop.client
    get(shop, "/")
    assert ["gone-1", "some-key1"] == listed(get(shop, "/keys"))
    assert ["gone-1"] == listed(get(shop, "/stale"))
    for name in ("scope", "key", "path"):
        assert [] == listed(get(shop, f"/keys?{name}=a%00b"))  # which PostgreSQL takes for no text
    get(shop, at("a\x00b"), 404)
    get(shop, f"/keys?before={2**63 - 1}")
    get(shop, "/endpoints")
    assert "201 CREATED" in get(shop, at("some-key1", "a/é")).upper()
    path = f"{at('some-key1', 'a/é')}/release"
    form = form_of(get(shop, path, client=client))
    assert 200 == client.post(f"/ops{path}", data={**form, "force": "yes"}).status_code
    assert ["gone-1"] == listed(get(shop, "/keys"))
