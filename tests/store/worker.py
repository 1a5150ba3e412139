"""A process of its own that claims keys: started by tests, told what to do on its command line."""

from __future__ import annotations

import sys

import sqlalchemy as sa

from flask_idempotency.claim import Claim
from flask_idempotency.store import SQLAlchemyStore
from flask_idempotency.testing import ask


def main(url: str, table_name: str, keys: str) -> None:
    """Say "ready", wait for a line, claim each key, and print the token that holds it, marked if it is one's own."""
    store = SQLAlchemyStore(sa.create_engine(url), sa.MetaData(), table_name=table_name)
    store.find("tenant-1", "warm-up")
    print("ready", flush=True)
    sys.stdin.readline()
    for number in range(int(keys)):
        found = store.claim(ask(key=f"key-{number}"))
        print(found.token, isinstance(found, Claim), flush=True)
    store.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
