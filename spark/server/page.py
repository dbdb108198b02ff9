"""The page at `/`: a few files of this package, which load nothing from elsewhere.

They hold nothing secret and are served to whoever may connect; the events that the page shows are not.
"""

from __future__ import annotations

from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/rates.js": ("rates.js", "text/javascript; charset=utf-8"),
    "/requests.js": ("requests.js", "text/javascript; charset=utf-8"),
    "/text.js": ("text.js", "text/javascript; charset=utf-8"),
}
PATHS = frozenset(_FILES)
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


def routes() -> list[Route]:
    """Make the routes of the page's files, which are read once."""
    folder = files("spark.server") / "static"

    def route(path: str, name: str, media_type: str) -> Route:
        content = (folder / name).read_bytes()

        async def answer(request: Request) -> Response:
            return Response(content, media_type=media_type, headers=_HEADERS)

        return Route(path, answer)

    return [route(path, name, media_type) for path, (name, media_type) in _FILES.items()]
