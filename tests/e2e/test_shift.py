"""Replies that go on past the context, and what becomes of their slots."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.processes import Kvbus
from tests.e2e.test_attached import llama_server
from tests.e2e.test_sharing import store_arguments

CONTEXT_TOKENS = 512
TEXT = "The keeper of the lighthouse wrote down the weather. " * 16  # about 190 tokens


@pytest.fixture
def shifting(kvbus: Kvbus, models: dict[str, Path]) -> Kvbus:
    """Serve a model that never ends a reply by itself."""
    return kvbus.start(
        "--model", f"tiny={models['endless']}", "--ctx", str(CONTEXT_TOKENS),
        "--restore", "always", "--block-size", "64", *store_arguments("disk", kvbus),
    )  # fmt: skip


def ask(kvbus: Kvbus, **body: Any) -> dict[str, Any]:  # noqa: ANN401
    """Generate greedily from a raw prompt."""
    options = {"temperature": 0, **body.pop("options", {})}
    answer = kvbus.post(
        "/api/generate",
        {
            "model": "tiny", "prompt": TEXT, "raw": True, "stream": False,
            "options": options, **body,
        },
    )  # fmt: skip
    assert answer.status_code == 200, answer.text
    kvbus.asked += 1
    return dict(answer.json())


def last_reuse(kvbus: Kvbus) -> int:
    """Return how many tokens the engine reused in the last turn."""
    return int(kvbus.turns()[-1]["reused_tokens"])


def test_a_shifted_slot_is_neither_stored_nor_reused(shifting: Kvbus) -> None:
    """After it the same prompt is answered as by a slot that was never shifted."""
    fresh = ask(shifting, options={"num_predict": 20})
    shifting.wait_commits(1)
    stored = shifting.metric("kvbus_committed_bytes_total")
    assert stored > 0
    long = ask(shifting, options={"num_predict": 1500})
    assert (long["eval_count"], long["done_reason"]) == (1500, "length")
    assert shifting.metric("kvbus_commits_total") == 1
    other = "Another prompt, to see that nothing of the long one is left. " * 4
    ask(shifting, prompt=TEXT[:400] + other, options={"num_predict": 2})
    turn = shifting.turns()[-1]
    assert turn["reused_tokens"] == turn["restored_tokens"]
    again = ask(shifting, options={"num_predict": 20})
    assert again["response"] == fresh["response"]


def test_a_reply_ends_where_it_is_told_to(shifting: Kvbus) -> None:
    """shift:false ends it with the context; ten contexts are the end of all."""
    ended = ask(shifting, shift=False, options={"num_predict": 1500})
    assert ended["prompt_eval_count"] + ended["eval_count"] == CONTEXT_TOKENS
    assert ended["done_reason"] == "length"
    for options in ({}, {"num_predict": 100_000}):
        longest = ask(shifting, options=options)
        assert longest["eval_count"] == 10 * CONTEXT_TOKENS
    body = {"model": "tiny", "prompt": TEXT, "temperature": 0}
    relayed = shifting.post("/v1/completions", body).json()
    assert relayed["usage"]["completion_tokens"] == 10 * CONTEXT_TOKENS


def test_num_keep_is_kept(shifting: Kvbus) -> None:
    """What is kept of the prompt changes what is said after the shift, not before."""
    few, many = (
        ask(shifting, options={"num_predict": 900, "num_keep": keep})["response"]
        for keep in (4, 150)
    )
    assert few[:200] == many[:200]
    assert few != many


@pytest.mark.parametrize(("num_predict", "num_lines"), [(100, 20), (5000, 900)])
def test_a_reply_that_is_broken_off(
    shifting: Kvbus, num_predict: int, num_lines: int
) -> None:
    """A slot is emptied after a reply that may have gone past the context."""
    body = {
        "model": "tiny", "prompt": TEXT, "raw": True,
        "options": {"temperature": 0, "num_predict": num_predict},
    }  # fmt: skip
    with httpx.stream(
        "POST", f"{shifting.url}/api/generate", json=body, timeout=60, trust_env=False
    ) as answer:
        for number, _ in enumerate(answer.iter_lines()):
            if number == num_lines:
                break
    shifting.wait(lambda: " event=turn " in shifting.log_text(), what="the end")
    ask(shifting, options={"num_predict": 2})
    shifting.wait(
        lambda: shifting.log_text().count(" event=turn ") == 2, what="the next turn"
    )
    assert (last_reuse(shifting) > 0) == (num_predict < CONTEXT_TOKENS)


def test_a_given_server_that_shifts(kvbus: Kvbus, models: dict[str, Path]) -> None:
    """Its command line tells; its slots are emptied too."""
    with llama_server(
        models["endless"], "--context-shift", alias="tiny", context_tokens=512
    ) as url:
        kvbus.start("--upstream", url, *store_arguments("disk", kvbus))
        assert ask(kvbus, options={"num_predict": 900})["eval_count"] == 900
        ask(kvbus, options={"num_predict": 2})
        assert last_reuse(kvbus) == 0
