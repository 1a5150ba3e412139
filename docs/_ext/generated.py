"""The directive ``{generated}``: a part of a page that is made from the package's own tables, see ``tables.py``."""

from __future__ import annotations

from typing import Any

import tables
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective


class Generated(SphinxDirective):
    """Its argument names the table."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        self.env.note_reread()  # the package may have changed although the page has not
        return self.parse_text_to_nodes(tables.TABLES[self.arguments[0]](), allow_section_headings=True)


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.add_directive("generated", Generated)
    return {"parallel_read_safe": True}
