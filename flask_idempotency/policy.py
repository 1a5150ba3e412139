"""The policy: all options that hold for one guarded view, checked once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

#: Never recorded, and never replayed (contract: a cookie, a credential or a challenge belongs to the request
#: that got it; the rest describes one connection or one moment, RFC 9110, section 7.6.1).
NEVER_RECORDED: Final = frozenset(
    {
        "set-cookie",
        "authorization",
        "proxy-authorization",
        "www-authenticate",
        "proxy-authenticate",
        "date",
        "server",
        "connection",
        "keep-alive",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)


@dataclass(frozen=True)
class Policy:
    """What holds for one guarded view: the app's configuration, with the nearer options over it.

    Durations are seconds, sizes bytes. The fields are the ``IDEMPOTENCY_…`` keys in lower case; their
    meaning stands in the table of :mod:`flask_idempotency.config`.
    """

    header: str = "Idempotency-Key"
    key_min_length: int = 8
    methods: frozenset[str] = frozenset({"POST", "PATCH"})
    key: Callable[..., Any] | None = None
    scope: str | Callable[..., Any] | None = None
    fingerprint: Callable[..., Any] | tuple[str, ...] | None = None
    retention: float = 86_400.0
    lock_timeout: float = 30.0
    retry_after: float = 2.0
    wait: float = 0.0
    on_mismatch: str = "reject"
    mismatch_status: int = 422
    record: Callable[..., Any] | None = None
    redact: Callable[..., Any] | None = None
    on_error: str = "auto"
    stale: str = "reexecute"
    replay_header: str | None = "Idempotent-Replay"
    excluded_headers: frozenset[str] = field(default=frozenset())
    max_body: int = 1024 * 1024
    on_store_error: str = "reject"
    atomic: bool = False
    atomic_retries: int = 0
