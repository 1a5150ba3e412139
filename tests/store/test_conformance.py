"""Every promise of a store, on every back end."""

from __future__ import annotations

from typing import Any

import pytest

from flask_idempotency.testing import StoreConformance, SurveyConformance
from tests.store.support import shift


@pytest.mark.scenario(1, 3, 4, 12, 57, 58, 60, 61, 63)
class TestSQLAlchemyStore(StoreConformance):
    """The fixture ``store`` gives every back end in turn."""

    def shift(self, store: Any, seconds: float) -> None:
        shift(store, seconds)


class TestSurveys(SurveyConformance):
    """The same back ends, looked over."""

    def shift(self, store: Any, seconds: float) -> None:
        shift(store, seconds)
