"""The errors: problem documents, and how an app can tell them apart."""

from __future__ import annotations

import json
from typing import Any

import pytest
from werkzeug.exceptions import HTTPException

from flask_idempotency import errors

ANSWERS = [
    (errors.KeyMissing, 400, "key-missing"),
    (errors.KeyInvalid, 400, "key-invalid"),
    (errors.ScopeMissing, 401, "scope-missing"),
    (errors.KeyReused, 422, "key-reused"),
    (errors.InFlight, 409, "in-flight"),
    (errors.OutcomeUnknown, 409, "outcome-unknown"),
    (errors.RecordUnavailable, 409, "record-unavailable"),
    (errors.TooManyKeys, 429, "too-many-keys"),
    (errors.StoreUnavailable, 503, "store-unavailable"),
]


def subclasses(kind: type) -> set[type]:
    """All classes below one."""
    return set().union(*({one} | subclasses(one) for one in kind.__subclasses__()))


def test_the_list_of_answers_is_complete() -> None:
    """The classes under the base are the ones of the contract, no more."""
    assert {kind for kind, *_ in ANSWERS} == subclasses(errors.IdempotencyError)


@pytest.mark.parametrize(("kind", "status", "slug"), ANSWERS)
@pytest.mark.scenario(69)
def test_problem_documents(kind: type[errors.IdempotencyError], status: int, slug: str) -> None:
    """Each is a problem document with its type, title, status and a sentence, twice."""
    error = kind()
    assert isinstance(error, HTTPException)
    response = error.get_response()
    problem = json.loads(response.get_data())
    assert (status, "application/problem+json") == (response.status_code, response.headers["Content-Type"])
    assert {"type", "title", "status", "detail", "error"} == set(problem)
    assert (f"urn:problem-type:idempotency:{slug}", status) == (problem["type"], problem["status"])
    assert problem["detail"] == problem["error"] == error.description
    assert problem["title"] != kind.__name__
    assert problem["detail"].endswith(".")
    assert 40 < len(problem["detail"])


def test_titles_and_types_are_all_different() -> None:
    """No two answers share a title or a type."""
    assert len(ANSWERS) == len({kind.title for kind, *_ in ANSWERS}) == len({kind.slug for kind, *_ in ANSWERS})


def test_the_base_has_no_status() -> None:
    """Flask looks handlers up by the class's status: the base has none, so that a handler for it finds them all."""
    assert errors.IdempotencyError.code is None
    assert [status for _, status, _ in ANSWERS] == [kind.code for kind, *_ in ANSWERS]


@pytest.mark.parametrize(
    ("seconds", "header"), [(2.0, "2"), (0.2, "1"), (0.0, "1"), (1.01, "2"), (30, "30"), (None, None)]
)
def test_retry_after_is_in_whole_seconds(seconds: float | None, header: str | None) -> None:
    """``Retry-After`` is rounded up, at least one second, and only there where it was given."""
    assert header == errors.InFlight(retry_after=seconds).get_response().headers.get("Retry-After")


def test_a_401_carries_a_challenge() -> None:
    """``ScopeMissing`` has the challenge that every 401 needs, and no other answer has one."""
    having = {kind for kind, *_ in ANSWERS if "WWW-Authenticate" in kind().get_response().headers}
    assert {errors.ScopeMissing} == having


def test_status_base_and_members_can_be_given() -> None:
    """A configured status, an app's own base of types, and further members are all in the document."""
    error = errors.KeyReused("Look here.", base="https://example.com/errors#", status=409, original_status=201)
    response = error.get_response()
    expected: dict[str, Any] = {
        "type": "https://example.com/errors#key-reused",
        "title": "Idempotency key reused",
        "status": 409,
        "detail": "Look here.",
        "error": "Look here.",
        "original_status": 201,
    }
    assert (409, expected) == (response.status_code, json.loads(response.get_data()))
    assert expected == error.data
    assert 422 == errors.KeyReused.code


@pytest.mark.parametrize(
    ("kind", "bases"),
    [
        (errors.ConfigurationError, (RuntimeError,)),
        (errors.OptionError, (RuntimeError, ValueError)),
        (errors.UnknownOption, (RuntimeError, ValueError, TypeError)),
        (errors.WriterHeld, (errors.StoreError,)),
        (errors.RecordRefused, (errors.StoreError,)),
        (errors.RowUnreadable, (errors.StoreError,)),
    ],
)
def test_mistakes_are_no_answers(kind: type[Exception], bases: tuple[type, ...]) -> None:
    """What an app or a store did wrong is an ordinary exception of the expected kinds, never an HTTP answer."""
    assert all(issubclass(kind, base) for base in bases)
    assert not issubclass(kind, HTTPException)
