"""What release 0.4 sends to the table for one key, with its own lists of columns; types' casts are left out."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from tests.support.apps import Shop

_WORDS = {
    "sqlite": {
        "now": "strftime('%Y-%m-%d %H\\:%M\\:%f', 'now') || '000'",
        "later": "strftime('%Y-%m-%d %H\\:%M\\:%f', 'now', printf('%+.3f seconds', :retention)) || '000'",
        "idle": "(julianday('now') - julianday(locked_at)) * 86400.0",
        "past": "(julianday('now') - julianday(expires_at)) * 86400.0",
        "json": ":headers",
        "skipping": "",
    },
    "postgresql": {
        "now": "clock_timestamp()",
        "later": "clock_timestamp() + CAST(:retention AS FLOAT) * interval '1 second'",
        "idle": "CAST(EXTRACT(epoch FROM clock_timestamp() - locked_at) AS FLOAT)",
        "past": "CAST(EXTRACT(epoch FROM clock_timestamp() - expires_at) AS FLOAT)",
        "json": "CAST(:headers AS JSONB)",
        "skipping": "FOR UPDATE SKIP LOCKED",
    },
}
_ABANDONED = "status = 'in_progress' AND {idle} > lock_timeout AND stale_policy = 'reexecute'"
_EXPIRED = "{past} >= 0 AND (status IN ('completed', 'released') OR " + _ABANDONED + ")"
_SEEN = "WHERE scope = :scope AND key = :key AND fencing_token = :seen"
_HELD = "WHERE id = :id AND scope = :scope AND key = :key AND fencing_token = :token"

STATEMENTS = {
    "insert": "INSERT INTO idempotency_keys (scope, key, request_method, request_path, request_fingerprint, "
    "fingerprint_version, status, fencing_token, attempts, locked_at, lock_timeout, stale_policy, expires_at, "
    "created_at, updated_at) VALUES (:scope, :key, 'POST', '/charges', :fingerprint, 1, 'in_progress', :token, 1, "
    "{now}, 30, 'reexecute', {later}, {now}, {now}) ON CONFLICT (scope, key) DO NOTHING",
    "find": "SELECT id, scope, key, status, fencing_token, request_method, request_path, request_fingerprint, "
    "fingerprint_version, attempts, lock_timeout, stale_policy, response_status, response_headers, response_body, "
    "{idle} AS idle, {past} AS past FROM idempotency_keys WHERE scope = :scope AND key = :key",
    "fresh": "UPDATE idempotency_keys SET request_method = 'POST', request_path = '/charges', request_fingerprint = "
    ":fingerprint, fingerprint_version = 1, status = 'in_progress', fencing_token = :token, attempts = 1, "
    "steps = NULL, response_status = NULL, response_headers = NULL, response_body = NULL, locked_at = {now}, "
    "lock_timeout = 30, stale_policy = 'reexecute', secret_id = NULL, expires_at = {later}, "
    "completed_at = NULL, created_at = {now}, updated_at = {now} " + _SEEN + " AND " + _EXPIRED,
    "takeover": "UPDATE idempotency_keys SET request_method = 'POST', request_path = '/charges', status = "
    "'in_progress', fencing_token = :token, attempts = attempts + 1, locked_at = {now}, lock_timeout = 30, "
    "stale_policy = 'reexecute', expires_at = {later}, updated_at = {now} " + _SEEN + " AND request_fingerprint = "
    ":fingerprint AND fingerprint_version = 1 AND (status = 'released' OR " + _ABANDONED + ")",
    "record": "UPDATE idempotency_keys SET status = 'completed', response_status = 201, response_headers = {json}, "
    "response_body = :body, expires_at = {later}, completed_at = {now}, updated_at = {now} " + _HELD + " AND status "
    "IN ('in_progress', 'completed')",
    "release": "DELETE FROM idempotency_keys " + _HELD + " AND status = 'in_progress' AND steps IS NULL AND secret_id "
    "IS NULL",
    "release_kept": "UPDATE idempotency_keys SET status = 'released', locked_at = {now}, updated_at = {now} " + _HELD
    + " AND status = 'in_progress'",
    "prune": "DELETE FROM idempotency_keys WHERE id IN (SELECT id FROM idempotency_keys WHERE " + _EXPIRED + " ORDER "
    "BY expires_at LIMIT 5000 {skipping})",
}  # fmt: skip


def sent(shop: Shop, name: str, **values: Any) -> tuple[int, list[Any]]:
    """Send one of the statements, as release 0.4 would, beside whatever the shop's own release sends.

    Returns how many rows it changed, and those that it found.
    """
    with shop.app.app_context():
        engine = shop.db.engine
    text = STATEMENTS[name].format(**_WORDS[engine.dialect.name])
    with engine.begin() as connection:
        statement = sa.text(text)
        wanted = {one: value for one, value in values.items() if one in statement._bindparams}
        result = connection.execute(statement, wanted)
        return result.rowcount, list(result) if result.returns_rows else []
