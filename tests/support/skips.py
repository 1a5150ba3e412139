"""Tests that need something which the package index does not bring: skipped with a reason, or failed in CI."""

from __future__ import annotations

import os
import shutil
from typing import NoReturn

import pytest

#: Set to ``1`` where everything is installed (in CI): what would be skipped fails instead.
REQUIRE_ALL = "IDEMPOTENCY_TESTS_REQUIRE_ALL"

#: Debian puts servers where an ordinary user's PATH does not look.
SYSTEM_FOLDERS = ("/usr/sbin", "/usr/local/sbin", "/sbin")


def missing(reason: str) -> NoReturn:
    """Skip the running test with ``reason``, or fail it where everything has to be there."""
    if os.environ.get(REQUIRE_ALL) == "1":
        pytest.fail(f"{reason}, and {REQUIRE_ALL}=1 allows no such skip", pytrace=False)
    pytest.skip(reason)


def needs(program: str) -> str:
    """Return the path of a program that a distribution package brings, or skip the running test with a reason."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *SYSTEM_FOLDERS])
    return shutil.which(program, path=path) or missing(f"needs the program {program}, which is not installed here")
