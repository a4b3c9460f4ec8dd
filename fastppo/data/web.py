"""Send HTTP requests without following redirects."""

from __future__ import annotations

import urllib.request
from typing import Any


def make_opener() -> urllib.request.OpenerDirector:
    """Return an opener that raises `HTTPError` for a redirect.

    Following it would send the request's headers, access tokens included, to another server.
    """
    return urllib.request.build_opener(_NoRedirect)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any) -> None:
        return None
