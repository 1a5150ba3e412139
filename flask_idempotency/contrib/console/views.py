"""The pages. All of them read, and none writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from flask import Response, current_app, request

from ...claim import Status
from ...errors import RowUnreadable
from ...overview import older, ranked, recorded_of, steps_of
from ...store.survey import Detail, Filters, Summary
from . import answers, plots
from .addresses import unpacked
from .filters import Asked, asked, place
from .pages import options, page
from .refusals import KeyGone
from .store import app_state, survey
from .timeline import attempts, lives, timeline

#: Keys on one page.
PAGE: Final = 50

#: How many keys in progress are looked at for one page of live claims. More than these would all have to be past
#: their lease.
_LOOKED_AT: Final = 20 * PAGE

#: Rows of the table of endpoints. Of an app with more, those are left out whose keys were asked for again the least.
_ENDPOINTS: Final = 100


def overview() -> Response:
    """The whole table at a glance."""
    stats = survey().stats()
    drawn = [plots.of_statuses(stats), plots.of_stored(stats), plots.of_outcomes(stats.counts)]
    return page("overview.html", stats=stats, plots=[*drawn, plots.of_ages(stats.counts)], older=older(app_state()))


def endpoints() -> Response:
    """What retries came to, by endpoint."""
    found = ranked(app_state(), "endpoint")
    shown = found[:_ENDPOINTS]
    return page(
        "endpoints.html",
        found=shown,
        left_out=len(found) - len(shown),
        plots=[plots.of_endpoints(shown)],
        older=older(app_state()),
    )


def keys() -> Response:
    """Keys by filters, those stored last first."""
    query = asked(request.args)
    found: Sequence[Summary] = ()
    if not query.problems:
        found = survey().listed(query.filters, PAGE + 1, query.before)
    return _list("Keys", found, 400 if query.problems else 200, query=query, statuses=[one.value for one in Status])


def live() -> Response:
    """Claims whose lease is not over."""
    found, before, store = list[Summary](), place(request.args), survey()
    for _ in range(0, _LOOKED_AT, PAGE):
        some = store.listed(Filters(status=Status.IN_PROGRESS), PAGE, before)
        found += [one for one in some if not one.stale]
        if len(some) < PAGE or len(found) > PAGE:
            break
        before = some[-1].id
    return _list("Live claims", found, about="Their views may be running. A live holder renews its lease.")


def stale() -> Response:
    """Claims whose lease is over."""
    found = survey().listed(Filters(stale=True), PAGE + 1, place(request.args))
    about = "Their holders are gone. A retry takes such a claim over, or gets 409 where the claim's policy is reject."
    return _list("Claims past their lease", found, about=about)


def held() -> Response:
    """Keys whose outcome is unknown."""
    found = survey().listed(Filters(status=Status.HELD), PAGE + 1, place(request.args))
    return _list("Held keys", found, about="Their outcome is unknown. They wait for a person, and retries get 409.")


def key(scope: str, key: str) -> Response:
    """All that is stored of one key."""
    detail = found_detail(*named(scope, key))
    answer, steps, closed, bodies = None, None, "", options().bodies
    try:
        recorded = recorded_of(app_state(), detail)
        answer = None if recorded is None else answers.shown(recorded, bodies)
        steps = steps_of(app_state(), detail) if bodies else None
    except RowUnreadable as error:
        closed = str(error)  # the rest of the row can be read, and the key be released
    return page(
        "key.html",
        detail=detail,
        one=detail.summary,
        timeline=timeline(detail.summary),
        attempts=attempts(detail.summary),
        lives=lives(detail.summary),
        answer=answer,
        steps=steps,
        closed=closed,
    )


def body(scope: str, key: str) -> Response:
    """A recorded body as a file: its bytes, and nothing that a browser would show."""
    recorded = recorded_of(app_state(), found_detail(*named(scope, key)))
    pieces = None if recorded is None else answers.pieces(recorded, app_state().settings.body_store)
    if pieces is None:
        raise KeyGone
    response = current_app.response_class(pieces, mimetype="application/octet-stream")
    response.headers["Content-Disposition"] = "attachment; filename=body.bin"
    return response


# For the pages that write, too


def named(scope: str, key: str) -> tuple[str, str]:
    """The scope and key that an address means.

    :raises KeyGone: it means none.
    """
    where, what = unpacked(scope), unpacked(key)
    if where is None or what is None:
        raise KeyGone
    return where, what


def found_detail(scope: str, key: str) -> Detail:
    """All that is stored of one key.

    :raises KeyGone: there is no such key.
    :raises RowUnreadable: its row is corrupt.
    """
    detail = survey().detail(scope, key)
    if detail is None:
        raise KeyGone
    return detail


def _list(title: str, found: Sequence[Summary], status: int = 200, **values: Any) -> Response:
    more = len(found) > PAGE
    shown = found[:PAGE]
    query: Asked | None = values.pop("query", None)
    values = {"about": "", "statuses": (), **values}
    return page(
        "keys.html",
        status,
        title=title,
        found=shown,
        query=query,
        arguments={} if query is None else query.arguments(),
        older=shown[-1].id if more else None,
        begun="before" in request.args,
        **values,
    )
