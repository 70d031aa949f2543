"""What clients do to their own prefixes: what is reused is right, and no more.

Each case asks kvbus and a plain runner the same, in the same order; the plain one
keeps its one slot hot. Greedy answers must be equal.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from proxy.prefix.hashing import common_prefix_tokens
from tests.e2e.processes import Kvbus
from tests.e2e.test_sharing import store_arguments
from tests.runners import Runner, running

LINE = "The keeper of the lighthouse wrote down the weather of day {}. "
NUM_TOKENS = 8


def text(number: int, first: int = 0) -> str:
    """Write so many lines, no two alike."""
    return "".join(LINE.format(first + at) for at in range(number))


SYSTEM = text(60)
CHUNKS_A = "Found: " + text(12, 1000)
CHUNKS_B = "Found: " + text(12, 2000)
HISTORY = text(30, 3000)
STAMP = "x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch={}; "

PAIRS: dict[str, tuple[str, str]] = {
    "text that changes at 70 %": (
        SYSTEM + "M one.py " + text(25, 500),
        SYSTEM + "M two.py " + text(25, 500),
    ),
    "chunks that move": (
        HISTORY + CHUNKS_A + "What?",
        HISTORY + "What? It is so. " + CHUNKS_B + "And then?",
    ),
    "documents that change places": (
        "Use these. " + CHUNKS_A + CHUNKS_B + "What?",
        "Use these. " + CHUNKS_B + CHUNKS_A + "What?",
    ),
    "a time at the head": (
        "It is 10:01 now. " + SYSTEM,
        "It is 10:02 now. " + SYSTEM,
    ),
    "a line at the head that is new each time": (
        "request-id: 8a6f; " + SYSTEM,
        "request-id: 17c2; " + SYSTEM,
    ),
    "reasoning that is taken out": (
        HISTORY + "<think>" + text(10, 700) + "</think>It is so. " + text(20, 800),
        HISTORY + "It is so. " + text(20, 800) + "Why?",
    ),
    "an earlier end": (SYSTEM + text(20, 900), SYSTEM),
    "the same once more": (SYSTEM, SYSTEM),
}


@pytest.fixture(scope="module")
def served(models: dict[str, Path], cache_dir: Path) -> Iterator[Kvbus]:
    """Return one kvbus that restores whatever is stored."""
    with Kvbus(cache_dir) as kvbus:
        kvbus.start(
            "--model", f"tiny={models['tiny']}", "--restore", "always",
            "--block-size", "32", "--cache-ram", "0", *store_arguments("disk", kvbus),
        )  # fmt: skip
        yield kvbus


@pytest.fixture(scope="module")
def plain(models: dict[str, Path]) -> Iterator[Runner]:
    """Return a runner that nobody stands before."""
    with running(models["tiny"], ctx_size=8192, parallel=1) as runner:
        yield runner


def ask_plain(plain: Runner, prompt: str) -> tuple[str, int]:
    """Continue a prompt; returns the text and how many tokens it was."""
    answer = plain.post(
        "/completion", prompt=prompt, n_predict=NUM_TOKENS, temperature=0
    )
    timings = answer["timings"]
    num_tokens = timings["prompt_n"] + timings["cache_n"]
    return whole_characters(answer["content"]), num_tokens


def loaded(kvbus: Kvbus) -> list[Any]:
    """List the models that are loaded."""
    return list(httpx.get(f"{kvbus.url}/api/ps", trust_env=False).json()["models"])


def forget(kvbus: Kvbus) -> None:
    """Have the runner freed; the next request starts another."""
    body = {"model": "tiny", "keep_alive": 0}
    assert kvbus.post("/api/generate", body).json()["done_reason"] == "unload"
    kvbus.wait(lambda: not loaded(kvbus), what="the unloading")


def whole_characters(text: str) -> str:
    """Cut off what a stream keeps back: the beginning of a character."""
    return text.rstrip("\ufffd")


def shared_tokens(plain: Runner, first: str, second: str) -> int:
    """Count the leading tokens that two prompts have in common."""
    ids = [
        np.array(plain.post("/tokenize", content=each)["tokens"], dtype=np.int32)
        for each in (first, second)
    ]
    return common_prefix_tokens(*ids)


def said(kvbus: Kvbus, prompt: str) -> str:
    """Continue a prompt by way of kvbus."""
    return whole_characters(kvbus.generate("tiny", prompt)["response"])


@pytest.mark.parametrize("name", PAIRS)
def test_what_is_restored_is_no_more_than_what_is_shared(
    served: Kvbus, plain: Runner, name: str
) -> None:
    """In a fresh runner, and in one that holds something else; the text is the same."""
    first, second = PAIRS[name]
    shared = shared_tokens(plain, first, second)
    expected = [ask_plain(plain, prompt) for prompt in (first, second)]
    commits = served.metric("kvbus_commits_total")
    assert said(served, first) == expected[0][0]
    served.wait_commits(commits + 1)
    forget(served)
    answer = said(served, second)
    turn = served.turns()[-1]
    restored = int(turn["restored_tokens"])
    assert restored <= shared
    assert restored == min(shared, expected[1][1] - 1) // 32 * 32
    assert int(turn["reused_tokens"]) == restored
    assert (answer, int(turn["prompt_tokens"])) == expected[1]
    served.wait_commits(commits + 2)
    assert said(served, first) == expected[0][0]
    assert int(served.turns()[-1]["reused_tokens"]) >= expected[0][1] // 32 * 32 - 32


def messages(system: str) -> dict[str, Any]:
    """Ask as Claude Code does."""
    return {
        "model": "tiny",
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "system": [{"type": "text", "text": system}],
        "messages": [{"role": "user", "content": "Go on."}],
    }


def test_the_stamp_of_claude_code_breaks_no_prefix(served: Kvbus) -> None:
    """It is new for each request and stands first; all behind it is reused."""
    used = []
    for stamp in ("a1b2c", "d3e4f"):
        commits = served.metric("kvbus_commits_total")
        system = STAMP.format(stamp) + SYSTEM + "It is known."
        answer = served.post("/v1/messages?beta=true", messages(system))
        assert answer.status_code == 200, answer.text
        used.append(answer.json()["usage"])
        served.asked += 1
        served.wait_commits(commits + 1)
        forget(served)
    total = used[1]["input_tokens"] + used[1]["cache_read_input_tokens"]
    assert used[0]["input_tokens"] == total
    assert used[1]["cache_read_input_tokens"] > 0.95 * total - 32


def test_a_clock_at_the_head_fills_no_store(served: Kvbus) -> None:
    """Fifty prompts that share five tokens: what is stored stays within its size."""
    before = served.status()["store"]["blocks"]
    lookups = served.metric("kvbus_restored_bytes_total")
    for minute in range(50):
        commits = served.metric("kvbus_commits_total")
        prompt = f"It is 11:{minute:02} now. " + text(8, 5000)
        assert served.generate("tiny", prompt)["done"]
        served.wait_commits(commits + 1)
    store = served.status()["store"]
    assert store["used_bytes"] <= store["capacity_bytes"], json.dumps(store)
    assert served.metric("kvbus_restored_bytes_total") == lookups
    # none of them is of use to another: they are stored all the same, for now
    per_prompt = (store["blocks"] - before) / 50
    assert 0 < per_prompt <= 20
