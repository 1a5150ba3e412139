"""A proof by attack: clients that retry, faults that never stop, and a checker of what all of them saw.

:mod:`~tests.acceptance.proof.run` puts it together. The rest can be read apart: the app and its payment provider,
the clients, the proxy that cuts answers, the faults, the history, and the checker, which is a function of a history.
"""
