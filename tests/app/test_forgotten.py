"""Mistakes that would leave a view unguarded are said before the first request is served."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from flask import Blueprint, Flask

from flask_idempotency import Idempotency
from flask_idempotency.errors import ConfigurationError, OptionError
from tests.support.apps import Shop


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("other", [True, False])
def test_protect_without_init_app(light: Shop, whole: bool, other: bool) -> None:
    """What is protected is not served by an app that the object was not initialised on, or another one was."""
    app = light.app if other else Flask("forgotten")
    app.testing = True
    blueprint = Blueprint("work", __name__)
    blueprint.post("/work")(lambda: "unguarded")
    app.register_blueprint(blueprint)
    forgotten = Idempotency()
    forgotten.protect(app if whole else blueprint)
    with pytest.raises(ConfigurationError, match="not initialised"):
        app.test_client().post("/work")


@pytest.mark.parametrize("whole", [True, False])
def test_protect_by_an_object_that_nobody_keeps(whole: bool) -> None:
    """An object that only a factory knew, and did not initialise, is remembered by what it protects."""
    app, blueprint = Flask("forgotten"), Blueprint("work", __name__)
    app.testing = True
    blueprint.post("/work")(lambda: "unguarded")
    Idempotency().protect(app if whole else blueprint)
    app.register_blueprint(blueprint)
    gc.collect()
    with pytest.raises(ConfigurationError, match="not initialised"):
        app.test_client().post("/work")


def test_protect_elsewhere(light: Shop) -> None:
    """An object whose protected blueprint is on another app has no say here."""
    forgotten = Idempotency()
    forgotten.protect(Blueprint("work", __name__))
    assert 400 == light.charge(None).status_code


@pytest.mark.parametrize("methods", [["POTS"], "*", "POST;PATCH", ["POST", "FOO"]])
def test_method_names(methods: Any) -> None:
    """A name that is no HTTP method's is refused where it is written."""
    with pytest.raises(OptionError, match="HTTP methods"):
        Idempotency().required(methods=methods)


@pytest.mark.parametrize("db", ["sqlite://", 5, object()])
def test_a_database_that_is_none(db: Any) -> None:
    """What is neither Flask-SQLAlchemy's object nor an engine is refused in init_app."""
    with pytest.raises(ConfigurationError, match="or an engine"):
        Idempotency(Flask("forgotten"), db)


def test_exempt_after_the_first_request(light: Shop) -> None:
    """A protected view that is found in the app's view functions can be exempt when requests have been served."""
    light.app.post("/x", endpoint="x")(lambda: "x")
    light.idempotency.protect(light.app)
    assert 400 == light.client.post("/x").status_code
    light.idempotency.exempt(light.app.view_functions["x"])
    assert 200 == light.client.post("/x").status_code


def test_exempt_and_guarded() -> None:
    """A view can't be exempt and guarded."""
    idempotency = Idempotency()
    with pytest.raises(ConfigurationError, match="exempt"):
        idempotency.exempt(idempotency.required(lambda: "done"))
    with pytest.raises(ConfigurationError, match="exempt"):
        idempotency.optional(idempotency.exempt(lambda: "done"))
