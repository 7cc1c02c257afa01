"""The page at ``/``: a chat with live charts, in static files."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    **{
        f"/{name}.js": (f"{name}.js", "text/javascript; charset=utf-8")
        for name in ("page", "markdown", "chats", "images", "charts", "replicas")
    },
}

RUNNING = "Ollama is running"
"""What programs find at ``/``, which accept anything: a sign that they know."""

HEADERS = {
    # Nothing but this server is asked, so the page works offline; no script may turn
    # text, as of an answer, into markup.
    "content-security-policy": "default-src 'self'; img-src data:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'; "
    "object-src 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def page_routes() -> list[Route]:
    """Return the routes of the page's files."""
    return [Route(path, _file, methods=["GET"]) for path in FILES]


async def _file(request: Request) -> Response:
    name, kind = FILES[request.scope["path"]]
    accepted = request.headers.get("accept", "text/html")
    if name == "index.html" and "text/html" not in accepted:
        return PlainTextResponse(RUNNING)
    return Response(_read(name), headers=HEADERS, media_type=kind)


@cache
def _read(name: str) -> bytes:
    return (files("inl.serve") / "page" / name).read_bytes()
