"""A conversation that every client takes up where another one left it.

The model is a real one. Each turn is a process of its own, and before each one the
only runner is killed: what it need not prefill was restored from the store.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from proxy.model_files import (
    DEFAULT_MODEL_NAME,
    default_cache_dir,
    ensure_default_model,
)
from tests.clients.library import NODE_MODULES, is_installed
from tests.clients.one_turn import TURNS, Messages
from tests.e2e.processes import Kvbus
from tests.e2e.test_sharing import restart_runner, store_arguments

for name in (
    "langchain-ollama", "llama-index-llms-ollama", "litellm", "llm-ollama", "openai",
    "anthropic",
):  # fmt: skip
    if not is_installed(name):
        pytest.skip(f"{name} is not installed", allow_module_level=True)

CLIENT, PACKAGE = "all of them, one after another", "kvbus"
pytestmark = pytest.mark.clients
calls = pytest.mark.calls

QUESTIONS = (
    "Which ship goes first when two of them want the same berth?",
    "In which unit are depths kept, and what margin is added?",
    "When may the tool that writes into the register be called?",
    "What does the board show if a number is missing?",
    "How many entries may a list in an answer have?",
)


@pytest.fixture(scope="module")
def alone(cache_dir: Path) -> Iterator[Kvbus]:
    """Return a kvbus with one runner of one slot."""
    model = ensure_default_model(default_cache_dir(), print)
    with Kvbus(cache_dir) as kvbus:
        kvbus.start(
            "--model", f"{DEFAULT_MODEL_NAME}={model}", "--runners", "1",
            "--slots", "1", "--ctx", "4096", "--restore", "always",
            *store_arguments("embedded", kvbus),
        )  # fmt: skip
        yield kvbus


def take_turn(kvbus: Kvbus, client: str, messages: Messages) -> str:
    """Let a client ask in a process of its own, which has ended on return."""
    done = subprocess.run(
        [
            sys.executable, "-m", "tests.clients.one_turn",
            client, kvbus.url, DEFAULT_MODEL_NAME,
        ],
        input=json.dumps(messages),
        capture_output=True,
        text=True,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def take_restored_turn(
    kvbus: Kvbus, client: str, messages: Messages, *, num_tries: int = 3
) -> tuple[str, dict[str, Any]]:
    """Let a client ask after its runner was killed; returns the reply and its turn.

    On a busy machine a fetch may be given up, as is meant, and the prompt prefilled.
    Then the runner is killed once more, and the client asks again.
    """
    restart_runner(kvbus)
    reply = take_turn(kvbus, client, messages)
    turn = kvbus.latest_request()["turn"]
    if turn["reason"] == "store failed" and num_tries > 1:
        return take_restored_turn(kvbus, client, messages, num_tries=num_tries - 1)
    return reply, turn


@pytest.mark.timeout(420)
@calls("a turn of a shared conversation, the runner killed before it: KV restored")
def test_each_client_goes_on_with_what_others_prefilled(alone: Kvbus) -> None:
    """The engine's own count says that the prefix was there after every kill."""
    text = resources.files("proxy").joinpath("demo_text.md").read_text()
    messages = [{"role": "system", "content": text}]
    clients = [name for name in TURNS if name != "ollama-npm" or has_node()]
    for number, client in enumerate(clients):
        question = QUESTIONS[number % len(QUESTIONS)]
        messages.append({"role": "user", "content": question})
        if number == 0:
            reply = take_turn(alone, client, messages)
            assert alone.latest_request()["turn"]["restored_tokens"] == 0
        else:
            reply, turn = take_restored_turn(alone, client, messages)
            told = (client, json.dumps(turn))
            assert turn["decision"] == "restore", told
            assert turn["reused_tokens"] >= turn["restored_tokens"] > 1000, told
            assert turn["prefilled_tokens"] < 200, told
        assert reply.strip(), client
        messages.append({"role": "assistant", "content": reply})
        alone.wait(is_committed(alone), what="the commit of the latest turn")


def is_committed(kvbus: Kvbus) -> Callable[[], bool]:
    """Return what tells whether the latest turn was committed."""
    return lambda: kvbus.latest_request()["turn"]["commit"] is not None


def has_node() -> bool:
    """Tell whether the npm client can run."""
    return shutil.which("node") is not None and (NODE_MODULES / "ollama").exists()
