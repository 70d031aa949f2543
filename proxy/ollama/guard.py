"""Who may talk to the front, and what a request that goes wrong gets.

Ollama has no passwords; two checks keep web pages of strangers away, and as kvbus
is the one who listens, it makes them itself:

1. `Origin`: no such header, or the listener's own address: nothing happens. A
   foreign one gets 403 with an empty body whatever the method; an allowed one is
   echoed, and its preflight is answered with 204.
2. `Host`, only where we listen on loopback: a name that is not this machine's gets
   403 with an empty body. It stops pages that point their own name to 127.0.0.1.
3. Every exception becomes an answer here, before those headers are added.
4. A request whose end two servers could see at two places is refused, and its
   connection ended: one may stand before us. The parser refuses most of them; what it
   lets pass are other transfer codings than `chunked`, and versions without any.
"""

import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from aiohttp import HttpVersion10, HttpVersion11, web

from proxy.errors import ConfigError
from proxy.ollama.failures import failure_response, plain_response, to_failure

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_PREFLIGHT_METHODS = "GET,POST,PUT,PATCH,DELETE,HEAD,OPTIONS"
_STAINLESS = (
    "lang",
    "package-version",
    "os",
    "arch",
    "retry-count",
    "runtime",
    "runtime-version",
    "async",
    "helper-method",
    "poll-helper",
    "custom-poll-interval",
    "timeout",
)
_PREFLIGHT_HEADERS = ",".join(
    [
        "Authorization",
        "Content-Type",
        "User-Agent",
        "Accept",
        "X-Requested-With",
        "OpenAI-Beta",
        *(f"x-stainless-{name}" for name in _STAINLESS),
    ]
)
_PREFLIGHT_SECONDS = "43200"

_LOCAL_SUFFIXES = (".localhost", ".local", ".internal")
_PRIVATE_NETWORKS = tuple(
    ipaddress.ip_network(text)
    for text in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7")
)


def built_in_origins() -> tuple[str, ...]:
    """List the origins that Ollama always allows."""
    hosts = ("localhost", "127.0.0.1", "0.0.0.0")  # noqa: S104 - an origin's name
    web_pages = [
        f"{scheme}://{host}{port}"
        for host in hosts
        for scheme in ("http", "https")
        for port in ("", ":*")
    ]
    apps = ("app", "file", "tauri", "vscode-webview", "vscode-file")
    return (*web_pages, *(f"{scheme}://*" for scheme in apps))


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardOptions:
    """Whom the front lets in."""

    is_loopback_listener: bool
    """Whether every listening socket is bound to loopback."""
    origins: tuple[str, ...] = ()
    """Added to the built-in ones; `*` inside an entry stands for anything."""

    def __post_init__(self) -> None:
        for origin in self.origins:
            if origin != "*" and (origin.count("*") > 1 or "://" not in origin):
                raise ConfigError(
                    f"origin {origin!r} must look like http://host:port, with at "
                    "most one *, or be * alone"
                )


class OriginRules:
    """Which origins are allowed."""

    def __init__(self, extra: Iterable[str]) -> None:
        entries = [*built_in_origins(), *(origin.lower() for origin in extra)]
        self.allows_all = "*" in entries
        self._pattern = re.compile(
            "|".join(re.escape(entry).replace(r"\*", ".*") for entry in entries),
            re.DOTALL,
        )

    def allows(self, origin: str) -> bool:
        """Whether a page of this origin may talk to us."""
        return self.allows_all or self._pattern.fullmatch(origin) is not None


def is_host_allowed(host: str) -> bool:
    """Whether a `Host` header names this machine. Address literals are not names."""
    name = _host_name(host).lower()
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return (
            name in ("", "localhost")
            or name == socket.gethostname().lower()
            or name.endswith(_LOCAL_SUFFIXES)
        )
    return (
        address.is_loopback
        or address.is_unspecified
        or any(address in network for network in _PRIVATE_NETWORKS)
        or _is_own(address)
    )


def _host_name(host: str) -> str:
    """Cut the port, and the brackets of an IPv6 address."""
    match = re.fullmatch(r"\[([^\]]*)\](?::\d*)?", host)
    if match:
        return match[1]
    name, colon, _ = host.rpartition(":")
    return name if colon and ":" not in name else host


def _is_own(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Whether an interface of this machine has the address: it can be bound."""
    if address.is_multicast:
        return False
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((str(address), 0))
    except OSError:
        return False
    return True


def install_guard(app: web.Application, options: GuardOptions) -> None:
    """Put the checks and the error answers around all routes of `app`."""
    rules = OriginRules(options.origins)

    async def add_origin_headers(
        request: web.Request, response: web.StreamResponse
    ) -> None:
        origin = _foreign_origin(request)
        if not origin or not rules.allows(origin):
            return
        if rules.allows_all:
            response.headers["Access-Control-Allow-Origin"] = "*"
        else:
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers.add("Vary", "Origin")

    @web.middleware
    async def check_framing(
        request: web.Request, handler: Handler
    ) -> web.StreamResponse:
        refusal = _refuse_framing(request)
        if refusal is None:
            return await handler(request)
        refusal.force_close()
        return refusal

    @web.middleware
    async def check_origin(
        request: web.Request, handler: Handler
    ) -> web.StreamResponse:
        origin = _foreign_origin(request)
        if not origin:
            return await handler(request)
        if not rules.allows(origin):
            return _empty(403)
        if request.method == "OPTIONS":
            return _preflight(allows_all=rules.allows_all)
        return await handler(request)

    @web.middleware
    async def check_host(request: web.Request, handler: Handler) -> web.StreamResponse:
        host = _claimed_host(request)
        if not is_host_allowed(host):
            return _empty(403)
        if request.method == "OPTIONS" and not _is_address(host):
            return _empty(204)
        return await handler(request)

    app.on_response_prepare.append(_hide_software)
    app.on_response_prepare.append(add_origin_headers)
    app.middlewares.append(check_framing)
    app.middlewares.append(check_origin)
    if options.is_loopback_listener:
        app.middlewares.append(check_host)
    app.middlewares.append(answer_errors)


async def _hide_software(request: web.Request, response: web.StreamResponse) -> None:
    """Tell strangers no version numbers; Ollama sends no such header either."""
    response.headers.popall("Server", None)


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn exceptions into answers of Ollama's shape, or its router's plain texts."""
    try:
        return await handler(request)
    except web.HTTPNotFound:
        return await _redirect_slash(request) or plain_response(
            404, "404 page not found"
        )
    except web.HTTPMethodNotAllowed as exc:
        response = plain_response(405, "405 method not allowed")
        response.headers["Allow"] = ", ".join(sorted(exc.allowed_methods))
        return response
    except web.HTTPException as exc:
        if exc.status < 400:
            raise
        return failure_response(to_failure(exc))
    except Exception as exc:  # the root of a request: nothing may escape
        return failure_response(to_failure(exc))


async def _redirect_slash(request: web.Request) -> web.Response | None:
    """Send a path with one slash too many to the route without it, as Ollama does."""
    path = request.path
    if len(path) < 2 or not path.endswith("/") or path.startswith("//"):
        return None
    shorter = request.clone(rel_url=request.rel_url.with_path(path[:-1], encoded=True))
    match = await request.app.router.resolve(shorter)
    if match.http_exception is not None:
        return None
    target = request.rel_url.raw_path[:-1]
    if request.rel_url.raw_query_string:
        target += f"?{request.rel_url.raw_query_string}"
    status = 301 if request.method == "GET" else 307
    return web.Response(status=status, headers={"Location": target})


def _refuse_framing(request: web.Request) -> web.Response | None:
    """Answer a request whose body has no certain end, with Go's statuses."""
    if request.version not in (HttpVersion10, HttpVersion11):
        return plain_response(505, "505 HTTP Version Not Supported")
    codings = request.headers.getall("Transfer-Encoding", ())
    if not codings:
        return None
    if request.version == HttpVersion10:
        return plain_response(400, "400 Bad Request: HTTP/1.0 has no transfer codings")
    if [coding.lower() for coding in codings] != ["chunked"]:
        return plain_response(501, "501 Unsupported transfer encoding")
    return None


def _foreign_origin(request: web.Request) -> str:
    """Tell the `Origin`, `""` where there is none or it is our own address."""
    origin = request.headers.get("Origin", "")
    host = _claimed_host(request)
    return "" if origin in (f"http://{host}", f"https://{host}") else origin


def _claimed_host(request: web.Request) -> str:
    """Tell whom the client believes to talk to; a full URL outranks `Host`."""
    if request.raw_path.startswith("/") or "://" not in request.raw_path:
        return request.headers.get("Host", "")
    return request.url.authority


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(_host_name(host))
    except ValueError:
        return False
    return True


def _preflight(*, allows_all: bool) -> web.Response:
    response = _empty(204)
    response.headers["Access-Control-Allow-Methods"] = _PREFLIGHT_METHODS
    response.headers["Access-Control-Allow-Headers"] = _PREFLIGHT_HEADERS
    response.headers["Access-Control-Max-Age"] = _PREFLIGHT_SECONDS
    if not allows_all:
        response.headers.add("Vary", "Access-Control-Request-Method")
        response.headers.add("Vary", "Access-Control-Request-Headers")
    return response


def _empty(status: int) -> web.Response:
    return web.Response(status=status)
