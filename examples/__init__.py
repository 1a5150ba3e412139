"""Apps that show Flask-Idempotency at work, one folder each."""
