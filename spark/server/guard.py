"""Who is let in: by key, by the name the server is called by, and by the web page that asks.

Web pages of other origins are refused whatever they send, unless they are allowed; those may read the answers, too.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.ground.errors import UsageError
from spark.apis.http import EXPECTED, error_response
from spark.server import page

_KEYLESS = page.PATHS | {"/health"}
# Headers that the clients of these APIs send beside those that browsers always allow.
_CLIENT_HEADER = re.compile(r"authorization|x-api-key|content-type|accept|(anthropic|openai|x-stainless)-[a-z0-9-]+")
_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://([a-z0-9._-]+|\[[0-9a-f:.]+\])(?::(\d{1,5}))?")
_HOST = re.compile(r"([a-z0-9._-]+|\[[0-9a-f:.]+\])(?::\d{0,5})?")  # of the header: browsers send nothing else
_PORTS = {"http": "80", "https": "443"}


def is_loopback(host: str) -> bool:
    """Whether a host is this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Guard:
    """Lets in who knows the key or, where there is none, who speaks to this machine by its local name.

    The second keeps a web page that has its own name resolve to 127.0.0.1 away from the server. Web pages of other
    origins are refused whatever they send, unless `allow_origins` has theirs: then they may read the answers, too.
    """

    def __init__(self, app: ASGIApp, api_key: str | None, allow_origins: Collection[str] = ()) -> None:
        self._app = app
        self._api_key = None if api_key is None else api_key.encode()
        self._origins = frozenset(allow_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request, or have the application do it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        answer = self._refusal(scope, headers)
        await (answer or self._app)(scope, receive, self._shared(headers, send) if self._origins else send)

    def _refusal(self, scope: Scope, headers: Headers) -> Response | None:
        if self._api_key is None and not is_loopback(_hostname(headers.get("host", "localhost"))):
            return error_response(scope, 403, "only requests to localhost are answered; other names need --api-key")
        if self._is_foreign(scope, headers):
            return error_response(scope, 403, "web pages of other origins are not answered; see --allow-origin")
        if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            return _preflight(headers)
        if self._api_key is not None and scope["path"] not in _KEYLESS:
            scheme, _, token = headers.get("authorization", "").partition(" ")
            given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
            if not hmac.compare_digest(given.encode("latin-1"), self._api_key):
                return error_response(scope, 401, "the API key is missing or wrong", "invalid_api_key")
        return None

    def _is_foreign(self, scope: Scope, headers: Headers) -> bool:
        """Whether a web page that is not ours had the browser send this; what is no browser says nothing of that."""
        if origins := headers.getlist("origin"):
            own = _origin(f"http://{headers.get('host', '')}")
            return any(not self._allows(origin) and (not own or _origin(origin) != own) for origin in origins)
        if headers.get("sec-fetch-site", "none") in ("none", "same-origin"):
            return False
        followed = scope["method"] in ("GET", "HEAD") and headers.get("sec-fetch-mode") == "navigate"
        return not (followed and scope["path"] in page.PATHS)  # a link to the page is no request of another page's

    def _allows(self, origin: str) -> bool:
        return _allows(origin, self._origins)

    def _shared(self, headers: Headers, send: Send) -> Send:
        """Send with what lets an allowed origin read the answer."""
        shared = sharing(headers, self._origins)
        vary = shared.pop("vary")

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                made = MutableHeaders(scope=message)
                made.add_vary_header(vary)
                made.update(shared)
            await send(message)

        return sending


def _allows(origin: str, allow_origins: Collection[str]) -> bool:
    return (_origin(origin) or origin) in allow_origins


def sharing(headers: Headers, allow_origins: Collection[str]) -> dict[str, str]:
    """The headers of an answer that let an allowed origin read it; none where no origin is allowed."""
    if not allow_origins:
        return {}
    allowed = [origin for origin in headers.getlist("origin") if _allows(origin, allow_origins)]
    if not allowed:
        return {"vary": "Origin"}
    return {
        "vary": "Origin",
        "access-control-allow-origin": allowed[0],
        "access-control-expose-headers": f"retry-after, {EXPECTED}",
    }


def _preflight(headers: Headers) -> Response:
    """Say what an allowed origin may send: what the clients of these APIs do."""
    asked = headers.get("access-control-request-headers", "").lower().split(",")
    known = [name for name in map(str.strip, asked) if _CLIENT_HEADER.fullmatch(name)]
    made = {
        "access-control-allow-methods": "GET, POST, OPTIONS",
        "access-control-allow-headers": ", ".join(known) or "authorization, content-type, x-api-key",
        "access-control-max-age": "600",
        "vary": "Access-Control-Request-Headers",
    }
    if headers.get("access-control-request-private-network") == "true":
        made["access-control-allow-private-network"] = "true"
    return Response(status_code=204, headers=made)


def allowed_origin(given: str) -> str:
    """Check an origin, and write it as browsers do; raises UsageError. `null` is that of files and sandboxes."""
    made = "null" if given == "null" else _origin(given.removesuffix("/"))
    if not made:
        raise UsageError(
            f"--allow-origin {given}: expected an origin, SCHEME://HOST[:PORT] without a path, or null",
            hint="a browser's console names it, as in http://localhost:3000",
        )
    return made


def _origin(text: str) -> str:
    """An origin as browsers write it; empty for what is none."""
    match = _ORIGIN.fullmatch(text.lower())
    if match is None:
        return ""
    scheme, host, port = match.groups()
    return f"{scheme}://{host}" + (f":{port}" if port and port != _PORTS.get(scheme) else "")


def _hostname(host: str) -> str:
    """The name in a Host header; empty for what is none, whatever else it may have in it."""
    match = _HOST.fullmatch(host.lower())
    return match[1].strip("[]") if match else ""
