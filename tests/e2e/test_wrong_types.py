"""Any JSON in any field: an answer in the route's shape, and a runner that lives."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.e2e.processes import Kvbus
from tests.e2e.test_sharing import store_arguments
from tests.scripted_model import write_scripted_model
from tests.v1.conftest import SCRIPT

NUMBERS = st.integers(-(2**70), 2**70) | st.floats(allow_nan=False)
SCALARS = st.none() | st.booleans() | NUMBERS | st.text(max_size=8)
KEYS = st.sampled_from(["type", "text", "role", "content", "name", "function", "x"])
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3)
    ),
    max_leaves=6,
)
OPTIONS = [
    "num_ctx",
    "num_keep",
    "num_predict",
    "seed",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "repeat_last_n",
    "temperature",
    "repeat_penalty",
    "presence_penalty",
    "frequency_penalty",
    "stop",
    "mooncake",
    "num_batch",
    "num_gpu",
    "use_mmap",
]
MESSAGE = [
    "role",
    "content",
    "thinking",
    "images",
    "tool_calls",
    "tool_name",
    "tool_call_id",
]
COMMON = [
    "model",
    "stream",
    "format",
    "keep_alive",
    "think",
    "logprobs",
    "top_logprobs",
    "options",
    "truncate",
    "shift",
]
V1 = [
    "model",
    "stream",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "stop",
    "tools",
    "tool_choice",
    "response_format",
    "stream_options",
    "mooncake",
    "logit_bias",
    "n",
    "user",
    "metadata",
    "max_tokens",
    "grammar",
    "json_schema",
    "samplers",
    "reasoning_effort",
    "chat_template_kwargs",
    "cache_prompt",
]
MESSAGES = [{"role": "user", "content": "Hi"}]
ROUTES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "/api/generate": (
        {"prompt": "Hi"},
        [*COMMON, "prompt", "suffix", "system", "template", "context", "images", "raw"],
    ),
    "/api/chat": ({"messages": MESSAGES}, [*COMMON, "messages", "tools"]),
    "/api/show": ({}, ["model", "name", "verbose"]),
    "/v1/chat/completions": ({"messages": MESSAGES}, [*V1, "messages", "logprobs"]),
    "/v1/completions": ({"prompt": "Hi"}, [*V1, "prompt", "logprobs"]),
    "/v1/responses": ({"input": "Hi"}, [*V1, "input", "instructions", "text"]),
    "/v1/messages": (
        {"messages": MESSAGES},
        [*V1, "messages", "system", "thinking", "stop_sequences"],
    ),
    "/v1/messages/count_tokens": ({"messages": MESSAGES}, ["messages", "system"]),
}
ENGINES_OWN = ("Failed to parse", "Failed to initialize")
"""How the texts begin by which an engine refuses with status 500 what is wrong."""


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory, cache_dir: Path
) -> Iterator[Kvbus]:
    """Return one kvbus whose model thinks and calls tools."""
    path = tmp_path_factory.mktemp("models") / "talker.gguf"
    talker = write_scripted_model(path, SCRIPT)
    with Kvbus(cache_dir) as kvbus:
        kvbus.start(
            "--model", f"talker={talker}", "--ctx", "2048",
            *store_arguments("disk", kvbus),
        )  # fmt: skip
        yield kvbus


def check(client: httpx.Client, path: str, body: dict[str, Any]) -> None:
    """Ask, and look at status and shape of what comes."""
    answer = client.post(path, content=json.dumps(body).encode())
    kind = answer.headers["Content-Type"].partition(";")[0]
    if answer.status_code == 200:
        kinds = ("application/json", "application/x-ndjson", "text/event-stream")
        assert kind in kinds
        return
    assert kind == "application/json", answer.text
    error = answer.json()["error"]
    if path.startswith("/api"):
        assert set(answer.json()) == {"error"}
        text = error
    else:
        text = error["message"]
        assert isinstance(error["type"], str)
    assert isinstance(text, str)
    assert text
    assert answer.status_code in (400, 404, 500), answer.text
    if answer.status_code == 500:
        ollamas = text.startswith(("option ", "invalid format: "))
        assert ollamas or any(own in text for own in ENGINES_OWN), text


@pytest.mark.parametrize("path", ROUTES)
def test_any_value_in_any_field(served: Kvbus, path: str) -> None:
    """The statuses and texts of Ollama, OpenAI or Anthropic, never a crash."""
    base, names = ROUTES[path]
    short = {"max_tokens": 2, "max_output_tokens": 2, "options": {"num_predict": 2}}
    before = served.metric("kvbus_runner_failures_total")
    with httpx.Client(base_url=served.url, trust_env=False, timeout=60) as client:

        @settings(
            max_examples=80,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(name=st.sampled_from(names), value=VALUES)
        def run(name: str, value: object) -> None:
            body = {"model": "talker", **base, **short, name: value}
            check(client, path, body)

        run()
    assert served.metric("kvbus_runner_failures_total") == before
    assert "Traceback" not in served.log_text()


@pytest.mark.parametrize(
    ("path", "inner", "names"),
    [
        ("/api/generate", "options", OPTIONS),
        ("/api/chat", "messages", MESSAGE),
        ("/v1/chat/completions", "messages", [*MESSAGE, "reasoning_content"]),
        ("/v1/messages", "messages", ["role", "content"]),
        ("/api/chat", "tools", ["type", "function", "items"]),
        ("/v1/chat/completions", "tools", ["type", "function"]),
        ("/v1/messages", "tools", ["name", "description", "input_schema"]),
    ],
)
def test_any_value_in_a_part(
    served: Kvbus, path: str, inner: str, names: list[str]
) -> None:
    """Options, messages and tools, each with one thing that is wrong."""
    short = {"max_tokens": 2, "options": {"num_predict": 2}}
    function = {"name": "f", "parameters": {"type": "object", "properties": {}}}
    parts: dict[str, dict[str, Any]] = {
        "options": {"num_predict": 2},
        "messages": MESSAGES[0],
        "tools": {"type": "function", "function": function, "name": "f"},
    }
    before = served.metric("kvbus_runner_failures_total")
    with httpx.Client(base_url=served.url, trust_env=False, timeout=60) as client:

        @settings(
            max_examples=60,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(name=st.sampled_from(names), value=VALUES)
        def run(name: str, value: object) -> None:
            part = {**parts[inner], name: value}
            given_part = part if inner == "options" else [part]
            body = {"model": "talker", **ROUTES[path][0], **short, inner: given_part}
            check(client, path, body)

        run()
    assert served.metric("kvbus_runner_failures_total") == before
    assert "Traceback" not in served.log_text()
