"""The tests of Flask-Idempotency, a package so that ``tests.support`` is found by tests and by server processes."""
