"""The official JavaScript client, on Node."""

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.clients.library import NODE_MODULES
from tests.e2e.processes import Kvbus

CLIENT = "ollama (npm)"
PACKAGE = NODE_MODULES / "ollama"
SCRIPT = Path(__file__).with_name("ollama_npm.cjs")
pytestmark = pytest.mark.clients
calls = pytest.mark.calls

if shutil.which("node") is None:
    pytest.skip("node is not installed", allow_module_level=True)
if not PACKAGE.exists():
    pytest.skip("the npm package ollama is not installed", allow_module_level=True)


def started(kvbus: Kvbus, job: str) -> subprocess.Popen[str]:
    """Start a job of the script."""
    return subprocess.Popen(
        ["node", str(SCRIPT), kvbus.url, job],
        env={**os.environ, "NODE_PATH": str(NODE_MODULES)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def done(kvbus: Kvbus, job: str) -> Any:
    """Run a job of the script; returns what it printed."""
    with started(kvbus, job) as process:
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    return json.loads(output)


def text(parts: list[dict[str, Any]]) -> str:
    """Join the text of a chat's stream."""
    return "".join(part["message"]["content"] for part in parts)


@calls("list", "show", "ps", "version")
def test_lists(served: Kvbus) -> None:
    """All models, one of them, those that are loaded, and the version."""
    found = done(served, "lists")
    assert "plain:1b" in {model["name"] for model in found["list"]["models"]}
    assert set(found["show"]["capabilities"]) == {"completion", "tools", "thinking"}
    assert isinstance(found["ps"]["models"], list)
    assert found["version"]["version"].count(".") == 2


@calls("generate", "generate(stream)", "generate(suffix)")
def test_generate(served: Kvbus) -> None:
    """Whole, streamed, and into a gap."""
    found = done(served, "generate")
    assert found["whole"]["response"] == "Hi there, friend."
    parts = found["parts"]
    assert "".join(part["response"] for part in parts) == "Hi there, friend."
    assert parts[-1]["done_reason"] == "stop"
    assert found["filled"]["eval_count"] == 5


@calls("chat", "chat(stream)", "chat(format)")
def test_chat(served: Kvbus) -> None:
    """Whole, streamed, and by a schema."""
    found = done(served, "chat")
    assert found["whole"]["message"]["content"] == "Hi there, friend."
    assert text(found["parts"]) == "Hi there, friend."
    said = json.loads(found["shaped"]["message"]["content"])
    assert said["mood"] in ("good", "bad")


@calls("chat(tools)", "chat(tools, stream)")
def test_tools(served: Kvbus) -> None:
    """A call, its result, and what is said of it."""
    found = done(served, "tools")
    (call,) = found["answer"]["message"]["tool_calls"]
    assert call["function"]["arguments"] == {"city": "Oslo"}
    assert found["told"]["message"]["content"] == "It snows in Oslo now."
    streamed = [
        call["function"]["name"]
        for part in found["parts"]
        for call in part["message"].get("tool_calls", [])
    ]
    assert streamed == ["get_weather"]


@calls("chat(think)", "chat(think, stream)")
def test_thinking(served: Kvbus) -> None:
    """Thinking is told apart, or left out."""
    found = done(served, "thinking")
    thinking = found["whole"]["message"]["thinking"]
    assert thinking.strip() == "Add the two numbers."
    parts = found["parts"]
    streamed = "".join(part["message"].get("thinking", "") for part in parts)
    assert (streamed, text(parts)) == (thinking, "4")
    assert found["quiet"]["message"]["content"] == "Ask me about the weather."
    assert "thinking" not in found["quiet"]["message"]


@calls("embed", "embeddings")
def test_embeddings(served: Kvbus) -> None:
    """Vectors of one text and of several."""
    found = done(served, "embeddings")
    assert len(found["one"]["embeddings"][0]) == 64
    assert len(found["several"]["embeddings"]) == 2
    assert len(found["older"]["embedding"]) == 64


@calls("pull", "push", "create", "copy", "delete")
def test_management_is_refused(served: Kvbus) -> None:
    """Each call throws the client's error with advice."""
    found = done(served, "refusals")
    assert len(found) == 6
    for error in found.values():
        assert (error["name"], error["status"]) == ("ResponseError", 501)
        assert "--model" in error["message"]


@calls("404 of every call with a model")
def test_unknown_models(served: Kvbus) -> None:
    """Each call tells the name that is not there."""
    for error in done(served, "unknown").values():
        assert error["status"] == 404
        assert "not found" in error["message"]


@calls("chat(tools), chat(think), generate(images) where the model cannot")
def test_missing_abilities(served: Kvbus) -> None:
    """Each says what the model does not support."""
    for ability, error in done(served, "abilities").items():
        name = {"think": "thinking"}.get(ability, ability)
        assert error["status"] == 400
        assert f"does not support {name}" in error["message"]


@calls("a stream whose runner is killed")
def test_an_error_in_mid_stream(served: Kvbus) -> None:
    """The stream throws the text of the last line."""
    with started(served, "broken") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "first\n"
        os.kill(served.runner_pid("endless:latest"), signal.SIGKILL)
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "unexpectedly stopped" in json.loads(output)["message"]


@calls("abort")
def test_abort(served: Kvbus) -> None:
    """An aborted stream frees the only slot for the next request."""
    found = done(served, "abort")
    assert found["aborted"]["name"] == "AbortError"
    assert found["after"]["eval_count"] == 2
