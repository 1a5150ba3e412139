"""``python -m benchmarks [NAME …] [--quick]``: run benchmarks, all of them by default.

A benchmark is a module of this folder with a function ``main(quick: bool) -> int``, which returns the exit status.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import Final

from .servers import leave_out_foreign_settings

#: In the order in which they run.
NAMES: Final = ("paths", "others", "fingerprint", "growth", "startup", "memory")


def run(name: str, quick: bool) -> int:
    """Run one, and return its exit status."""
    return int(importlib.import_module(f"benchmarks.{name}").main(quick=quick))


def main() -> int:
    """Run what the command line names; the exit status is the worst of theirs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure what the promises cost.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(NAMES)}; all by default")
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run? The figures mean little")
    given = parser.parse_args()
    unknown = [name for name in given.names if name not in NAMES]
    if unknown:
        parser.error(f"no such benchmark: {', '.join(unknown)}")
    leave_out_foreign_settings()
    return max(run(name, given.quick) for name in given.names or NAMES)


if __name__ == "__main__":
    sys.exit(main())
