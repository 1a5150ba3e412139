"""Figures of the project's own: what its promises cost."""
