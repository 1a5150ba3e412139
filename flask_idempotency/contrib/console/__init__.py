"""Pages for operators: which keys are kept, how they went, which wait for a person, and what retries come to.

A blueprint that an app registers where it wants it. It refuses to be made without a function that says who may see it.
"""

from .blueprint import console_blueprint

__all__ = ["console_blueprint"]
