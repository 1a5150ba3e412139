"""How Sphinx builds the documentation: ``make docs``."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
# The tables are generated from the package beside this folder, and the directive that does it lives in _ext.
sys.path[:0] = [str(HERE.parent), str(HERE / "_ext")]

from flask_idempotency import __version__  # noqa: E402

project = "Flask-Idempotency"
author = "Flask-Idempotency maintainers"
copyright = f"2026, {author}"
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "generated"]
exclude_patterns = ["_build", "_ext"]
nitpicky = False

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"

html_theme = "furo"
html_title = f"Flask-Idempotency {release}"
