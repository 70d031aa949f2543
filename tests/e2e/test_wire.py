"""What goes over the socket to a real kvbus: framings, paths, bodies, JSON bombs."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e import raw
from tests.e2e.processes import Kvbus
from tests.e2e.raw import CHUNKED, CLOSE, HOST, chunked, sized, write

GENERATES = (
    "/api/generate",
    "/api/chat",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
)
HI = [{"role": "user", "content": "Hi"}]
BODY = (
    b'{"model":"tiny","prompt":"Say hi.","raw":true,"stream":false,'
    b'"options":{"num_predict":2,"temperature":0}}'
)
LENGTH = sized(BODY)
CHUNKS = chunked(BODY)
GET = b"GET %b HTTP/1.1"


@pytest.fixture(scope="module")
def served(models: dict[str, Path], cache_dir: Path) -> Iterator[Kvbus]:
    """Return one kvbus with two models."""
    with Kvbus(cache_dir) as kvbus:
        kvbus.start(
            "--model", f"tiny={models['tiny']}",
            "--model", f"endless={models['endless']}",
            "--store", "none",
        )  # fmt: skip
        yield kvbus


def num_turns(kvbus: Kvbus) -> int:
    """Count the requests that have come to a runner."""
    return kvbus.log_text().count(" event=turn ")


def body_of(path: str, **fields: Any) -> dict[str, Any]:  # noqa: ANN401 - any JSON
    """Make a short request that the route takes."""
    native = path.startswith("/api")
    return {
        "model": "tiny",
        "stream": False,
        **({"options": {"num_predict": 2}} if native else {"max_tokens": 2}),
        **({"prompt": "Hi"} if path in ("/api/generate", "/v1/completions") else {}),
        **({"messages": HI} if path.endswith(("chat", "ompletions", "ages")) else {}),
        **({"input": "Hi"} if path.endswith("responses") else {}),
        **fields,
    }


# -- framing ----------------------------------------------------------------------

REFUSED: dict[str, tuple[int, bytes]] = {
    "length and chunks": (400, write(CHUNKS, LENGTH, CHUNKED)),
    "chunks and length": (400, write(CHUNKS, CHUNKED, LENGTH)),
    "two lengths": (400, write(BODY, LENGTH, b"Content-Length: 5")),
    "the same length twice": (400, write(BODY, LENGTH, LENGTH)),
    "a list of lengths": (400, write(BODY, LENGTH + b", " + LENGTH.split()[1])),
    "length with a sign": (400, write(BODY, b"Content-Length: +106")),
    "length in hex": (400, write(BODY, b"Content-Length: 0x6a")),
    "length of nothing": (400, write(BODY, b"Content-Length: ")),
    "length beyond 64 bits": (400, write(BODY, b"Content-Length: " + b"9" * 30)),
    "length after a tab": (400, write(BODY, LENGTH.replace(b" ", b"\x0b"))),
    "blank before a colon": (400, write(CHUNKS, b"Transfer-Encoding : chunked")),
    "coding of another name": (400, write(CHUNKS, b"Transfer-Encoding: xchunked")),
    "coding in quotes": (400, write(CHUNKS, b'Transfer-Encoding: "chunked"')),
    "coding with a zero": (400, write(CHUNKS, CHUNKED + b"\0")),
    "coding on a folded line": (400, write(CHUNKS, b"Transfer-Encoding:\r\n chunked")),
    "coding twice": (400, write(CHUNKS, CHUNKED, CHUNKED)),
    "coding taken back": (400, write(CHUNKS, CHUNKED, b"Transfer-Encoding: identity")),
    "coding after a comma": (501, write(CHUNKS, b"Transfer-Encoding: ,chunked")),
    "coding before a comma": (400, write(CHUNKS, b"Transfer-Encoding: chunked,")),
    "two codings": (501, write(CHUNKS, b"Transfer-Encoding: gzip, chunked")),
    "chunks in HTTP/1.0": (
        400,
        write(CHUNKS, CHUNKED, start=b"POST /api/generate HTTP/1.0"),
    ),
    "size with a sign": (400, write(b"+5\r\nhello\r\n0\r\n\r\n", CHUNKED)),
    "size below nothing": (400, write(b"-5\r\nhello\r\n0\r\n\r\n", CHUNKED)),
    "size after a blank": (400, write(b" 5\r\nhello\r\n0\r\n\r\n", CHUNKED)),
    "size with a prefix": (400, write(b"0x5\r\nhello\r\n0\r\n\r\n", CHUNKED)),
    "no size": (400, write(b"\r\nhello\r\n0\r\n\r\n", CHUNKED)),
    "size beyond 64 bits": (400, write(b"f" * 20 + b"\r\nhello", CHUNKED)),
    "chunk longer than its size": (400, write(b"5\r\nhello!\r\n0\r\n\r\n", CHUNKED)),
    "chunks without CR": (400, write(CHUNKS.replace(b"\r", b""), CHUNKED)),
    "extension with LF": (400, write(chunked(BODY, extension=b";a\nb"), CHUNKED)),
    "length in a trailer": (
        400,
        write(chunked(BODY, trailers=b"Content-Length: 3\r\n"), CHUNKED),
    ),
    "folded header": (400, write(BODY, LENGTH, b"X-A: b\r\n c")),
    "zero in a header": (400, write(BODY, LENGTH, b"X-A: a\0b")),
    "CR in a header": (400, write(BODY, LENGTH, b"X-A: a\rb")),
    "a name that is no ASCII": (400, write(BODY, LENGTH, b"X-\xe9: b")),
    "a header without a name": (400, write(BODY, LENGTH, b": b")),
    "a header without a colon": (400, write(BODY, LENGTH, b"XY")),
    "lines without CR": (400, write(BODY, LENGTH).replace(b"\r\n", b"\n")),
    "a header of 100 KB": (400, write(BODY, LENGTH, b"X-A: " + b"a" * 100_000)),
    "5,000 headers": (400, write(BODY, LENGTH, *[b"X-A: 1"] * 5000)),
    "no host": (400, write(BODY, LENGTH, host=(CLOSE,))),
    "two hosts": (400, write(BODY, LENGTH, HOST)),
    "HTTP/1.2": (400, write(BODY, LENGTH, start=b"POST /api/generate HTTP/1.2")),
    "HTTP/2's own beginning": (400, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    "TLS": (400, bytes.fromhex("1603010200010001fc0303") + b"a" * 100),
    "a path without a slash": (400, write(BODY, LENGTH, start=b"POST api HTTP/1.1")),
    "a port of a URL": (
        400,
        write(start=b"GET http://localhost:99999/api/tags HTTP/1.1"),
    ),
}
"""Each has one status, and no runner hears of it."""


@pytest.mark.parametrize("name", REFUSED)
def test_framings_in_doubt_are_refused(served: Kvbus, name: str) -> None:
    """What two servers could read in two ways gets one status, and ends there."""
    status, data = REFUSED[name]
    before = num_turns(served)
    data = data.replace(CLOSE + b"\r\n", b"")
    reply = raw.talk(served.url, data + write(BODY, LENGTH))
    assert raw.head_of(reply)[0] == status
    assert reply.startswith(b"HTTP/")
    assert reply.count(b"\r\nContent-Length:") == 1
    assert b'"done":true' not in reply
    assert num_turns(served) == before


@pytest.mark.parametrize("version", [b"HTTP/2.0", b"HTTP/0.9"])
def test_other_versions_are_refused(served: Kvbus, version: bytes) -> None:
    """The parser would take them; nobody knows what they mean by a body."""
    data = write(BODY, LENGTH, start=b"POST /api/generate " + version, host=(HOST,))
    before = num_turns(served)
    assert raw.head_of(raw.talk(served.url, data))[0] == 505
    assert num_turns(served) == before


READ: dict[str, bytes] = {
    "a length": write(BODY, LENGTH),
    "chunks": write(CHUNKS, CHUNKED),
    "chunks in capitals": write(CHUNKS, b"transfer-encoding:\tCHUNKED"),
    "extensions": write(chunked(BODY, extension=b';a=b;c="d"'), CHUNKED),
    "a long extension": write(chunked(BODY, extension=b";" + b"x" * 50_000), CHUNKED),
    "zeros before a size": write(
        b"0" * 30 + b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY), CHUNKED
    ),
    "trailers": write(chunked(BODY, trailers=b"X-T: 1\r\n"), CHUNKED),
    "HTTP/1.0": write(BODY, LENGTH, start=b"POST /api/generate HTTP/1.0"),
    "HTTP/1.0 without a host": write(
        BODY, LENGTH, start=b"POST /api/generate HTTP/1.0", host=()
    ),
    "an empty host": write(BODY, LENGTH, host=(b"Host:", CLOSE)),
    "a header of 60 KB": write(BODY, LENGTH, b"Authorization: " + b"a" * 60_000),
    "a header that is no ASCII": write(BODY, LENGTH, b"X-User: \xff\xc3\xa9"),
    "a full URL": write(
        BODY, LENGTH, start=b"POST http://a.local/api/generate HTTP/1.1"
    ),
    "a query of 60 KB": write(
        BODY, LENGTH, start=b"POST /api/generate?%b HTTP/1.1" % (b"a" * 60_000)
    ),
    "blank lines before": b"\r\n\r\n" + write(BODY, LENGTH),
    "an upgrade to HTTP/2": write(
        BODY, LENGTH, b"Upgrade: h2c", b"HTTP2-Settings: AAMA", host=(HOST, CLOSE)
    ),
    "names of headers in Connection": write(
        BODY, LENGTH, host=(HOST, b"Connection: close, Content-Length, Host")
    ),
    "an expectation": write(BODY, LENGTH, b"Expect: 100-continue"),
    "a coding of the content, as Ollama": write(BODY, LENGTH, b"Content-Encoding: x"),
}
"""Each is the same request."""


@pytest.mark.parametrize("name", READ)
def test_framings_beyond_doubt_are_read(served: Kvbus, name: str) -> None:
    """The runner gets the body that we make, so the reply is the same for all."""
    expected = httpx.post(f"{served.url}/api/generate", content=BODY, trust_env=False)
    reply = raw.talk(served.url, READ[name])
    reply = reply.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
    status, fields = raw.head_of(reply)
    assert status == 200
    assert sum(line.startswith(b"content-length:") for line in fields) == 1
    told = json.loads(reply.partition(b"\r\n\r\n")[2])
    for key in ("response", "prompt_eval_count", "done_reason"):
        assert told[key] == expected.json()[key]


def test_bodies_cut_short_reach_no_runner(served: Kvbus) -> None:
    """A client that leaves in the middle of its body has asked for nothing."""
    before = num_turns(served)
    for data in (
        write(BODY[:-1], LENGTH),
        write(CHUNKS[:-2], CHUNKED),
        write(b"7fffffffffffffff\r\n" + BODY, CHUNKED),
        write(BODY, b"Content-Length: 9000000000000000000"),
    ):
        with raw.connect(served.url) as connection:
            connection.sendall(data)
    gone = 'kvbus_requests_in_flight{route="/api/generate"} 0.0'
    metrics = f"{served.url}/metrics"
    served.wait(
        lambda: gone in httpx.get(metrics, trust_env=False).text, what="the end of all"
    )
    assert num_turns(served) == before


def test_pipelined_requests_are_answered_in_order(served: Kvbus) -> None:
    """One after the other, each on its own; what follows a refusal is not read."""
    keep = (HOST,)
    one = write(BODY, LENGTH, host=keep)
    last = write(start=GET % b"/api/version")
    reply = raw.talk(served.url, one + write(CHUNKS, CHUNKED, host=keep) + last)
    assert reply.count(b"HTTP/1.1 200 OK") == 3
    assert reply.rindex(b'"done":true') < reply.index(b'"version"')
    reply = raw.talk(served.url, write(BODY, LENGTH, LENGTH, host=keep) + last)
    assert b'"version"' not in reply


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("path", GENERATES)
def test_replies_have_one_framing_and_no_headers_of_the_hop(
    served: Kvbus, path: str, is_streamed: bool
) -> None:
    """Of the runner's own headers none comes through."""
    reply = raw.talk(
        served.url,
        raw.post(path, body_of(path, stream=is_streamed)).replace(
            HOST, HOST + b"\r\nKeep-Alive: x\r\nTE: trailers\r\n" + CLOSE, 1
        ),
    )
    status, fields = raw.head_of(reply)
    names = [field.partition(b":")[0] for field in fields]
    assert status == 200
    framings = [n for n in names if n in (b"content-length", b"transfer-encoding")]
    assert framings == [b"transfer-encoding" if is_streamed else b"content-length"]
    assert len(names) == len(set(names))
    assert not {b"keep-alive", b"te", b"trailer", b"upgrade", b"server"} & set(names)
    assert fields.count(b"connection: close") == 1
    if is_streamed:
        assert b"x-accel-buffering" in names
        assert reply.endswith(b"\r\n0\r\n\r\n")


@pytest.mark.parametrize(
    ("path", "status"),
    [
        (b"/api/tags", 200),
        (b"/api/tags?x=1", 200),
        (b"/v1/models/tiny", 200),
        (b"/v1/models/%74iny", 200),
        (b"/api/tags/", 301),
        (b"//api/tags", 404),
        (b"///evil.test/api/tags/", 404),
        (b"/api//tags", 404),
        (b"/api%2Ftags", 404),
        (b"/x/../api/tags", 404),
        (b"/%2e%2e/api/tags", 404),
        (b"/api/tags%00", 404),
        (b"/API/TAGS", 404),
        (b"/\\evil.test/", 404),
        (b"/v1/models/a%2Fb", 404),
        (b"/v1/models/a%0d%0aX:%20y", 404),
        (b"/slots", 404),
        (b"/slots/0?action=erase", 404),
        (b"/completion", 404),
        (b"/props", 404),
    ],
)
def test_paths_are_taken_as_they_are(served: Kvbus, path: bytes, status: int) -> None:
    """No path leads around the routes, and none to the runner's own."""
    reply = raw.talk(served.url, write(start=GET % path))
    assert raw.head_of(reply)[0] == status
    assert b"\r\nX: y" not in reply
    if status == 301:
        assert b"location: /api/tags" in raw.head_of(reply)[1]


# -- bodies -----------------------------------------------------------------------


def failures(kvbus: Kvbus) -> float:
    """Count the runners that have died."""
    return kvbus.metric("kvbus_runner_failures_total")


def post(kvbus: Kvbus, path: str, body: bytes | dict[str, Any]) -> httpx.Response:
    """Post JSON, or bytes; whatever comes of it has the route's shape."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = httpx.post(
        f"{kvbus.url}{path}", content=content, trust_env=False, timeout=60
    )
    assert answer.headers["Content-Type"].startswith("application/json"), answer.text
    if answer.status_code != 200:
        error = answer.json()["error"]
        text = error if path.startswith("/api") else error["message"]
        assert isinstance(text, str)
        assert "internal error" not in text
    return answer


def test_25_megabytes_of_images_get_a_clear_answer(served: Kvbus) -> None:
    """A model without eyes says so, whatever the size."""
    image = "iVBORw0KGgoA" + "A" * (25 << 20)
    message = {**HI[0], "images": [image]}
    answer = post(served, "/api/chat", body_of("/api/chat", messages=[message]))
    assert (answer.status_code, answer.json()["error"]) == (
        400,
        '"tiny" does not support images',
    )
    url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}}
    path = "/v1/chat/completions"
    answer = post(served, path, body_of(path, messages=[{**HI[0], "content": [url]}]))
    assert answer.status_code == 400
    assert "does not support images" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", GENERATES)
@pytest.mark.parametrize("depth", [150, 260, 1100, 100_000])
def test_values_of_any_depth_are_answered(served: Kvbus, path: str, depth: int) -> None:
    """A little nesting is ignored or handed on; more of it is a 400."""
    body = json.dumps(body_of(path)).encode()[:-1]
    deep = b'{"a":' * depth + b"[]" + b"}" * depth
    for field in (b"unknown", b"metadata", b"chat_template_kwargs"):
        answer = post(served, path, b'%b,"%b":%b}' % (body, field, deep))
        assert answer.status_code == (200 if depth == 150 else 400), answer.text
        if depth > 150:
            assert "exceeded max depth" in answer.text


def refs(number: int) -> dict[str, Any]:
    """Make a schema whose parts refer to one another, in a row of this length."""
    parts: dict[str, Any] = {
        f"a{at}": {
            "type": "object",
            "properties": {"x": {"$ref": f"#/$defs/a{at + 1}"}},
            "required": ["x"],
        }
        for at in range(number)
    }
    return {"$defs": {**parts, f"a{number}": {}}, "$ref": "#/$defs/a0"}


BOMBS: dict[str, dict[str, Any]] = {
    "references": refs(5000),
    "items": {"type": "array", "minItems": 10**9},
    "nothing to refer to": {"$ref": "#/nowhere"},
    "an unknown type": {"type": "x"},
}


@pytest.mark.parametrize("name", BOMBS)
def test_schemas_do_not_end_a_runner(served: Kvbus, name: str) -> None:
    """What it can't follow is a 400 on all routes, and it lives."""
    schema, before = BOMBS[name], failures(served)
    wrapper = {"type": "json_schema", "json_schema": {"schema": schema}}
    for path, fields in (
        ("/api/generate", {"format": schema}),
        ("/api/generate", {"format": schema, "raw": True}),
        ("/api/chat", {"format": schema}),
        ("/v1/chat/completions", {"response_format": wrapper}),
    ):
        answer = post(served, path, body_of(path, **fields))
        assert answer.status_code == 400, (path, answer.text)
    assert failures(served) == before
    answer = post(served, "/api/generate", body_of("/api/generate", format=refs(300)))
    assert answer.status_code == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"grammar": "root ::= " + "(" * 60_000},
        {"grammar": "root ::= " + '("x"){1,2000} ' * 40_000},
        {"repeat_last_n": 2**31 - 1, "repeat_penalty": 1.1},
        {"dry_multiplier": 1, "dry_penalty_last_n": 2**31 - 1},
        {"n_probs": 10**9, "min_keep": 2**31 - 1},
        {"logit_bias": [[10**9, 1]], "samplers": [], "seed": 10**400},
        {"temperature": 1e38, "repeat_penalty": 1e38, "mirostat": 2},
        {"n": 1000, "n_cmpl": 1000, "id_slot": -5, "n_discard": 5},
    ],
    ids=lambda fields: str(next(iter(fields))),
)
def test_sampling_does_not_end_a_runner(served: Kvbus, fields: dict[str, Any]) -> None:
    """An answer or a 400, soon; no gigabytes are taken for it."""
    before = failures(served)
    body = json.dumps(body_of("/v1/completions", **fields)).encode()
    answer = post(served, "/v1/completions", body)
    assert answer.status_code in (200, 400)
    options = {name: value for name, value in fields.items() if name != "grammar"}
    native = body_of("/api/generate", options={"num_predict": 2, **options})
    assert post(served, "/api/generate", native).status_code in (200, 400, 500)
    assert failures(served) == before
    assert peak_bytes(served) < 1 << 30


def peak_bytes(kvbus: Kvbus) -> int:
    """Return the most memory that any process of a runner has had."""
    peaks = []
    for pid in [p for p in kvbus.runner_pids() if p]:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for child in children:
            status = Path(f"/proc/{child}/status").read_text()
            peaks.append(int(status.partition("VmHWM:")[2].split()[0]) << 10)
    return max(peaks)


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (b"a\\u0000b", "a\0b"),
        (b"\\ud800", "\ufffd"),
        (b"\\udc00\\ud800x", "\ufffd\ufffdx"),
        (b"\\ud83d\\ude00", "\U0001f600"),
        (b"\xff\xc3", "\ufffd\ufffd"),
        (b"<|im_end|>", "<|im_end|>"),
        (b"{{ 7*7 }}{% for %}", "{{ 7*7 }}{% for %}"),
    ],
)
def test_odd_text_stays_where_it_is(served: Kvbus, written: bytes, shown: str) -> None:
    """Halves of pairs become replacement characters; templates are not filled in."""
    head = b'{"model":"tiny","stream":false,"max_tokens":2,"options":{"num_predict":2}'
    message = b'"messages":[{"role":"user","content":"%b"}]' % written
    body = head + b"," + message + b',"_debug_render_only":true}'
    rendered = post(served, "/api/chat", body).json()["_debug_info"]
    assert f"user\n{shown}<|im_end|>" in rendered["rendered_template"]
    for path in ("/api/chat", "/v1/chat/completions", "/v1/messages"):
        answer = post(served, path, head + b"," + message + b"}")
        assert answer.status_code == 200


@pytest.mark.parametrize(
    ("fields", "status", "says"),
    [
        (b'"options":{"temperature":1e400}', 500, "must be of type float32"),
        (b'"options":{"seed":%b}' % (b"9" * 5000), 500, "must be of type integer"),
        (b'"options":{"repeat_penalty":0}', 400, "penalty_repeat"),
        (b'"keep_alive":1e400,"prompt":"x"', 200, ""),
        (b'"keep_alive":1e300,"PROMPT":"y"', 200, ""),
        (b'"prompt":"a","prompt":5', 400, "cannot unmarshal number"),
        (b'"prompt":5,"prompt":"a"', 200, ""),
        (b'"top_logprobs":1e400', 400, "cannot unmarshal number"),
        (b'"context":[1e400]', 400, "cannot unmarshal number"),
        (b'"context":[%b]' % (b"9" * 40), 400, "cannot unmarshal number"),
    ],
)
def test_numbers_and_names_beyond_reason(
    served: Kvbus, fields: bytes, status: int, says: str
) -> None:
    """Huge numbers are refused or have no end; of two fields the later counts."""
    answer = post(served, "/api/generate", BODY[:-1] + b"," + fields + b"}")
    assert answer.status_code == status, answer.text
    assert says in answer.text
    tags = httpx.get(f"{served.url}/api/ps", trust_env=False)
    assert tags.status_code == 200
