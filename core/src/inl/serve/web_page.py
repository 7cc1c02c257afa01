"""The page at ``/``: a chat with live charts, in three static files."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}

HEADERS = {
    # Nothing but this server is asked, so the page works offline.
    "content-security-policy": "default-src 'self'; img-src data:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def page_routes() -> list[Route]:
    """Return the routes of the page's files."""
    return [Route(path, _file, methods=["GET"]) for path in FILES]


async def _file(request: Request) -> Response:
    name, kind = FILES[request.scope["path"]]
    return Response(_read(name), headers=HEADERS, media_type=kind)


@cache
def _read(name: str) -> bytes:
    return (files("inl.serve") / "page" / name).read_bytes()
