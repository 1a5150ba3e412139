"""How Sphinx builds the documentation: ``make docs``."""

import sys
from pathlib import Path

# The Python API is read from the package beside this folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from flask_idempotency import __version__

project = "Flask-Idempotency"
author = "Flask-Idempotency maintainers"
copyright = f"2026, {author}"
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build", "_ext"]
nitpicky = False

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"

html_theme = "furo"
html_title = f"Flask-Idempotency {release}"
