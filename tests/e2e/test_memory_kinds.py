"""Models whose memory cannot be cut anywhere: windows, recurrent states, both."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.e2e.processes import Kvbus
from tests.e2e.test_sharing import TEXT, restart_runner, store_arguments
from tests.model_shapes import Architecture
from tests.models import write_tiny_model

ENDS = [" ".join(f"{word} {n}" for n in range(60)) for word in ("one", "two", "three")]
KINDS: list[Architecture] = [
    "gemma3", "gpt-oss", "lfm2", "falcon-h1", "qwen3next", "mamba",
]  # fmt: skip
ENDLESS = {"num_predict": 24, "temperature": 0}


def start(kvbus: Kvbus, model: Path, *more: str, kind: str = "embedded") -> int:
    """Serve a model; returns its block size."""
    kvbus.start(
        "--model", f"m={model}", "--restore", "always",
        *store_arguments(kind, kvbus), *more,
    )  # fmt: skip
    (runner,) = kvbus.status()["models"][0]["runners"]
    assert runner["sharing"], runner["reason"]
    return int(runner["block_size"])


@pytest.mark.parametrize("architecture", KINDS)
def test_a_prefix_is_restored_where_two_prompts_have_parted(
    kvbus: Kvbus, architecture: Architecture, tmp_path: Path
) -> None:
    """The first prompt is kept at its end, the second where it leaves the first."""
    model = write_tiny_model(tmp_path / "m.gguf", seed=3, architecture=architecture)
    block_size = start(kvbus, model)
    first = kvbus.generate("m", TEXT + ENDS[0])
    kvbus.wait_commits(1)
    assert int(kvbus.turns()[-1]["reused_tokens"]) == 0
    restart_runner(kvbus)

    again = kvbus.generate("m", TEXT + ENDS[0])  # up to its own end
    turn = kvbus.turns()[-1]
    assert turn["decision"] == "restore"
    assert int(turn["reused_tokens"]) == int(turn["restored_tokens"])
    prompt_tokens = int(turn["prompt_tokens"])
    assert prompt_tokens - block_size - 4 <= int(turn["restored_tokens"])
    assert again["prompt_eval_count"] == first["prompt_eval_count"] == prompt_tokens
    restart_runner(kvbus)

    kvbus.generate("m", TEXT + ENDS[1])
    turn = kvbus.turns()[-1]
    assert turn["decision"] == "recompute"
    assert int(turn["prefilled_tokens"]) == int(turn["prompt_tokens"])
    kvbus.wait_commits(2)
    hot = kvbus.generate("m", TEXT + ENDS[2], **ENDLESS)
    turn = kvbus.turns()[-1]
    assert turn["decision"] == "keep_slot"
    assert int(turn["reused_tokens"]) >= int(turn["slot_tokens"]) - 1 > 1600
    restart_runner(kvbus)

    restored = kvbus.generate("m", TEXT + ENDS[2], **ENDLESS)
    turn = kvbus.turns()[-1]
    assert turn["decision"] == "restore"
    assert int(turn["reused_tokens"]) == int(turn["restored_tokens"]) > 1600
    assert restored["prompt_eval_count"] == hot["prompt_eval_count"]
    assert kvbus.metric("kvbus_restore_ineffective_total") == 0
    assert kvbus.metric("kvbus_failed_open_total") == 0


def is_at_boundary(kvbus: Kvbus) -> bool:
    """Tell whether the latest request is being prefilled up to a boundary."""
    if not kvbus.metric("kvbus_slots_leased"):
        return False  # it may not have come yet
    turn = kvbus.latest_request()["turn"]
    return turn is not None and turn["stage"] == "boundary"


def test_who_leaves_in_a_boundary_s_prefill_leaves_nothing(
    kvbus: Kvbus, tmp_path: Path
) -> None:
    """The engine stops, the slot is free, and the next prompt is served."""
    model = write_tiny_model(tmp_path / "m.gguf", seed=3, architecture="lfm2")
    start(kvbus, model, "--ctx", "32768")
    body = {"model": "m", "prompt": TEXT * 8, "raw": True, "stream": False}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{kvbus.url}/api/generate", json=body, timeout=0.5, trust_env=False)
    kvbus.wait(lambda: kvbus.metric("kvbus_slots_leased") == 0, what="a free slot")
    assert kvbus.latest_request()["turn"]["result"] == "cancelled"
    answer = kvbus.generate("m", TEXT + ENDS[0])
    assert answer["prompt_eval_count"] == int(kvbus.turns()[-1]["prompt_tokens"])
    assert kvbus.metric("kvbus_failed_open_total") == 0


def test_a_runner_that_dies_in_a_boundary_s_prefill_costs_time_only(
    kvbus: Kvbus, tmp_path: Path
) -> None:
    """The prompt is answered by the process that comes after it."""
    model = write_tiny_model(tmp_path / "m.gguf", seed=3, architecture="lfm2")
    start(kvbus, model, "--ctx", "32768")
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(kvbus.generate, "m", TEXT * 8)
        kvbus.wait(lambda: is_at_boundary(kvbus), what="the boundary's prefill")
        os.kill(kvbus.runner_pids()[0], signal.SIGKILL)
        answer = asked.result(90)
    assert answer["done_reason"] == "length"
    assert kvbus.latest_request()["turn"]["deaths"] == 1
