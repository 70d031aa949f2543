"""The routes over scripted turns: shapes, order of checks, errors, cancellation."""

import asyncio
import json
import math
from typing import Any

import pytest

from proxy.errors import RequestError, RunnerGone, UpstreamError
from tests.fakes.scripted_turns import FACTS, last_event, simple_script, text_event
from tests.ollama.conftest import Front

ROUTES: dict[str, dict[str, Any]] = {
    "/api/generate": {"model": "smol", "prompt": "Say hi."},
    "/api/chat": {
        "model": "smol",
        "messages": [{"role": "user", "content": "Say hi."}],
    },
}
both_routes = pytest.mark.parametrize("route", ROUTES)


def text_of(route: str, line: dict[str, Any]) -> str:
    """Return the text of a line of either route."""
    text = line["response"] if route == "/api/generate" else line["message"]["content"]
    assert isinstance(text, str)
    return text


async def ask(front: Front, route: str, **fields: Any) -> tuple[int, Any]:  # noqa: ANN401
    """Send a request; return the status and the JSON of a single-object reply."""
    async with front.session.post(front.url + route, json=fields) as response:
        assert response.headers["Content-Type"].startswith("application/json")
        return response.status, await response.json()


@both_routes
async def test_stream(front: Front, route: str) -> None:
    """A stream has one object a line, text deltas, one last line with all metrics."""
    async with front.session.post(front.url + route, json=ROUTES[route]) as response:
        assert response.status == 200
        assert response.headers["Content-Type"] == "application/x-ndjson"
        assert response.headers["X-Accel-Buffering"] == "no"
        assert response.headers["Transfer-Encoding"] == "chunked"
        assert response.headers["X-KVBus-Decision"] == "restore"
        assert response.headers["X-KVBus-Restored-Tokens"] == "24"
        assert response.headers["X-KVBus-Request-Id"] == "00ff"
        raw = await response.read()
    assert raw.endswith(b"\n")
    lines = [json.loads(line) for line in raw[:-1].split(b"\n")]
    assert [text_of(route, line) for line in lines] == ["Hi", " there.", ""]
    assert [line["done"] for line in lines] == [False, False, True]
    assert {line["model"] for line in lines} == {"smol"}
    last = lines[-1]
    assert last["done_reason"] == "stop"
    assert last["prompt_eval_count"] == 27
    assert last["prompt_eval_duration"] == 12_240_000
    assert last["eval_count"] == 4
    assert last["eval_duration"] == 55_817_000
    assert last["load_duration"] >= 500_000_000
    assert last["total_duration"] > 0
    outcome = front.observer.outcomes[0]
    assert front.observer.routes == [route]
    assert len(front.observer.first_tokens) == 1
    assert (outcome.route, outcome.model, outcome.status) == (route, "smol:latest", 200)
    assert (outcome.num_prompt_tokens, outcome.num_cached_tokens) == (27, 26)
    assert (outcome.num_decoded_tokens, outcome.done_reason) == (4, "stop")
    assert (outcome.decision, outcome.restored_tokens) == ("restore", 24)
    assert outcome.error == ""
    assert outcome.first_token_seconds is not None
    assert 0 < outcome.first_token_seconds <= outcome.total_seconds


@both_routes
async def test_single_object(front: Front, route: str) -> None:
    """Without a stream all deltas are joined in one object."""
    body = {**ROUTES[route], "model": "SMOL:Latest", "stream": False}
    async with front.session.post(front.url + route, json=body) as response:
        assert response.headers["Content-Type"] == "application/json; charset=utf-8"
        assert response.headers["X-KVBus-Decision"] == "restore"
        assert "Content-Length" in response.headers
        reply = await response.json()
    assert reply["model"] == "SMOL:Latest"
    assert text_of(route, reply) == "Hi there."
    assert reply["done"] is True
    assert reply["prompt_eval_count"] == 27


async def test_the_turn_gets_prompt_and_body(front: Front) -> None:
    """The rendered prompt's ids and the full completion body reach the turn source."""
    status, _ = await ask(
        front,
        "/api/generate",
        model="smol",
        prompt="Say hi.",
        system="Be brief.",
        stream=False,
        options={"temperature": 0, "num_predict": 5, "num_ctx": 1000},
        format={"type": "object"},
    )
    assert status == 200
    request = front.turns.requests[0]
    text = "".join(map(chr, request.token_ids))
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user")
    assert request.route == "/api/generate"
    assert request.body["n_predict"] == 5
    assert request.body["temperature"] == 0
    assert request.body["json_schema"] == {"type": "object"}
    assert not {"prompt", "id_slot", "cache_prompt", "stream"} & set(request.body)
    assert request.reuse.read
    assert request.reuse.write


async def test_raw_prompts_are_not_rendered(front: Front) -> None:
    """A raw prompt reaches the tokenizer as it is."""
    await ask(
        front, "/api/generate", model="smol", prompt="<raw>", raw=True, stream=False
    )
    assert "".join(map(chr, front.turns.requests[0].token_ids)) == "<raw>"
    assert front.model.rendered == []


@both_routes
@pytest.mark.parametrize(("keep_alive", "reason"), [(-1, "load"), (0, "unload")])
async def test_load_and_unload(
    front: Front, route: str, keep_alive: int, reason: str
) -> None:
    """Empty requests load or unload: one object, no turn, also in stream mode."""
    status, reply = await ask(front, route, model="smol", keep_alive=keep_alive)
    assert status == 200
    assert (reply["done"], reply["done_reason"]) == (True, reason)
    assert text_of(route, reply) == ""
    assert "total_duration" not in reply
    assert front.turns.requests == []
    assert front.observer.outcomes[0].done_reason == reason


async def test_render_only(front: Front) -> None:
    """The rendered prompt is shown and nothing is generated."""
    _, reply = await ask(
        front, "/api/chat", **ROUTES["/api/chat"], _debug_render_only=True
    )
    assert reply["_debug_info"] == {
        "rendered_template": "<|im_start|>user\nSay hi.<|im_end|>\n"
        "<|im_start|>assistant\n"
    }
    assert reply["message"] == {"role": "", "content": ""}
    assert reply["done"] is False
    assert front.turns.requests == []


@both_routes
@pytest.mark.parametrize(
    ("fields", "status", "text"),
    [
        ({"model": "nope"}, 404, "model 'nope' not found"),
        ({"options": {"num_ctx": "1"}}, 500, 'option "num_ctx" must be of type in'),
        ({"format": "xml"}, 500, 'invalid format: "xml"'),
        ({"think": True}, 400, '"smol" does not support thinking'),
        (
            {"options": {"num_ctx": 4}, "truncate": False},
            400,
            '{"error":{"code":400,"message":"request (',
        ),
        ({"stream": 1}, 400, "json: cannot unmarshal number into Go struct field"),
        # Ollama's order: the name, then abilities, then options, then the format
        ({"model": "nope", "think": True}, 404, "model 'nope' not found"),
        ({"think": True, "options": {"seed": ""}}, 400, '"smol" does not support'),
        ({"options": {"seed": ""}, "format": 1}, 500, 'option "seed" must be'),
    ],
)
async def test_refusals(
    front: Front, route: str, fields: dict[str, Any], status: int, text: str
) -> None:
    """What cannot be served has Ollama's status and text, and no turn is opened."""
    got_status, reply = await ask(front, route, **{**ROUTES[route], **fields})
    assert got_status == status
    assert list(reply) == ["error"]
    assert reply["error"].startswith(text)
    assert front.turns.requests == []
    assert front.observer.outcomes[0].status == status
    assert front.observer.outcomes[0].error == "RequestError"


async def test_a_long_text_is_refused_before_it_is_tokenized(front: Front) -> None:
    """Megabytes that cannot fit cost no tokenizer; the text names both numbers."""
    status, reply = await ask(
        front,
        "/api/generate",
        model="smol",
        prompt="x" * 3_000_000,
        raw=True,
        truncate=False,
    )
    assert status == 400
    assert "request (187500 tokens)" in reply["error"]
    assert "4096" in reply["error"]


async def test_errors_of_the_runner_before_the_first_line(front: Front) -> None:
    """A runner's refusal keeps its status; its body is a string, never an object."""
    body = '{"error":{"code":400,"message":"no","type":"invalid_request_error"}}'
    front.turns.script = [UpstreamError(400, body)]
    for route, fields in ROUTES.items():
        status, reply = await ask(front, route, **fields)
        assert (status, reply) == (400, {"error": body})
    front.turns.script = []
    front.turns.refusal = UpstreamError(500, "llama-server process has terminated: x")
    status, reply = await ask(front, "/api/chat", **ROUTES["/api/chat"])
    assert status == 500
    assert reply == {"error": "llama-server process has terminated: x"}
    front.model.failure = UpstreamError(302, "odd")
    status, _ = await ask(front, "/api/chat", **ROUTES["/api/chat"])
    assert status == 502


@both_routes
async def test_a_runner_that_dies_before_the_first_line(
    front: Front, route: str
) -> None:
    """Nothing was sent yet: the answer is a 500 in Ollama's words."""
    front.turns.script = [RunnerGone("killed")]
    status, reply = await ask(front, route, **ROUTES[route])
    assert status == 500
    assert reply == {"error": "model runner has unexpectedly stopped: killed"}


@both_routes
@pytest.mark.parametrize(
    ("end", "text"),
    [
        ([RunnerGone("killed")], "model runner has unexpectedly stopped: killed"),
        ([], "model runner has unexpectedly stopped: its answer broke off"),
        (
            [{"error": {"code": 500, "message": "oom"}}],
            '{"error":{"code":500,"message":"oom"}}',
        ),
        ([KeyError("prompt text")], "internal error (KeyError): see the log"),
        ([{"stop": True}], "model runner has unexpectedly stopped: its last event"),
    ],
)
async def test_a_stream_that_breaks(
    front: Front, route: str, end: list[Any], text: str
) -> None:
    """After the first line an error is one last line without `done`."""
    front.turns.script = [text_event("Par"), *end]
    async with front.session.post(front.url + route, json=ROUTES[route]) as response:
        assert response.status == 200
        lines = [json.loads(line) async for line in response.content]
    assert len(lines) == 2
    assert text_of(route, lines[0]) == "Par"
    assert list(lines[1]) == ["error"]
    assert lines[1]["error"].startswith(text)
    outcome = front.observer.outcomes[0]
    assert outcome.status == 200
    assert outcome.error in ("RunnerGone", "UpstreamError", "KeyError")
    assert outcome.done_reason == ""
    # the turn source saw the failure too: it must not commit
    assert front.turns.exit_reason is not None


async def test_a_broken_turn_gives_no_half_object(front: Front) -> None:
    """Without a stream a runner that dies gives an error, not half of a reply."""
    front.turns.script = [text_event("Par"), RunnerGone("killed")]
    status, reply = await ask(
        front, "/api/chat", **{**ROUTES["/api/chat"], "stream": False}
    )
    assert status == 500
    assert list(reply) == ["error"]


async def test_text_of_the_last_event_is_not_lost(front: Front) -> None:
    """A tail in the last event becomes a line of its own."""
    front.turns.script = [text_event(""), last_event(text="tail", stop_type="limit")]
    async with front.session.post(
        front.url + "/api/generate", json=ROUTES["/api/generate"]
    ) as response:
        lines = [json.loads(line) async for line in response.content]
    assert [line["response"] for line in lines] == ["tail", ""]
    assert lines[-1]["done_reason"] == "length"


async def test_an_empty_reply_still_ends(front: Front) -> None:
    """A turn without text has its last line all the same."""
    front.turns.script = [last_event()]
    async with front.session.post(
        front.url + "/api/chat", json=ROUTES["/api/chat"]
    ) as response:
        lines = [json.loads(line) async for line in response.content]
    assert [line["done"] for line in lines] == [True]


@both_routes
@pytest.mark.parametrize("stream", [True, False])
async def test_the_client_does_not_wait_for_the_end_of_the_turn(
    front: Front, route: str, stream: bool
) -> None:
    """The whole reply arrives while the turn is still being stored."""
    front.turns.end_gate = asyncio.Event()
    body = {**ROUTES[route], "stream": stream}
    async with asyncio.timeout(5):
        async with front.session.post(front.url + route, json=body) as response:
            raw = await response.read()
        assert raw.count(b'"done":true') == 1
        assert front.turns.open_turns == 1
        front.turns.end_gate.set()
        await front.observer.num_finished.acquire()
    assert front.turns.exit_reason is None
    assert front.observer.outcomes[0].error == ""


@both_routes
@pytest.mark.parametrize(
    ("stream", "texts"), [(True, ["Hi"]), (True, []), (False, ["Hi"])]
)
async def test_a_client_that_leaves_ends_the_turn(
    front: Front, route: str, stream: bool, texts: list[str]
) -> None:
    """A dropped connection cancels the turn within a second, wherever it stands."""
    front.turns.script = [*map(text_event, texts), asyncio.Event()]
    task = asyncio.create_task(
        front.session.post(front.url + route, json={**ROUTES[route], "stream": stream})
    )
    async with asyncio.timeout(5):
        await front.turns.is_stuck.wait()
        if stream and texts:
            response = await task
            assert await response.content.readline()
            response.close()
        else:
            task.cancel()
    async with asyncio.timeout(1):
        await front.turns.ended.wait()
        await front.observer.num_finished.acquire()
    assert isinstance(front.turns.exit_reason, asyncio.CancelledError)
    assert front.turns.turns[0].is_closed
    outcome = front.observer.outcomes[0]
    assert (outcome.status, outcome.error) == (499, "ClientGone")


async def test_a_hundred_drops_leak_nothing(front: Front) -> None:
    """However many clients leave, no turn and no task stays behind."""
    front.turns.script = [text_event("Hi"), asyncio.Event()]
    tasks_before = asyncio.all_tasks()

    async def drop() -> None:
        async with front.session.post(
            front.url + "/api/chat", json=ROUTES["/api/chat"]
        ) as response:
            await response.content.readline()
            response.close()

    async with asyncio.timeout(20):
        for _ in range(10):
            await asyncio.gather(*(drop() for _ in range(10)))
        for _ in range(100):
            await front.observer.num_finished.acquire()
        left = asyncio.all_tasks() - tasks_before
        if left:
            await asyncio.wait(left)
    assert front.turns.open_turns == 0
    front.turns.script = simple_script("Hi")
    status, _ = await ask(front, "/api/chat", **ROUTES["/api/chat"] | {"stream": False})
    assert status == 200


async def test_lists(front: Front) -> None:
    """The lists have the fields of the golden examples, in their order."""
    async with front.session.get(front.url + "/api/tags") as response:
        assert response.headers["Content-Type"] == "application/json; charset=utf-8"
        tags = await response.json()
    assert tags == {
        "models": [
            {
                "name": "smol:latest",
                "model": "smol:latest",
                "modified_at": "2026-12-01T08:00:00.120034Z",
                "size": 98_362_432,
                "digest": "5d" * 32,
                "details": {
                    "parent_model": "",
                    "format": "gguf",
                    "family": "llama",
                    "families": ["llama"],
                    "parameter_size": "134.52M",
                    "quantization_level": "Q4_1",
                    "context_length": 8192,
                    "embedding_length": 576,
                },
                "capabilities": ["completion"],
            }
        ]
    }
    async with front.session.get(front.url + "/api/ps") as response:
        (running,) = (await response.json())["models"]
    assert list(running) == [
        "name",
        "model",
        "size",
        "digest",
        "details",
        "expires_at",
        "size_vram",
        "context_length",
    ]
    assert running["context_length"] == 4096
    assert running["expires_at"] > "2300"
    assert "context_length" not in running["details"]


async def test_show(front: Front) -> None:
    """Show tells the facts of the file, and never a null model_info or a path."""
    status, reply = await ask(front, "/api/show", name="Smol")
    assert status == 200
    assert reply["template"] == FACTS.chat_template
    assert reply["license"] == "apache-2.0"
    assert reply["model_info"] == FACTS.metadata
    assert reply["capabilities"] == ["completion"]
    assert "FROM smol.gguf" in reply["modelfile"]
    assert "/models" not in json.dumps(reply)
    status, reply = await ask(front, "/api/show", model="nope")
    assert (status, reply) == (404, {"error": "model 'nope' not found"})
    status, reply = await ask(front, "/api/show")
    assert (status, reply) == (400, {"error": "model is required"})


async def test_liveness_and_version(front: Front) -> None:
    """The root and the version answer GET and HEAD; a HEAD has no body."""
    for path, text in (
        ("/", "Ollama is running"),
        ("/api/version", '{"version":"0.33.0"}'),
        ("/api/tags", None),
    ):
        async with front.session.get(front.url + path) as response:
            assert response.status == 200
            body = await response.text()
            content_type = response.headers["Content-Type"]
        if text is not None:
            assert body == text
        async with front.session.head(front.url + path) as response:
            assert response.status == 200
            assert response.headers["Content-Type"] == content_type
            assert response.headers["Content-Length"] == str(len(body.encode()))
            assert await response.read() == b""


@pytest.mark.parametrize(
    ("method", "path", "shape"),
    [
        ("POST", "/api/pull", "ollama"),
        ("DELETE", "/api/delete", "ollama"),
        ("POST", "/api/blobs/sha256:00", "ollama"),
        ("POST", "/v1/systemone", "ollama"),
        ("POST", "/v1/audio/transcriptions", "openai"),
    ],
)
async def test_known_routes_that_are_not_served(
    front: Front, method: str, path: str, shape: str
) -> None:
    """A known route that is not served says so in the shape that its clients read."""
    async with front.session.request(
        method, front.url + path, data=b"x" * 100
    ) as response:
        assert response.status == 501
        assert response.headers["Content-Type"] == "application/json"
        reply = await response.json()
    if shape == "ollama":
        assert isinstance(reply["error"], str)
    else:
        assert set(reply["error"]) == {"message", "type", "param", "code"}


async def test_too_many_waiting(front: Front) -> None:
    """A turn source that is full answers in its own words and status."""
    busy = "server busy, please try again.  maximum pending requests exceeded"
    front.turns.script = [RequestError(503, busy)]
    status, reply = await ask(front, "/api/chat", **ROUTES["/api/chat"])
    assert (status, reply) == (503, {"error": busy})


async def test_durations_are_whole_numbers(front: Front) -> None:
    """Every metric of the last line is a JSON integer."""
    _, reply = await ask(
        front, "/api/generate", **{**ROUTES["/api/generate"], "stream": False}
    )
    for name in ("total", "load", "prompt_eval", "eval"):
        assert isinstance(reply[f"{name}_duration"], int)
        assert reply[f"{name}_duration"] < math.inf
