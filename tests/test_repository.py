"""The repository keeps its own promises: its size, its layers, its versions, and its account of the scenarios."""

from __future__ import annotations

import ast
import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import flask_idempotency

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "flask_idempotency"

#: What this release makes no promise about.
OPEN: set[int] = set()

#: What is promised in part, as far as this release goes.
IN_PART: set[int] = set()

#: Absolute paths of somebody's machine: home folders and temporary ones.
FOREIGN = re.compile(r"(?<![\w.:/])/(?:home|root|tmp|work|Users|var/folders)/")

pytestmark = pytest.mark.skipif(not PACKAGE.is_dir(), reason="the package is installed, and its tree is not here")


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def files_of_tests() -> list[Path]:
    return sorted((ROOT / "tests").rglob("test_*.py"))


def texts() -> Iterator[tuple[Path, str]]:
    """Each text file of the tree with its text, without what tools have made."""
    folders = [ROOT]
    while folders:
        for path in sorted(folders.pop().iterdir()):
            if path.is_dir():
                made = path.name in {"build", "dist", "_build", "__pycache__"} or path.suffix == ".egg-info"
                hidden = path.name.startswith(".") and path.name != ".ci"
                if not (made or hidden or (path / "pyvenv.cfg").exists()):
                    folders.append(path)
            elif path.name != ".git":  # a file in a worktree, which names the folder that it belongs to
                with contextlib.suppress(UnicodeDecodeError):
                    yield path, path.read_text(encoding="utf-8")


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


def scenarios_covered() -> dict[int, list[str]]:
    """Each number in a ``scenario`` mark, on a function, a class or a module, and the files it stands in."""
    found: dict[int, list[str]] = {}
    for path in files_of_tests():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.scenario":
                for argument in node.args:
                    assert isinstance(argument, ast.Constant), f"{path.name}:{node.lineno}: give numbers"
                    found.setdefault(int(argument.value), []).append(path.name)
    return found


def scenarios_listed() -> list[int]:
    text = (ROOT / "tests" / "scenarios.md").read_text(encoding="utf-8")
    return [int(number) for number in re.findall(r"^(\d+)\. ", text, re.MULTILINE)]


def test_each_scenario_is_covered_or_open() -> None:
    """Each of the listed scenarios has a test or stands in ``OPEN``, and none is both; so have those kept in part."""
    listed, covered = scenarios_listed(), scenarios_covered()

    wrong = {
        "no such scenario": sorted(covered.keys() - set(listed)),
        "neither covered nor open": sorted(set(listed) - covered.keys() - OPEN),
        "covered, so no longer open": sorted(covered.keys() & OPEN),
        "kept in part, but not covered": sorted(IN_PART - covered.keys()),
    }

    assert list(range(1, 81)) == listed
    assert {} == {what: numbers for what, numbers in wrong.items() if numbers}


def test_each_named_test_exists() -> None:
    """Every test that SECURITY.md names as an answer's proof is there, and each threat has one."""
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    threats = [line for line in text.partition("## Threats")[2].splitlines() if line.startswith("| **")]
    named = {threat: re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", threat) for threat in threats}
    exist = {
        (path.relative_to(ROOT).as_posix(), function.name) for path in files_of_tests() for function in functions(path)
    }

    assert len(threats) > 10
    assert [] == [threat for threat, tests in named.items() if not tests]
    assert [] == [one for tests in named.values() for one in tests if one not in exist]


def test_each_test_says_what_must_hold() -> None:
    """Each test function has a docstring."""
    without = [
        f"{path.relative_to(ROOT)}:{function.lineno} {function.name}"
        for path in files_of_tests()
        for function in functions(path)
        if function.name.startswith("test") and not ast.get_docstring(function)
    ]

    assert [] == without


def test_one_version() -> None:
    """The project's metadata, the package and the changelog's newest release name one version."""
    declared = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    newest = re.search(r"^## \[(\d.*?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)

    assert declared is not None
    assert newest is not None
    assert flask_idempotency.__version__ == declared[1] == newest[1]


def test_modules_are_short() -> None:
    """No module of the package has 350 lines."""
    long = {path.name: lines for path in modules() if (lines := path.read_text(encoding="utf-8").count("\n")) >= 350}

    assert {} == long


def test_functions_are_short() -> None:
    """No function of the package has 50 lines."""
    long = {
        f"{path.name} {function.name}": lines
        for path in modules()
        for function in functions(path)
        if (lines := (function.end_lineno or 0) - function.lineno + 1) >= 50
    }

    assert {} == long


def test_nothing_is_left_to_do() -> None:
    """The package has no note of something that is still to be done."""
    notes = re.compile(r"\b(TODO|FIXME|XXX)\b")

    assert [] == [path.name for path in modules() if notes.search(path.read_text(encoding="utf-8"))]


def test_no_module_draws_from_the_apps_random() -> None:
    """The extension's threads draw from the system: `random` has one state, which is the app's to seed."""
    drawn = {
        node.attr
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "random"
    }
    assert {"SystemRandom"} == drawn


def test_import_contracts() -> None:
    """The layers that ``setup.cfg`` describes are kept."""
    command = "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True))"
    run = subprocess.run([sys.executable, "-c", command], cwd=ROOT, capture_output=True, text=True, check=False)

    assert 0 == run.returncode, run.stdout + run.stderr


def test_no_foreign_places() -> None:
    """Nothing in the tree names a folder that exists on one machine only."""
    named = [
        f"{path.relative_to(ROOT)}:{number} {line.strip()}"
        for path, text in texts()
        for number, line in enumerate(text.splitlines(), 1)
        if FOREIGN.search(line)
    ]

    assert [] == named
