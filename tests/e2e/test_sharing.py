"""The main job, on real parts: a prefix prefilled once is restored elsewhere."""

import os
import signal
from pathlib import Path

import pytest

from tests.e2e.processes import Kvbus

TEXT = "The keeper of the lighthouse wrote down the weather of every day. " * 160
STORES = ("embedded", "disk")


def store_arguments(kind: str, kvbus: Kvbus) -> list[str]:
    """Return the store flags for a kind of store, with a directory of its own."""
    store = f"disk:{kvbus.root}/blocks" if kind == "disk" else kind
    return ["--store", store, "--store-size", "256M"]


def restart_runner(kvbus: Kvbus, index: int = 0) -> None:
    """Kill a runner and wait until another process is in its place."""
    old = kvbus.runner_pids()[index]
    os.kill(old, signal.SIGKILL)
    kvbus.wait(
        lambda: (
            kvbus.runner_pids()[index] != old
            and all(
                runner["ready"]
                for model in kvbus.status()["models"]
                for runner in model["runners"]
            )
        ),
        what="a new runner",
    )


@pytest.mark.parametrize("kind", STORES)
def test_a_prefix_is_restored_after_a_restart(
    kvbus: Kvbus, models: dict[str, Path], kind: str
) -> None:
    """What a runner prefilled is not prefilled again by the process after it."""
    kvbus.start(
        "--model", f"tiny={models['tiny']}",
        "--restore", "always",
        *store_arguments(kind, kvbus),
    )  # fmt: skip
    kvbus.generate("tiny", TEXT + "One?")
    kvbus.wait_commits(1)
    hot = kvbus.generate("tiny", TEXT + "Two?")
    kvbus.wait_commits(2)
    restart_runner(kvbus)
    restored = kvbus.generate("tiny", TEXT + "Two?")
    turn = kvbus.turns()[-1]
    block_size = kvbus.status()["models"][0]["runners"][0]["block_size"]
    assert turn["decision"] == "restore"
    assert int(turn["reused_tokens"]) == int(turn["restored_tokens"]) > 1700
    assert int(turn["prefilled_tokens"]) < block_size + 20
    assert restored["prompt_eval_count"] == hot["prompt_eval_count"]
    assert kvbus.metric("kvbus_avoided_prefill_tokens_total") == int(
        turn["restored_tokens"]
    )


def test_two_runners_share_through_the_store(
    kvbus: Kvbus, models: dict[str, Path]
) -> None:
    """While one runner is busy with its slot the other restores the prefix."""
    kvbus.start(
        "--model", f"tiny={models['tiny']}", "--runners", "2", "--restore", "always",
        *store_arguments("embedded", kvbus),
    )  # fmt: skip
    kvbus.generate("tiny", TEXT + "One?")
    kvbus.wait_commits(1)
    restart_runner(kvbus, int(kvbus.turns()[0]["runner"].rpartition("/")[2]))
    for number in range(2):
        kvbus.generate("tiny", TEXT + f"{number}?")
        kvbus.wait_commits(2 + number)
    turns = kvbus.turns()
    assert [turn["decision"] for turn in turns] == ["recompute", "restore", "keep_slot"]


def test_a_common_prefix_is_stored_once(kvbus: Kvbus, models: dict[str, Path]) -> None:
    """Ten prompts that share 1,900 tokens add a block or two each at most."""
    kvbus.start(
        "--model", f"tiny={models['tiny']}", "--block-size", "64",
        *store_arguments("disk", kvbus),
    )  # fmt: skip
    for number in range(10):
        kvbus.generate("tiny", f"{TEXT} {number} " + "and so on " * 20)
        kvbus.wait_commits(number + 1)
    shared = int(kvbus.turns()[1]["slot_tokens"]) // 64
    total = sum(int(turn["prompt_tokens"]) // 64 for turn in kvbus.turns())
    blocks = kvbus.status()["store"]["blocks"]
    assert shared > 25
    assert total - 9 * shared <= blocks <= total - 9 * shared + 10


def test_a_save_without_a_new_block_is_skipped(
    kvbus: Kvbus, models: dict[str, Path]
) -> None:
    """The same prompt again writes nothing and saves nothing."""
    kvbus.start("--model", f"tiny={models['tiny']}", *store_arguments("disk", kvbus))
    for number in range(3):
        kvbus.generate("tiny", TEXT)
        kvbus.wait_commits(number + 1)
    text = kvbus.metric("kvbus_commits_total")
    assert text == 3
    assert kvbus.metric("kvbus_phase_seconds_count") > 0
    before = kvbus.metric("kvbus_committed_bytes_total")
    kvbus.generate("tiny", TEXT)
    kvbus.wait_commits(4)
    assert kvbus.metric("kvbus_committed_bytes_total") == before > 0


def test_models_of_one_shape_do_not_share(
    kvbus: Kvbus, models: dict[str, Path]
) -> None:
    """Another finetune of the same shape never gets the first one's KV."""
    kvbus.start(
        "--model", f"tiny={models['tiny']}", "--model", f"other={models['other']}",
        "--restore", "always", *store_arguments("disk", kvbus),
    )  # fmt: skip
    kvbus.generate("tiny", TEXT)
    kvbus.wait_commits(1)
    kvbus.generate("other", TEXT)
    kvbus.wait_commits(2)
    assert kvbus.turns()[-1]["restored_tokens"] == "0"
    assert kvbus.metric("kvbus_restored_bytes_total") == 0


@pytest.mark.parametrize(
    "changed",
    [("--kv-type", "q8_0"), ("--flash-attn", "off"), ("--block-size", "64")],
)
def test_another_layout_does_not_share(
    kvbus: Kvbus, models: dict[str, Path], changed: tuple[str, str]
) -> None:
    """KV of another type, layout or block size is a miss."""
    base = ("--model", f"tiny={models['tiny']}", "--restore", "always")
    store = store_arguments("disk", kvbus)
    kvbus.start(*base, *store)
    kvbus.generate("tiny", TEXT)
    kvbus.wait_commits(1)
    kvbus.stop()
    kvbus.start(*base, *store, *changed)
    kvbus.generate("tiny", TEXT)
    assert kvbus.turns()[-1]["restored_tokens"] == "0"


def test_another_number_of_slots_and_context_shares(
    kvbus: Kvbus, models: dict[str, Path]
) -> None:
    """The composer adapts: slots and context are not part of the key."""
    base = ("--model", f"tiny={models['tiny']}", "--restore", "always")
    store = store_arguments("disk", kvbus)
    kvbus.start(*base, *store, "--slots", "3")
    kvbus.generate("tiny", TEXT + "One?")
    kvbus.wait_commits(1)
    kvbus.stop()
    kvbus.start(*base, *store, "--slots", "2", "--ctx", "4096")
    kvbus.generate("tiny", TEXT + "Two?")
    turn = kvbus.turns()[-1]
    assert int(turn["reused_tokens"]) == int(turn["restored_tokens"]) > 1700


def test_restores_can_be_switched_off(kvbus: Kvbus, models: dict[str, Path]) -> None:
    """With --restore never blocks are stored but not restored."""
    kvbus.start(
        "--model", f"tiny={models['tiny']}", "--restore", "never",
        *store_arguments("disk", kvbus),
    )  # fmt: skip
    kvbus.generate("tiny", TEXT)
    kvbus.wait_commits(1)
    restart_runner(kvbus)
    kvbus.generate("tiny", TEXT)
    turn = kvbus.turns()[-1]
    assert (turn["decision"], turn["reused_tokens"]) == ("recompute", "0")
    assert kvbus.metric("kvbus_store_lookups_total") == 2
