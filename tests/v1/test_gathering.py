"""Answers in one piece that are gathered from a stream, beside the engine's own."""

from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import orjson
import pytest

from proxy.errors import RunnerGone, UpstreamError
from proxy.ollama.backend import CHAT_PATH
from proxy.v1.gathering import Gathering, as_stream, can_gather
from tests.runners import Runner, running
from tests.scripted_model import write_scripted_model
from tests.v1.conftest import SCRIPT

USER = [{"role": "user", "content": "Weather?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "get_weather", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]
UNTHINKING = {"enable_thinking": False}
CHANGING = ("id", "call_id", "created", "created_at", "completed_at", "timings")


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    """Return a runner of a model that thinks and calls a tool."""
    path = tmp_path_factory.mktemp("models") / "talker.gguf"
    with running(write_scripted_model(path, SCRIPT), parallel=1) as runner:
        yield runner


def ask(runner: Runner, path: str, body: Mapping[str, Any]) -> httpx.Response:
    """Ask on a connection of its own: one that is kept may just be ending."""
    transport = httpx.HTTPTransport(uds=str(runner.socket))
    with httpx.Client(transport=transport, base_url="http://runner") as client:
        return client.post(path, json=body, timeout=60)


def steady(value: Any) -> Any:  # noqa: ANN401 - any JSON
    """Blank what differs from one answer to the next."""
    if isinstance(value, dict):
        return {k: "" if k in CHANGING else steady(v) for k, v in value.items()}
    return [*map(steady, value)] if isinstance(value, list) else value


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT_PATH, {"messages": USER}),
        (CHAT_PATH, {"messages": USER, "tools": TOOLS}),
        (CHAT_PATH, {"messages": USER, "max_tokens": 4}),
        (CHAT_PATH, {"messages": USER, "chat_template_kwargs": UNTHINKING}),
        (CHAT_PATH, {"messages": USER, "timings_per_token": True, "verbose": False}),
        ("/v1/completions", {"prompt": "assistant\n"}),
        ("/v1/completions", {"prompt": "assistant\n", "max_tokens": 3, "logprobs": 1}),
        ("/v1/responses", {"input": "Weather?"}),
        ("/v1/responses", {"input": "x", "tools": [{**FUNCTION, "type": "function"}]}),
        ("/v1/responses", {"input": "Weather?", "max_output_tokens": 4}),
    ],
)
def test_what_is_gathered_is_the_engines_own_answer(
    runner: Runner, path: str, body: dict[str, Any]
) -> None:
    """Each field, with its name and value, on each route."""
    body = {**body, "temperature": 0, "cache_prompt": False}
    own = ask(runner, path, body).json()
    assert can_gather(path, body)
    stream = ask(runner, path, as_stream(body)).content
    gathering = Gathering(path)
    for event in stream.split(b"\n\n"):
        gathering.feed(event + b"\n\n")
    gathered = orjson.loads(gathering.whole())
    if path == "/v1/responses":
        own.setdefault("timings", gathered.setdefault("timings", ""))
    assert steady(gathered) == steady(own)


@pytest.mark.parametrize("fields", [{"logprobs": True}, {"n_probs": 2}])
def test_chats_with_logprobs_are_no_stream(
    runner: Runner, fields: dict[str, Any]
) -> None:
    """As a stream they lack some, or are refused, so they are asked for as before."""
    body = {"messages": USER, "temperature": 0, **fields}
    assert not can_gather(CHAT_PATH, body)
    (choice,) = ask(runner, CHAT_PATH, body).json()["choices"]
    own = choice["logprobs"]["content"]
    gathering = Gathering(CHAT_PATH)
    gathering.feed(ask(runner, CHAT_PATH, as_stream(body)).content)
    choice = orjson.loads(gathering.whole())["choices"][0]
    assert len(choice["logprobs"]["content"]) < len(own)


def test_a_stream_without_its_end_is_no_answer() -> None:
    """Neither is one without a reason to end; an error has its own status."""
    gathering = Gathering(CHAT_PATH)
    chunk = {"choices": [{"delta": {"content": "Hi"}, "finish_reason": None}]}
    gathering.feed(b"data: " + orjson.dumps(chunk) + b"\n\n: alive\n\n")
    with pytest.raises(RunnerGone, match="ended before"):
        gathering.whole()
    gathering.feed(b'data: {"choices":[],"usage":{}}\n\n')
    with pytest.raises(RunnerGone, match="ended before"):
        gathering.whole()
    with pytest.raises(UpstreamError) as caught:
        gathering.feed(b'data: {"error":{"code":429,"message":"full"}}\n\n')
    assert (caught.value.status, "full" in caught.value.body) == (429, True)
    with pytest.raises(UpstreamError) as caught:
        gathering.feed(b'data: {"error":"odd"}\n\n')
    assert caught.value.status == 500
