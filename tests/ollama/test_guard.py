"""Who may talk to the front."""

import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import ClientResponse, ClientSession, web

from proxy.errors import ConfigError
from proxy.ollama.guard import (
    GuardOptions,
    OriginRules,
    install_guard,
    is_host_allowed,
)

Ask = Callable[..., Awaitable[ClientResponse]]


async def _serve(options: GuardOptions) -> AsyncIterator[Ask]:
    """Run a guarded application; yield a function that sends requests to it."""
    app = web.Application()
    install_guard(app, options)

    async def handle(request: web.Request) -> web.Response:
        if request.query:
            raise KeyError("secret")
        return web.Response(text="ok")

    app.add_routes([web.post("/api/chat", handle), web.get("/api/tags", handle)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    async with ClientSession() as session:

        async def ask(
            method: str, path: str = "/api/chat", **headers: str
        ) -> ClientResponse:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            return await session.request(
                method,
                f"http://127.0.0.1:{port}{path}",
                headers=named,
                allow_redirects=False,
            )

        yield ask
    await runner.cleanup()


@pytest.fixture
async def ask() -> AsyncIterator[Ask]:
    """Send requests to a front on loopback with one extra origin."""
    options = GuardOptions(
        is_loopback_listener=True, origins=("https://*.kvbus.example",)
    )
    async for function in _serve(options):
        yield function


@pytest.fixture
async def ask_open() -> AsyncIterator[Ask]:
    """Send requests to a front that listens openly and allows all origins."""
    async for function in _serve(
        GuardOptions(is_loopback_listener=False, origins=("*",))
    ):
        yield function


ORIGINS = {
    None: True,
    "http://localhost": True,
    "https://localhost:3000": True,
    "http://127.0.0.1:8080": True,
    "http://0.0.0.0": True,
    "app://x": True,
    "vscode-webview://abc": True,
    "https://ui.kvbus.example": True,
    "null": False,
    "https://evil.test": False,
    "http://localhost.evil.test": False,
    "http://localhostx": False,
    "https://kvbus.example": False,
}
HOSTS = {
    "localhost": True,
    "LOCALHOST:11434": True,
    "127.0.0.1:11434": True,
    "[::1]:11434": True,
    "10.1.2.3": True,
    "0.0.0.0": True,
    "box.local": True,
    "evil.test": False,
    "evil.test:11434": False,
    "8.8.8.8": False,
    "localhost.evil.test": False,
}


@pytest.mark.parametrize("method", ["POST", "OPTIONS"])
@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("origin", ORIGINS)
async def test_matrix(ask: Ask, method: str, host: str, origin: str | None) -> None:
    """Foreign origins and hosts get an empty 403, allowed preflights 204."""
    headers = {"Host": host} | ({"Origin": origin} if origin else {})
    response = await ask(method, **headers)
    body = await response.read()
    allowed = response.headers.get("Access-Control-Allow-Origin")
    if not ORIGINS[origin]:
        assert (response.status, body, allowed) == (403, b"", None)
        return
    is_own = origin == f"http://{host}"
    assert allowed == (None if is_own else origin)
    if method == "OPTIONS" and origin and not is_own:
        assert response.status == 204
        assert "POST" in response.headers["Access-Control-Allow-Methods"]
        assert "OpenAI-Beta" in response.headers["Access-Control-Allow-Headers"]
        assert response.headers["Access-Control-Max-Age"] == "43200"
        assert "Origin" in response.headers.getall("Vary")
    elif not HOSTS[host]:
        assert (response.status, body) == (403, b"")
    elif method == "OPTIONS":
        # names get 204, addresses go on to the router, as in Ollama
        is_address = host[0] in "[1280"
        assert response.status == (405 if is_address else 204)
    else:
        assert (response.status, body) == (200, b"ok")


async def test_the_own_address_is_no_foreign_origin(ask: Ask) -> None:
    """A page that kvbus itself could have served is let in without CORS headers."""
    response = await ask("POST", Host="box.local:1", Origin="http://box.local:1")
    assert response.status == 200
    assert "Access-Control-Allow-Origin" not in response.headers


async def test_a_rebound_name_is_stopped_by_the_host_check(ask: Ask) -> None:
    """A page whose own name points to us passes as same-origin, but not as host."""
    response = await ask("POST", Host="evil.test", Origin="http://evil.test")
    assert (response.status, await response.read()) == (403, b"")


async def test_an_open_listener_checks_no_host(ask_open: Ask) -> None:
    """Where the front is reachable by other names, names are no protection."""
    response = await ask_open("POST", Host="kv.example", Origin="https://any.test")
    assert response.status == 200
    assert response.headers["Access-Control-Allow-Origin"] == "*"
    preflight = await ask_open("OPTIONS", Host="kv.example", Origin="https://a.test")
    assert preflight.status == 204
    assert preflight.headers["Access-Control-Allow-Origin"] == "*"


async def test_errors_carry_the_origin_headers(ask: Ask) -> None:
    """A page may read the error that it gets."""
    response = await ask("GET", "/nowhere", Origin="http://localhost")
    assert response.status == 404
    assert response.headers["Access-Control-Allow-Origin"] == "http://localhost"


async def test_unexpected_errors_tell_nothing(
    ask: Ask, caplog: pytest.LogCaptureFixture
) -> None:
    """A fault of ours is a 500 of Ollama's shape; what it was is in the log."""
    response = await ask("POST", "/api/chat?fail=1")
    assert response.status == 500
    assert await response.json() == {"error": "internal error (KeyError): see the log"}
    assert "KeyError" in caplog.text


async def test_the_router_answers_like_ollamas(ask: Ask) -> None:
    """Unknown paths, wrong verbs and slashes at the end get a plain text each."""
    response = await ask("GET", "/api/nowhere")
    assert response.status == 404
    assert response.headers["Content-Type"] == "text/plain"
    assert await response.text() == "404 page not found"
    response = await ask("GET", "/api/chat")
    assert (response.status, await response.text()) == (405, "405 method not allowed")
    response = await ask("GET", "/api/tags/?a=b")
    assert (response.status, response.headers["Location"]) == (301, "/api/tags?a=b")
    response = await ask("POST", "/api/chat/")
    assert (response.status, response.headers["Location"]) == (307, "/api/chat")
    response = await ask("GET", "/api/chat/")
    assert response.status == 404
    response = await ask("GET", "//api/tags")
    assert response.status == 404


@pytest.mark.parametrize(
    "host", ["", "[::1]", "::1", socket.gethostname(), "a.localhost", "a.internal"]
)
def test_names_of_this_machine(host: str) -> None:
    """The empty host, loopback addresses and local names are ours."""
    assert is_host_allowed(host)


@pytest.mark.parametrize(
    "host", ["local", "internal.evil.test", "2001:db8::1", "224.0.0.1", "[::1", "a:b:c"]
)
def test_names_of_others(host: str) -> None:
    """Anything else is not."""
    assert not is_host_allowed(host)


@pytest.mark.parametrize("origin", ["localhost", "http://*:*", "", "*.example"])
def test_unclear_origins_are_a_configuration_error(origin: str) -> None:
    """An origin setting that would mean something unexpected is refused at start."""
    with pytest.raises(ConfigError, match="origin"):
        GuardOptions(is_loopback_listener=True, origins=(origin,))


def test_dots_in_origins_are_plain() -> None:
    """Only the star is special in an origin."""
    rules = OriginRules(["https://a.b"])
    assert rules.allows("https://a.b")
    assert not rules.allows("https://aXb")
