"""Requests by HTTP that stay with the server that they are for."""

from __future__ import annotations

import urllib.request
from typing import Any


def make_opener() -> urllib.request.OpenerDirector:
    """Opens URLs without following redirections, which would take a request's headers, a token
    among them, to another server; each is an `HTTPError`."""
    return urllib.request.build_opener(_NoRedirect)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any) -> None:
        return None
