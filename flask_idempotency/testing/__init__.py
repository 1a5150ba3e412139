"""For tests: every promise of a store, as tests that run over any store.

A store of your own is put to the proof by a subclass in your test suite (pytest)::

    import pytest
    from flask_idempotency.testing import StoreConformance

    class TestMyStore(StoreConformance):
        @pytest.fixture
        def store(self):
            return MyStore(...)          # empty

        def shift(self, store, seconds):
            store.move_all_times_into_the_past(seconds)

A store that also has the methods of :class:`~flask_idempotency.store.survey.Survey` is put to their proof in the same
way, with ``SurveyConformance``.

``store`` is a fixture that gives an empty store to each test, one that may be called from many threads.
``shift`` makes everything stored older by so many seconds, so that no test has to wait for a lease.
"""

from .asking import ANSWER, ask, claimed, race, stored
from .claims import Claims
from .leases import Leases
from .settling import Settling
from .steps import Steps
from .surveys import Surveys

__all__ = ["ANSWER", "StoreConformance", "SurveyConformance", "ask", "claimed", "race", "stored"]


class StoreConformance(Claims, Leases, Steps, Settling):
    """The promises of :class:`~flask_idempotency.store.base.Store`; see the module for how to use it."""


class SurveyConformance(Surveys):
    """The promises of :class:`~flask_idempotency.store.survey.Survey`; used as :class:`StoreConformance` is."""
