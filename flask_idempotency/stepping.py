"""What an attempt's view does in steps, under the claim that the attempt holds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from flask import Flask

from .errors import ClaimLost, StepError
from .keyring import Keyring
from .lifecycle import Granted, Lifecycle
from .steps import TAKEN_OVER, Steps, derive_unnoted


class Stepping:
    """The part of an attempt that steps and derived keys ask; the attempt fills in the attributes."""

    key: str
    scope: str
    _app: Flask
    _lifecycle: Lifecycle
    _granted: Granted | None
    _keys: Keyring | None
    _settled: bool
    #: A later request took the claim over.
    _lost: bool
    _lock: threading.Lock
    _steps: Steps | None = None

    def _step(self, name: str, function: Callable[[], Any]) -> Any:
        with self._telling_of_loss():
            return self._its_steps().run(name, function)

    def _derive_key(self, name: str) -> str:
        with self._telling_of_loss():
            return self._its_steps().derive(name)

    def _derive_unnoted(self, name: str) -> str:
        """For a view that runs without a claim, since the store could not answer and the app chose so."""
        return derive_unnoted(self._secrets(), self.scope, self.key, name)

    def _secrets(self) -> list[bytes]:
        secrets = [self._app.secret_key, *(self._app.config.get("SECRET_KEY_FALLBACKS") or ())]
        return [one.encode() if isinstance(one, str) else one for one in secrets if one]

    def _its_steps(self) -> Steps:
        if self._lost:
            # Whoever found out, this request's earlier step or the renewal: the view has to hear it as well.
            raise ClaimLost(TAKEN_OVER)
        if self._granted is None or self._settled:
            raise StepError("Steps and derived keys belong into the guarded view: no claim is held here.")
        with self._lock:
            if self._steps is None:
                self._steps = Steps(self._lifecycle.store, self._granted.claim, self._secrets(), self._keys)
            return self._steps

    @contextmanager
    def _telling_of_loss(self) -> Iterator[None]:
        try:
            yield
        except ClaimLost:
            if self._granted is not None:
                self._lifecycle.lose(self._granted)
            raise
