"""The README and the docs: what they show is run, and what they list is compared with the package.

A page's blocks run from top to bottom, in one namespace and a fresh folder:

- ``python`` is executed, ``pycon`` is a doctest;
- ``console``: ``curl`` goes to the page's ``app`` through its test client, ``flask … idempotency`` to its command line,
  and what is shown below a command has to come out;
- ``<!-- file: NAME -->`` above a block writes it into the folder instead; pytest then runs the folder;
- ``<!-- run`` … ``-->`` around a block hides it from readers;
- ``<!-- no-run: REASON -->`` above a block leaves it out;
- ``<!-- needs MODULE -->`` above a block, or ``<!-- run, needs MODULE``, leaves it out where that module is missing.

The tables of the reference are written by ``docs/_ext/tables.py``; here it is seen to that they are current.
"""

from __future__ import annotations

import doctest
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
import sqlalchemy as sa
from flask import Flask
from werkzeug.test import TestResponse

import flask_idempotency
from flask_idempotency import config, signals
from flask_idempotency.store.table import build_table
from tests.support.apps import close, make_shop, new_key, statements
from tests.support.server import GunicornServer

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted(page for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts)]

BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>[^\n]*?)(?: -->)?\n)?```(?P<kind>python|pycon|console)\n(?P<body>.*?)^```$", re.M | re.S
)
FENCED = re.compile(r"^(```|:::).*?^\1$", re.M | re.S)

#: Commands that are shown and not run: they install, serve, wait, or need a migration folder.
NOT_RUN = ("pip ", "make ", "python3 ", ".venv/bin/", "crontab ", "flask --app app run", "flask db ")


@dataclass
class Block:
    """A fenced block of a page, with what the comment above it says."""

    kind: str
    mark: str
    body: str
    line: int


def blocks(page: Path) -> list[Block]:
    """The blocks of a page that the tests look at."""
    text = page.read_text()
    return [
        Block(found["kind"], found["mark"] or "", found["body"], text.count("\n", 0, found.start("body")) + 1)
        for found in BLOCK.finditer(text)
    ]


def named(page: Path) -> str:
    """A page's path as the tests call it."""
    return page.relative_to(ROOT).as_posix()


RUN = [page for page in PAGES if blocks(page)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh folder, which is the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def module(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """The module that a page's blocks run in; its apps' connections are closed at the end."""
    page = types.ModuleType("page")
    page.__file__ = str(folder / "page.py")
    monkeypatch.setitem(sys.modules, "page", page)
    yield page
    for app in apps(page):
        if "idempotency" in app.extensions and "sqlalchemy" in app.extensions:
            close(app)


def apps(module: types.ModuleType) -> list[Flask]:
    """The apps that a page has made so far."""
    return [value for value in vars(module).values() if isinstance(value, Flask)]


@pytest.mark.timeout(180)  # two pages run pytest in a process of its own, which takes its time on a busy machine
@pytest.mark.parametrize("page", RUN, ids=named)
def test_page_runs(page: Path, folder: Path, module: types.ModuleType) -> None:
    """Every snippet of the page runs, and what it shows comes out."""
    for block in blocks(page):
        for app in apps(module):
            # A page goes on adding routes after its first requests, which Flask forbids outside of documentation.
            app._got_first_request = False
        needs = re.fullmatch(r"(?:run, )?needs (\w+)", block.mark)
        if block.mark.startswith("no-run"):
            assert re.fullmatch("no-run: .+", block.mark), f"line {block.line}: say why it does not run"
        elif needs and importlib.util.find_spec(needs[1]) is None:
            continue
        elif block.mark.startswith("file: "):
            (folder / block.mark.removeprefix("file: ")).write_text(block.body)
        elif block.kind == "python":
            code = "\n" * (block.line - 1) + block.body
            exec(compile(code, named(page), "exec"), vars(module))
        elif block.kind == "pycon":
            run_doctest(block, page, vars(module))
        else:
            run_console(block, module)
    if list(folder.glob("test_*.py")):
        run_pytest(folder)


def run_doctest(block: Block, page: Path, namespace: dict[str, Any]) -> None:
    """Run a session, and raise where something else comes out."""
    examples = doctest.DocTestParser().get_examples(block.body)
    test = doctest.DocTest(examples, {}, named(page), str(page), block.line - 1, None)
    test.globs = namespace
    try:
        doctest.DebugRunner().run(test, clear_globs=False)
    except doctest.DocTestFailure as failure:
        where = f"{named(page)}, line {block.line + failure.example.lineno}: {failure.example.source}"
        pytest.fail(f"{where}shown: {failure.example.want}got:   {failure.got}", pytrace=False)
    except doctest.UnexpectedException as failure:
        raise failure.exc_info[1] from None


def run_pytest(folder: Path) -> None:
    """Run the tests that a page shows, as a reader would; those for an app also without pytest-flask."""
    found = str(Path(flask_idempotency.__file__).parents[1])
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([found, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)]
    runs = [command, [*command, "-p", "no:flask"]] if (folder / "conftest.py").exists() else [command]
    for run in runs:
        limit = 170 / len(runs)
        done = subprocess.run(run, cwd=folder, env=environ, capture_output=True, text=True, timeout=limit)
        assert done.returncode == 0, done.stdout + done.stderr


def commands(block: Block) -> list[tuple[str, list[str]]]:
    """The commands of a console block, each with the lines shown below it."""
    found: list[tuple[str, list[str]]] = []
    for line in block.body.replace("\\\n", " ").splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        else:
            found[-1][1].append(line)
    return found


def run_console(block: Block, module: types.ModuleType) -> None:
    """Carry out what can be, and compare what is shown."""
    for command, shown in commands(block):
        words = shlex.split(command, comments=True)
        if words[0] == "curl":
            compare(send(words, module.app), shown, headers="-i" in words)
        elif words[:4] == ["flask", "--app", "app", "idempotency"]:
            done = module.app.test_cli_runner().invoke(args=words[3:])
            assert done.exit_code == 0, done.output
            # Counts and durations differ; the rest has to be the same.
            assert without_numbers(done.output.strip()) == without_numbers("\n".join(shown).strip())
        else:
            assert command.startswith(NOT_RUN), f"line {block.line}: run it, or add it to NOT_RUN: {command}"


def without_numbers(text: str) -> str:
    return re.sub(r"\d+(\.\d+)?(e-\d+)?", "0", text)


def send(words: list[str], app: Flask) -> TestResponse:
    """Send what a curl command would."""
    headers, data, method, url = [], None, None, ""
    rest = iter(words[1:])
    for word in rest:
        if word == "-H":
            name, _, value = next(rest).partition(": ")
            headers.append((name, value))
        elif word == "-d":
            data = next(rest)
        elif word == "-X":
            method = next(rest)
        elif word != "-i":
            assert not word.startswith("-"), f"the test does not know curl's option {word}"
            url = word
    method = method or ("GET" if data is None else "POST")
    return app.test_client().open(url, method=method, headers=headers, data=data)


def compare(response: TestResponse, shown: list[str], *, headers: bool) -> None:
    """Hold a response against the lines shown: status, some of the headers, and the body if it is there."""
    if headers:
        status, *shown = shown
        assert f"HTTP/1.1 {response.status}" == status, response.text
        while shown and shown[0]:
            name, _, value = shown.pop(0).partition(": ")
            assert (name, value) == (name, response.headers.get(name))
    body = "\n".join(shown).strip()
    assert body in ("", response.text.strip())


def python_blocks(page: Path) -> list[str]:
    return [block.body for block in blocks(page) if block.kind == "python"]


def test_readme_app_runs_under_a_server(tmp_path: Path, gunicorn: Callable[..., GunicornServer]) -> None:
    """The README's app, saved as it stands, charges once and replays under a server with two workers."""
    (app,) = python_blocks(README)
    (tmp_path / "app.py").write_text(app)
    server = gunicorn("app:app", workers=2, preload=True, pythonpath=tmp_path)
    headers = {"X-Api-Key": "secret-of-acme", "Idempotency-Key": new_key()}
    answers = [requests.post(f"{server.url}/charges", json={"amount": 100}, headers=headers) for _ in range(4)]
    assert [(201, answers[0].content)] * 4 == [(one.status_code, one.content) for one in answers]
    assert [None, "true", "true", "true"] == [one.headers.get("Idempotent-Replay") for one in answers]
    other = requests.post(f"{server.url}/charges", json={"amount": 900}, headers=headers)
    assert 422 == other.status_code


def test_start_shows_the_readme_app() -> None:
    """The tutorial's app is the README's, so that the two can't drift apart."""
    assert python_blocks(README) == python_blocks(ROOT / "docs" / "start.md")


@pytest.fixture(scope="module")
def tables() -> types.ModuleType:
    """The module that generates the reference's tables."""
    spec = importlib.util.spec_from_file_location("docs_tables", ROOT / "docs" / "_ext" / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(table: str) -> dict[str, list[str]]:
    """A Markdown table's rows, as their cells, by the first cell without its backquotes."""
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]
    return {row[0].strip("`"): row for row in cells}


def test_every_option_is_in_the_table(tables: types.ModuleType) -> None:
    """The configuration table has each option with its keyword and its meaning."""
    found = rows(tables.options())
    for option in config.OPTIONS:
        assert ("" if option.app_only else f"`{option.name}`") == found[option.config_key][1]
        assert option.meaning in found[option.config_key][3]


def test_generated_tables_are_complete(tables: types.ModuleType) -> None:
    """The tables of errors, events, columns and commands leave nothing out."""
    assert {one.__name__: str(one.code) for one in tables.answers().values()} == {
        name: row[1] for name, row in rows(tables.problems()).items()
    }
    events = [one for one in vars(signals).values() if isinstance(one, signals.Event)]
    assert {one.name for one in events} == set(rows(tables.events()))
    columns = [column.name for column in build_table(sa.MetaData()).columns]
    assert columns == list(rows(tables.columns())) == list(tables.COLUMNS)
    assert "## flask idempotency prune" in tables.commands()
    assert "## flask idempotency release SCOPE KEY" in tables.commands()


def test_generated_tables_are_current(tables: types.ModuleType) -> None:
    """The pages have each table, as the package's own tables make it now."""
    found = []
    for page in tables.pages():
        text = page.read_text()
        found += re.findall(r"^<!-- table: (\w+)", text, re.M)
        assert text == tables.rewritten(text), f"{named(page)}: run .venv/bin/python docs/_ext/tables.py"
    assert sorted(tables.TABLES) == sorted(found)


def test_python_api_lists_what_autodoc_shows(tables: types.ModuleType) -> None:
    """What the page on the Python API shows in full stands in its tables, which can be read without Sphinx, too."""
    shown = (ROOT / "docs" / "reference" / "api.md").read_text().partition("## In full")[2]
    listed = " ".join(tables.TABLES[name]() for name in ("methods", "attempt", "others", "store"))
    names = re.findall(r"^\.\. autoclass:: ([\w.]+)", shown, re.M)
    assert names
    members = re.findall(r"autoclass:: \S+\.(?:Idempotency|Attempt\(\))\n +:members: (.+)", shown)
    assert 2 == len(members)
    for name in (*", ".join(members).split(", "), *(one.rpartition(".")[2] for one in names)):
        assert re.search(rf"\b{name}\b", listed), name


def test_readme_answers_agree_with_the_errors(tables: types.ModuleType) -> None:
    """The README's table of answers names the status, the type and Retry-After of each error that can be given."""
    section = README.read_text().partition("## What a client gets")[2].partition("\n## ")[0]
    given = {}
    for line in section.splitlines():
        found = re.search(r"\| (\d{3}) `([a-z-]+)`(.*)\|$", line)
        if found:
            given[found[2]] = (int(found[1]), "Retry-After" in found[3])
    expected = {
        one.slug: (one.code, "Retry-After" in (one.__doc__ or ""))
        for one in tables.answers().values()
    }
    assert expected == given


ERRORS = ROOT / "docs" / "reference" / "errors"


def test_every_problem_has_its_page(tables: types.ModuleType) -> None:
    """Each problem that ``type`` can name has a page of that name, in four parts, and there is no other page."""
    kinds = {one.slug: one for one in tables.answers().values()}
    assert set(kinds) == {page.stem for page in ERRORS.glob("*.md")}
    for slug, kind in kinds.items():
        text = (ERRORS / f"{slug}.md").read_text()
        headings = re.findall(r"^#+ (.+)$", FENCED.sub("", text), re.M)
        parts = ["What happened", "What the client should do", "What the operator should look at", "An example"]
        assert [slug, *parts] == headings
        assert f"**Status {kind.code}" in text
        assert f"`flask_idempotency.errors.{kind.__name__}`" in text
        assert ("Retry-After" in text) == ("Retry-After" in (kind.__doc__ or "")), slug
        assert f'"urn:problem-type:idempotency:{slug}"' in text.replace("'", '"')


def test_every_page_is_in_a_list_of_contents() -> None:
    """Each page stands in exactly one list of contents, under one of the site's six captions or below a page there."""
    docs = ROOT / "docs"
    listed, captions = [], []
    for page in PAGES[1:]:
        for options, names in re.findall(r"^```{toctree}\n((?::[^\n]*\n)*)\n(.*?)^```", page.read_text(), re.M | re.S):
            captions += re.findall("^:caption: (.+)$", options, re.M)
            listed += [(page.parent / f"{name}.md").relative_to(docs).as_posix() for name in names.split()]
    assert ["Start", "How-to", "Reference", "Explanation", "Decisions", "About"] == captions
    assert sorted(page.relative_to(docs).as_posix() for page in PAGES[1:]) == sorted(["index.md", *listed])


def test_decisions_are_short_and_numbered() -> None:
    """Each decision has a number, its context, the decision and the consequences, in no more than 60 lines."""
    pages = [page for page in sorted((ROOT / "docs" / "decisions").glob("*.md")) if page.name != "index.md"]
    for number, page in enumerate(pages, 1):
        text = page.read_text()
        assert page.name.startswith(f"{number:04}-")
        assert text.startswith(f"# {number}. ")
        assert ["Context", "Decision", "Consequences"] == re.findall(r"^## (.+)$", text, re.M)
        assert len(text.splitlines()) <= 60
        for module in re.findall(r"`([\w/]+\.py)`", text):
            assert (Path(flask_idempotency.__file__).parent / module).is_file(), module


def test_pages_name_only_options_that_exist() -> None:
    """Every IDEMPOTENCY_… key that a page names is one of the package's."""
    known = {option.config_key for option in config.OPTIONS}
    for page in PAGES:
        named_here = set(re.findall(r"(?:FLASK_)?(IDEMPOTENCY_[A-Z_]+[A-Z])", page.read_text()))
        assert named_here <= known, named(page)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MyST make them."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_anchors_are_unique() -> None:
    """No page has two headings that a link could not tell apart."""
    for page in PAGES[1:]:
        headings = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text()), re.M)
        assert len(headings) == len(anchors(page)), named(page)


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page: Path) -> None:
    """Every link of the page to a file of the repository, and to a heading in it, has a target."""
    for link in re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", FENCED.sub("", page.read_text())):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if re.match("[a-z]+:", link) or (target.parent == ROOT and not (ROOT / "setup.cfg").exists()):
            continue  # elsewhere; or the tests were copied without the repository's other files
        assert target.is_file(), link
        assert not anchor or anchor in anchors(target), link


def test_statements_of_a_run_and_a_replay(database_url: str) -> None:
    """A first run takes as many statements as the docs say, and a replay takes one."""
    shop = make_shop(database_url)
    key = new_key()
    counts = []
    for _ in range(2):
        with statements() as seen:
            shop.charge(key)
        counts.append(sum("idempotency_keys" in one for one in seen))
    close(shop.app)
    assert [3 if database_url.startswith("sqlite") else 2, 1] == counts


def test_problem_documents_are_as_described() -> None:
    """The members of a problem document are those that the reference names, and error repeats detail."""
    problem = json.loads(flask_idempotency.errors.KeyMissing().get_body())
    assert ["type", "title", "status", "detail", "error"] == list(problem)
    assert problem["detail"] == problem["error"]
