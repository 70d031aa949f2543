"""The command `llm` with the plugin llm-ollama."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clients.library import library
from tests.e2e.processes import Kvbus

library("llm_ollama")

CLIENT = PACKAGE = "llm-ollama"
pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]
calls = pytest.mark.calls


@pytest.fixture
def llm(served: Kvbus, tmp_path: Path) -> Any:
    """Return what runs the command with a folder of its own."""

    def run(*arguments: str, **fields: Any) -> Any:
        return subprocess.run(
            [str(Path(sys.executable).with_name("llm")), *arguments],
            env={
                **os.environ,
                "OLLAMA_HOST": served.url,
                "LLM_USER_PATH": str(tmp_path),
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            **fields,
        )

    return run


@calls("llm ollama models", "llm models", "llm embed-models")
def test_models(llm: Any) -> None:
    """The models with their abilities."""
    listed = llm("ollama", "models").stdout
    assert "completion, thinking, tools" in listed
    assert "ollama/plain:1b" in llm("models").stdout
    assert "ollama/encoder" in llm("embed-models").stdout


@calls("llm prompt", "llm prompt --no-stream", "llm prompt -s -o", "llm prompt -c")
def test_prompt(llm: Any) -> None:
    """Streamed and whole, with options, and a conversation that goes on."""
    model = ("-m", "ollama/plain:1b")
    streamed = llm(*model, "-s", "Be brief.", "-o", "temperature", "0", "Hello")
    assert (streamed.stdout, streamed.stderr) == ("Hi there, friend.\n", "")
    assert llm(*model, "--no-stream", "Hello").stdout == streamed.stdout
    assert llm("-c", "And more?").stdout == streamed.stdout
    logged = json.loads(llm("logs", "-n", "1", "--json").stdout)
    assert logged[0]["output_tokens"] == 4


@calls("llm prompt --functions (tools)", "llm prompt --schema", "llm prompt -o think")
def test_abilities(llm: Any) -> None:
    """A function is called and its result told; a schema; thinking switched off."""
    code = "def get_weather(city: str) -> str:\n    return 'Snow in ' + city\n"
    called = llm(
        "-m", "ollama/tooler:1b", "--functions", code, "--td", "Weather in Oslo?"
    )
    assert "Snow in Oslo" in called.stderr
    assert called.stdout.endswith("It snows in Oslo.\n")
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    shaped = llm("-m", "ollama/endless:latest", "--schema", json.dumps(schema), "Hello")
    assert json.loads(shaped.stdout) == {"a": 1}
    quiet = llm("-m", "ollama/talker:1b", "-o", "think", "false", "Hello")
    assert quiet.stdout == "Ask me about the weather.\n"


@calls("llm embed", "llm embed-multi")
def test_embeddings(llm: Any, tmp_path: Path) -> None:
    """A vector of one text, and of the files of a folder."""
    made = llm("embed", "-m", "ollama/encoder:latest", "-c", "a b c")
    assert len(json.loads(made.stdout)) == 64
    texts = tmp_path / "texts"
    texts.mkdir()
    for name in ("a", "b"):
        (texts / f"{name}.txt").write_text(name)
    done = llm(
        "embed-multi", "notes", "-m", "ollama/encoder:latest",
        "--files", str(texts), "*.txt",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = llm("similar", "notes", "-c", "a", "-n", "1").stdout
    assert json.loads(found)["id"] == "a.txt"
